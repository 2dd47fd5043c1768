"""The formats of quantised checkpoints that are read, by the `quant_method` of their configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatrain.errors import ModelError
from megatrain.model.weights.quantised.bitsandbytes import BitsAndBytes
from megatrain.model.weights.quantised.compressed_tensors import CompressedTensors
from megatrain.model.weights.quantised.fp8 import Fp8
from megatrain.model.weights.quantised.integers import Awq, Gptq
from megatrain.model.weights.quantised.modelopt import ModelOpt
from megatrain.model.weights.quantised.mxfp4 import Mxfp4
from megatrain.model.weights.quantised.quantisation import Quantisation, levels
from megatrain.model.weights.reading import read_json

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
    found = _settings_in(values)
    return None if found is None else _made(found[1], f"{where}: config.json has a {found[0]}", where)


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
    found = _settings_in(_read(directory / "config.json"))
    method = found[1].get("quant_method") if found is not None and isinstance(found[1], dict) else None
    return str(method) if method else None


def _settings_in(values: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return what the values of a config.json say of quantisation, with its key; None: nothing."""
    settings = ((key, level.get(key)) for level in levels(values) for key in CONFIG_KEYS)
    return next(((key, found) for key, found in settings if found), None)


def _made(values: Any, what: str, where: str) -> Quantisation:
    given = values.get("quant_method") if isinstance(values, dict) else None
    method = given if isinstance(given, str) else None
    if (
        method not in FORMATS
        and isinstance(values, dict)
        and {"load_in_4bit", "load_in_8bit"} & values.keys()
    ):
        method = "bitsandbytes"
    if method not in FORMATS:
        named = "" if given is None else f" ({method or repr(given)})"
        raise ModelError(
            f"{what}{named}, and quantised weights are read of {', '.join(FORMATS)}; give the checkpoint "
            "that was quantised, or a copy in bf16"
        )
    return FORMATS[method](values, where)


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    values = read_json(file)
    return values if isinstance(values, dict) else {}
