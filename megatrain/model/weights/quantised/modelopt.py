"""Checkpoints of NVIDIA's ModelOpt: NVFP4, or FP8 with one scale for each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain.model.weights.convert import Source
from megatrain.model.weights.quantised.fp8 import Fp8
from megatrain.model.weights.quantised.nvfp4 import nvfp4_weight
from megatrain.model.weights.quantised.quantisation import value_of


class ModelOpt(Fp8):
    """What a weight is, its own tensors say: bytes with a `weight_scale_2` are NVFP4, and FP8 is as ever."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """Take the `quantization_config`, or the part `quantization` of hf_quant_config.json.

        Raises:
            ModelError: Its algorithm is another one.
        """
        super().__init__({}, where)
        value_of(
            values, "quant_algo", lambda found: found in (None, "NVFP4", "FP8", "MIXED_PRECISION"), where
        )

    def weight_of(self, key: str, sources: Mapping[str, Source]) -> Source | None:
        """Return the weight whose codes a tensor is; see `Quantisation`."""
        codes, whole = sources[key], f"{key}_scale_2"
        if codes.dtype == "U8" and whole in sources:
            return nvfp4_weight(key, codes, sources, scales=f"{key}_scale", whole=whole, divides=False)
        return super().weight_of(key, sources)
