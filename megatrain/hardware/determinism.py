"""Results that are the same, bit for bit, in every run on the same device with the same software.

torch has one switch for it, which holds for the whole process and on every device. What it does to each
attention kernel, and what it leaves to the vendor's libraries (`Vendor.environment`, `Vendor.repeats`), is in
docs/training.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

from megatrain.errors import ConfigError
from megatrain.hardware.accelerators import vendor_of

if TYPE_CHECKING:
    import torch

_NO_FORM = re.compile(r"^(.+?) does not have a deterministic implementation")
_open: dict[str, tuple[int, AbstractContextManager[object]]] = {}
"""Settings of the process that hold now, and how many hold them."""
_TOO_LATE = "you must set an environment variable before running"


def set_environment(device: torch.device) -> None:
    """Set what the libraries of a device read when they start: call this before the first product there.

    Raises:
        ConfigError: A variable has another value, with which results may differ.
    """
    if device.type == "cpu":
        return
    for name, values in vendor_of(device).environment.items():
        found = os.environ.setdefault(name, values[0])
        if found not in values:
            raise ConfigError(
                f"train.deterministic is true, but the environment has {name}={found}, with which results "
                f"may differ from run to run; unset it, or use {' or '.join(values)}"
            )


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Let every operation of the process take a form that gives the same bits in every run.

    An operation that has none raises a RuntimeError: see `why_not_deterministic`. Several may be open, and
    end in any order: the last one to end puts back what was there before the first.

    Raises:
        ConfigError: The environment is refused, as by `set_environment`.
    """
    set_environment(device)
    with _shared("torch", _switched), ExitStack() as settings:
        if device.type != "cpu":
            settings.enter_context(_shared(device.type, vendor_of(device).repeats))
        yield


@contextmanager
def in_full(device: torch.device) -> Iterator[None]:
    """Let no product of fp32 be computed in fewer bits, whatever the process is set to (TF32 on NVIDIA's)."""
    if device.type == "cpu":
        yield
        return
    with _shared(f"{device.type} in full", vendor_of(device).in_full):
        yield


@contextmanager
def _switched() -> Iterator[None]:
    import torch

    held = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # Every torch.empty would be written to, host arenas that are larger than RAM among them, to no use here:
    # what is read before it is written would be a bug, which the checked lanes look for.
    held_fill = torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(held[0], warn_only=held[1])
        torch._C._set_deterministic_fill_uninitialized_memory(held_fill)


@contextmanager
def _shared(key: str, make: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Enter a setting of the process with the first who asks for it, and leave it with the last."""
    users, setting = _open.get(key, (0, None))
    if setting is None:
        setting = make()
        setting.__enter__()
    _open[key] = users + 1, setting
    try:
        yield
    finally:
        users, setting = _open.pop(key)
        if users > 1:
            _open[key] = users - 1, setting
        else:
            setting.__exit__(None, None, None)


def why_not_deterministic(error: BaseException, device: torch.device) -> str | None:
    """Return what an error inside `deterministic` is about, and the way out; None: something else."""
    if not isinstance(error, RuntimeError) or not str(error):
        return None
    if _TOO_LATE in str(error):
        needed = " ".join(f"{name}={values[0]}" for name, values in vendor_of(device).environment.items())
        return f"the {device.type} device was used before that was known; set {needed} before Python starts"
    found = _NO_FORM.match(str(error))
    if found is None:
        return None
    return (
        f"{found[1]} has no form on the {device.type} device that gives the same bits in every run; use "
        "train.deterministic=false, or another implementation of it (model.attn_implementation, "
        "model.kernels)"
    )
