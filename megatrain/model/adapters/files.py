"""The names of the files in which PEFT saves adapters."""

from __future__ import annotations

from pathlib import Path

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds adapters and no model."""
    return (directory / CONFIG_NAME).is_file()
