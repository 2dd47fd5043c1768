"""The names of the files in which PEFT saves adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"


def encode_config(values: Mapping[str, Any]) -> bytes:
    """Return the content of adapter_config.json."""
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds adapters and no model."""
    return (directory / CONFIG_NAME).is_file()
