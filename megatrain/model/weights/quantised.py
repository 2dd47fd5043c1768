"""Checkpoints whose weights are quantised: refused, with the lines that make a copy that can be trained."""

from __future__ import annotations

from typing import Any

from megatrain.errors import ModelError

_KEYS = ("quantization_config", "compression_config")

_CONFIGS = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""The class of transformers, by method, that turns weights back into bf16 while they are loaded."""


def refuse_quantised(values: dict[str, Any], where: str) -> None:
    """Refuse the values of a config.json, or a part of them, that say that weights are quantised.

    Args:
        values: The values as they were read.
        where: The model, as it was given.

    Raises:
        ModelError: The values say so.
    """
    for key in _KEYS:
        found = values.get(key)
        if not found:
            continue
        method = found.get("quant_method") if isinstance(found, dict) else None
        kind = f" ({method})" if isinstance(method, str) else ""
        text = f"{where}: config.json has a {key}{kind}, and exact training begins with bf16 or fp32 weights"
        if method not in _CONFIGS:
            raise ModelError(f"{text}; give the checkpoint that was quantised, or a copy in bf16")
        raise ModelError(f"{text}; give a copy in bf16, which this makes: {copy_lines(where, method)}")


def copy_lines(where: str, method: str) -> str:
    """Return the Python with which transformers writes a copy of a checkpoint in bf16, in `DIR`.

    Without `save_original_format=False`, transformers writes weights in bf16 under the names of quantised
    ones, and a model that is loaded from there has random weights in their place.
    """
    kind = _CONFIGS[method]
    return (
        f"from transformers import AutoModelForCausalLM, AutoTokenizer, {kind}; "
        f"AutoModelForCausalLM.from_pretrained({where!r}, dtype='bfloat16', quantization_config={kind}("
        "dequantize=True)).save_pretrained('DIR', save_original_format=False); "
        f"AutoTokenizer.from_pretrained({where!r}).save_pretrained('DIR')"
    )
