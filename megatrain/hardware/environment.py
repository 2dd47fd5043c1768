"""What the libraries of accelerators read from the environment when they start, and how runs want it."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from megatrain.errors import warn_once
from megatrain.hardware.accelerators import VENDORS, vendor_of

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

_OTHER_NAMES = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF"}
"""Older names, which torch reads too: what is said under one of them is the user's own choice."""


def set_for_runs(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not: call this before torch uses an accelerator. Child processes inherit it."""
    for vendor in VENDORS.values():
        for name, value in vendor.for_runs.items():
            if _is_unset(name, environment):
                environment[name] = value


def warn_of_unset(device: torch.device) -> None:
    """Warn of what the process that owns a device should have set; it is too late for a library to do so."""
    unset = [
        f"{name}={value}"
        for name, value in ({} if device.type == "cpu" else vendor_of(device).for_runs).items()
        if _is_unset(name, os.environ)
    ]
    if unset:
        warn_once(
            _log,
            f"the environment has no {' and no '.join(unset)}, with which memory is less fragmented and "
            "copies run beside each other; set what is missing before Python starts",
        )


def _is_unset(name: str, environment: MutableMapping[str, str]) -> bool:
    return not {name, _OTHER_NAMES.get(name, name)} & environment.keys()
