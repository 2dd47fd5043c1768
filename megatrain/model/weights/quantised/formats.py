"""The formats of quantised checkpoints that are read, by the `quant_method` of their configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatrain.errors import ModelError, first_line
from megatrain.model.weights.quantised.bitsandbytes import BitsAndBytes
from megatrain.model.weights.quantised.compressed_tensors import CompressedTensors
from megatrain.model.weights.quantised.fp8 import Fp8
from megatrain.model.weights.quantised.integers import Awq, Gptq
from megatrain.model.weights.quantised.modelopt import ModelOpt
from megatrain.model.weights.quantised.mxfp4 import Mxfp4
from megatrain.model.weights.quantised.quantisation import Quantisation, levels

FORMATS: Mapping[Any, Callable[[Mapping[str, Any], str], Quantisation]] = {
    "mxfp4": Mxfp4,
    "fp8": Fp8,
    "fbgemm_fp8": Fp8,
    "compressed-tensors": CompressedTensors,
    "modelopt": ModelOpt,
    "modelopt_fp4": ModelOpt,
    "gptq": Gptq,
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
}

CONFIG_KEYS = ("quantization_config", "compression_config")

OF_MODELOPT = "hf_quant_config.json"
"""The file of ModelOpt, which older checkpoints have in place of a `quantization_config`."""


def quantisation_in(values: Mapping[str, Any], where: str) -> Quantisation | None:
    """Return how weights are quantised by the values of a config.json; None: they are not.

    Args:
        values: The values as they were read.
        where: The model, as it was given.

    Raises:
        ModelError: They are quantised in a way that is not read.
    """
    for level in levels(values):
        for key in CONFIG_KEYS:
            found = level.get(key)
            if found:
                return _made(found, f"{where}: config.json has a {key}", where)
    return None


def quantisation_of(directory: Path) -> Quantisation | None:
    """Return how the weights of a model directory are quantised; None: they are not.

    Raises:
        ModelError: They are quantised in a way that is not read, or a file cannot be read as JSON.
    """
    found = quantisation_in(_read(directory / "config.json"), str(directory))
    if found is not None:
        return found
    values = _read(directory / OF_MODELOPT).get("quantization")
    return None if not values else _made({"quant_method": "modelopt"} | values, OF_MODELOPT, str(directory))


def method_of(directory: Path) -> str | None:
    """Return the `quant_method` of a model directory; None: it has none."""
    for level in levels(_read(directory / "config.json")):
        for key in CONFIG_KEYS:
            if isinstance(level.get(key), dict):
                found = level[key].get("quant_method")
                return str(found) if found else None
    return None


def _made(values: Any, what: str, where: str) -> Quantisation:
    method = values.get("quant_method") if isinstance(values, dict) else None
    if (
        method not in FORMATS
        and isinstance(values, dict)
        and {"load_in_4bit", "load_in_8bit"} & values.keys()
    ):
        method = "bitsandbytes"
    if method not in FORMATS:
        named = f" ({method})" if isinstance(method, str) else ""
        raise ModelError(
            f"{what}{named}, and quantised weights are read of {', '.join(FORMATS)}; give the checkpoint "
            "that was quantised, or a copy in bf16"
        )
    return FORMATS[method](values, where)


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {first_line(error)}") from error
    return values if isinstance(values, dict) else {}
