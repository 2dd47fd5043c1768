"""Checkpoints of compressed-tensors, as llm-compressor writes them: packed integers, FP8, INT8 and NVFP4.

Source: compressed-tensors, `compressors/`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from megatrain.errors import ModelError
from megatrain.model.weights.convert import Making, Source
from megatrain.model.weights.quantised.arithmetic import by_rows, of_each_row, scaled
from megatrain.model.weights.quantised.fp8 import CODES, fp8_weight
from megatrain.model.weights.quantised.integers import packed_weight
from megatrain.model.weights.quantised.nvfp4 import nvfp4_weight
from megatrain.model.weights.quantised.quantisation import Parts, Quantisation, part, require_shape

_FORMATS = (
    *("pack-quantized", "float-quantized", "naive-quantized", "int-quantized", "nvfp4-pack-quantized"),
    *("mixed-precision", "dense"),
)


class CompressedTensors(Quantisation):
    """What a weight is, its own tensors say; the configuration says how many bits packed ones have."""

    left_out = (
        *(".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale"),
        *(".k_scale", ".v_scale", ".q_scale", ".weight_zero_point", ".weight_shape"),
    )

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """Take the `quantization_config` of a checkpoint.

        Raises:
            ModelError: It has a format that is not read, or its weights are sparse or rotated.
        """
        groups = (values.get("config_groups") or {}).values()
        formats = {values.get("format"), *(group.get("format") for group in groups)} - {None}
        for found in formats - set(_FORMATS):
            raise ModelError(f"{where}: quantization_config.format is {found!r}, which is not read")
        for name in ("sparsity_config", "transform_config"):
            inside = values.get(name)
            if inside and inside.get("format", inside.get("config_groups")) not in (None, "dense", {}):
                raise ModelError(f"{where}: quantization_config has a {name}, which is not read")
        weights = [group["weights"] for group in groups if group.get("weights")]
        packed = [each for each in weights if each.get("type", "int") == "int"]
        self._kinds = {(each.get("num_bits"), bool(each.get("symmetric", True))) for each in packed}
        if any(bits not in (2, 4, 8) for bits, _ in self._kinds):
            raise ModelError(f"{where}: quantization_config has weights of {sorted(self._kinds)[0][0]} bits")
        self._blocks = [
            _block(each["block_structure"], where) for each in weights if each.get("block_structure")
        ]
        sizes = {each.get("group_size") for each in packed if each.get("group_size")}
        self._group_size = sizes.pop() if len(sizes) == 1 else None
        self._where = where

    def weight_of(self, key: str, sources: Mapping[str, Source]) -> Source | None:
        """Return the weight whose codes a tensor is; see `Quantisation`."""
        codes = sources[key]
        if key.endswith(".weight_packed"):
            name = key.removesuffix("_packed")
            if codes.dtype == "U8":
                whole = f"{name}_global_scale"
                return nvfp4_weight(name, codes, sources, scales=f"{name}_scale", whole=whole, divides=True)
            return self._packed(key, sources)
        if not key.endswith(".weight") or codes.dtype not in (*CODES, "I8"):
            return None
        scales = part(sources, f"{key}_scale", codes)
        if codes.dtype in CODES:
            return fp8_weight(codes, scales, self._block_of(codes, scales))
        return _int8_weight(codes, scales, sources)

    def _block_of(self, codes: Source, scales: Source) -> tuple[int, int] | None:
        """Return the size of blocks, of those that the configuration names, that gives so many scales."""
        for rows, columns in self._blocks:
            grid = -(-codes.shape[-2] // rows), -(-codes.shape[-1] // columns)
            if scales.shape[-2:] == grid:
                return rows, columns
        return next(iter(self._blocks), None)

    def _packed(self, key: str, sources: Mapping[str, Source]) -> Source:
        shape_key = key.removesuffix("packed") + "shape"
        shape = self._shape_in(part(sources, shape_key, sources[key]))
        per_word = {bits: -(-shape[1] // (32 // bits)) for bits, _ in self._kinds}
        words = sources[key].shape[-1]
        fitting = [kind for kind in self._kinds if per_word[kind[0]] == words]
        has_zeros = key.removesuffix("packed") + "zero_point" in sources
        fitting = [kind for kind in fitting if kind[1] is not has_zeros] or fitting
        if not fitting:
            raise ModelError(
                f"{sources[key].file}: {key} has {words} words for {shape[1]} columns, which no number of "
                f"bits in the quantization_config of {self._where} gives"
            )
        bits, is_symmetric = fitting[0]
        return packed_weight(
            key, sources, shape, bits=bits, is_symmetric=is_symmetric, group_size=self._group_size
        )

    def _shape_in(self, source: Source) -> tuple[int, int]:
        """Read the shape of a packed weight, two numbers.

        Raises:
            ModelError: They are not two positive numbers.
        """
        found = self.read(source).flatten().tolist()
        if len(found) != 2 or not all(isinstance(each, int) and each > 0 for each in found):
            raise ModelError(f"{source.file}: {source.key} is {json.dumps(found)}, and not two lengths")
        return found[0], found[1]


def _block(found: Any, where: str) -> tuple[int, int]:
    """Return the rows and columns of a block, which are two numbers, or in words `128x128`.

    Raises:
        ModelError: They are neither.
    """
    sizes = found.split("x") if isinstance(found, str) else found
    try:
        rows, columns = (int(size) for size in sizes)
    except (TypeError, ValueError):
        rows = columns = 0
    if min(rows, columns) < 1:
        raise ModelError(f"{where}: quantization_config has a block_structure {found!r}, which is not read")
    return rows, columns


def _int8_weight(codes: Source, scales: Source, sources: Mapping[str, Source]) -> Source:
    if len(codes.shape) != 2:
        raise ModelError(
            f"{codes.file}: {codes.key} has shape {list(codes.shape)}, and INT8 weights are matrices"
        )
    rows, columns = codes.shape
    groups = scales.shape[-1] if len(scales.shape) == 2 else 1
    require_shape(scales, (rows, groups), (1, 1), (1,), ())
    parts = {"codes": codes, "scales": scales}
    zeros = f"{codes.key}_zero_point"
    if zeros in sources:
        parts["zeros"] = sources[zeros]
        require_shape(sources[zeros], scales.shape)
    make = partial(_decoded_int8, shape=(rows, columns))
    return Source(key=codes.key, file=codes.file, shape=codes.shape, dtype="BF16", making=Making(parts, make))


def _decoded_int8(parts: Parts, shape: tuple[int, int]) -> Tensor:
    scales = of_each_row(parts["scales"], shape[0])
    zeros = of_each_row(parts["zeros"], shape[0]) if "zeros" in parts else None
    length = -(-shape[1] // scales.shape[1])

    def rows(_: int, piece: slice) -> Tensor:
        codes = parts["codes"][piece].float()
        if zeros is not None:
            codes -= zeros[piece].repeat_interleave(length, dim=1)[:, : shape[1]]
        return scaled(codes, scales[piece], length)

    return by_rows(shape, rows)
