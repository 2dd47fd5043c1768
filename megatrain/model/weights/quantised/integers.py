"""Weights of 2, 4 or 8 bits in int32 words: GPTQ, AWQ, and the packed ones of compressed-tensors.

Sources: AutoGPTQ and GPTQModel (`qweight` along the inputs, zero points less one in version 1), AutoAWQ's
GEMM (`qweight` along the outputs, in the order of its kernel), compressed-tensors' `pack_quantized`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatrain.errors import ModelError
from megatrain.model.weights.convert import Making, Source
from megatrain.model.weights.quantised.arithmetic import by_rows, of_each_row, unpacked
from megatrain.model.weights.quantised.quantisation import Parts, Quantisation, part, require_shape, value_of

_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""The place in a word of each of eight codes that follow one another."""


class Gptq(Quantisation):
    """GPTQ: a word holds codes of one output, and inputs may be in groups by `g_idx`."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """Take the `quantization_config` of a checkpoint.

        Raises:
            ModelError: Its codes are of a size that does not divide a word.
        """
        self._bits = value_of(values, "bits", lambda bits: bits in (2, 4, 8), where)
        self._group_size = _size_of_groups(values)
        self._offset = 0 if values.get("checkpoint_format") == "gptq_v2" else 1

    def weight_of(self, key: str, sources: Mapping[str, Source]) -> Source | None:
        """Return the matrix whose codes a tensor is; see `Quantisation`."""
        parts = _words_with(key, sources)
        if parts is None:
            return None
        words, scales, zeros = parts.values()
        per_word = 32 // self._bits
        (inputs, outputs), groups = (words.shape[0] * per_word, words.shape[1]), scales.shape[0]
        require_shape(scales, (groups, outputs))
        require_shape(zeros, (groups, -(-outputs // per_word)))
        name = key.removesuffix("qweight")
        _take_groups(parts, sources, name + "g_idx", groups=groups, inputs=inputs, size=self._group_size)
        make = partial(_decoded_gptq, shape=(outputs, inputs), bits=self._bits, offset=self._offset)
        return _source(name, words, (outputs, inputs), Making(parts, make))


class Awq(Quantisation):
    """AWQ for its GEMM kernel: a word holds codes of one input."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """Take the `quantization_config` of a checkpoint.

        Raises:
            ModelError: It is for another kernel, or not of 4 bits.
        """
        value_of(values, "bits", lambda bits: bits == 4, where)
        self._group_size = _size_of_groups(values)
        value_of(values, "version", lambda found: str(found or "gemm").lower() == "gemm", where)

    def weight_of(self, key: str, sources: Mapping[str, Source]) -> Source | None:
        """Return the matrix whose codes a tensor is; see `Quantisation`."""
        parts = _words_with(key, sources)
        if parts is None:
            return None
        words, scales, zeros = parts.values()
        inputs, outputs = words.shape[0], 8 * words.shape[1]
        groups = scales.shape[0]
        require_shape(scales, (groups, outputs))
        require_shape(zeros, (groups, words.shape[1]))
        _require_groups(scales, groups, inputs, self._group_size)
        making = Making(parts, partial(_decoded_awq, shape=(outputs, inputs)))
        return _source(key.removesuffix("qweight"), words, (outputs, inputs), making)


def _words_with(key: str, sources: Mapping[str, Source]) -> dict[str, Source] | None:
    """Return the words, scales and zero points of GPTQ and AWQ; None: the tensor is no words.

    Raises:
        ModelError: The words are no matrix, or a part is missing.
    """
    words = sources[key]
    if not key.endswith(".qweight"):
        return None
    if len(words.shape) != 2:
        raise ModelError(f"{words.file}: {words.key} has shape {list(words.shape)}, and words are matrices")
    name = key.removesuffix("qweight")
    others = {"scales": f"{name}scales", "zeros": f"{name}qzeros"}
    return {"codes": words, **{role: part(sources, other, words) for role, other in others.items()}}


def _take_groups(
    parts: dict[str, Source],
    sources: Mapping[str, Source],
    key: str,
    *,
    groups: int,
    inputs: int,
    size: int | None,
) -> None:
    """Take the group of each input to the parts where files have it; else refuse groups that do not fit.

    Args:
        parts: The parts of the weight.
        sources: The tensors of the files.
        key: The key of the groups.
        groups: The number of groups.
        inputs: The number of inputs.
        size: The inputs of a group, as the configuration says; None: it does not.

    Raises:
        ModelError: The groups do not fit the inputs.
    """
    if key in sources:
        parts["groups"] = sources[key]
        require_shape(sources[key], (inputs,))
    else:
        _require_groups(parts["scales"], groups, inputs, size)


def _size_of_groups(values: Mapping[str, Any]) -> int | None:
    """Return the inputs of a group; None: all are in one, or the configuration does not say."""
    found = values.get("group_size", values.get("q_group_size"))
    return found if isinstance(found, int) and found > 0 else None


def _require_groups(scales: Source, groups: int, inputs: int, size: int | None) -> None:
    """Refuse groups that are not equally long, or not as long as the configuration says.

    Raises:
        ModelError: They are not.
    """
    if groups == 0 or inputs % groups or (size is not None and groups > 1 and groups * size != inputs):
        of_size = "" if size is None else f" of {size}"
        raise ModelError(
            f"{scales.file}: {scales.key} has {groups} groups{of_size}, and the weight {inputs} inputs"
        )


def packed_weight(
    key: str,
    sources: Mapping[str, Source],
    shape: tuple[int, int],
    *,
    bits: int,
    is_symmetric: bool,
    group_size: int | None,
) -> Source:
    """Return the weight of compressed-tensors' words, which hold codes of one output.

    Args:
        key: The key of the words, (rows, words).
        sources: The tensors of the files.
        shape: (rows, columns) of the weight.
        bits: The bits of a code.
        group_size: The columns of a group; None: as the scales say.
        is_symmetric: Whether codes are around half of their range; else zero points are given.

    Raises:
        ModelError: The parts do not belong together.
    """
    words, name = sources[key], key.removesuffix("weight_packed")
    scales = part(sources, name + "weight_scale", words)
    (rows, columns), per_word = shape, 32 // bits
    require_shape(words, (rows, -(-columns // per_word)))
    groups = scales.shape[-1] if len(scales.shape) == 2 else 1
    require_shape(scales, (rows, groups), (1, groups), (1,))
    parts = {"codes": words, "scales": scales}
    if not is_symmetric:
        parts["zeros"] = part(sources, name + "weight_zero_point", words)
        require_shape(parts["zeros"], (-(-rows // per_word), groups))
    _take_groups(parts, sources, name + "weight_g_idx", groups=groups, inputs=columns, size=group_size)
    return _source(name, words, shape, Making(parts, partial(_decoded_packed, shape=shape, bits=bits)))


def _source(name: str, words: Source, shape: tuple[int, int], making: Making) -> Source:
    if words.dtype not in ("I32", "U32"):
        raise ModelError(
            f"{words.file}: {words.key} has dtype {words.dtype}; its codes are in words of int32"
        )
    return Source(key=name + "weight", file=words.file, shape=shape, dtype="BF16", making=making)


def _groups(parts: Parts, length: int, groups: int) -> Tensor:
    """Return the group of each input.

    Raises:
        ModelError: A group is none of the scales'.
    """
    found = parts["groups"].long() if "groups" in parts else None
    if found is None or (len(found) and bool((found < 0).all())):  # -1 for all: they are in order
        return torch.arange(length) // (length // groups)
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < groups:
        raise ModelError(f"g_idx names group {int(found.max())}, and there are {groups} groups of scales")
    return found


def _decoded(
    parts: Parts, shape: tuple[int, int], codes_of: Callable[[slice], Tensor], zeros: Tensor, scales: Tensor
) -> Tensor:
    """Return (code - zero point) * scale.

    Args:
        parts: The tensors, of which the groups of inputs are read.
        shape: (rows, inputs) of the weight.
        codes_of: The function that returns the codes of some rows, (number, inputs).
        zeros: (rows, groups).
        scales: (rows, groups) in fp32.
    """
    group = _groups(parts, shape[1], scales.shape[1])

    def rows(_: int, piece: slice) -> Tensor:
        return (codes_of(piece) - zeros[piece][:, group]) * scales[piece][:, group]

    return by_rows(shape, rows)


def _decoded_gptq(parts: Parts, shape: tuple[int, int], bits: int, offset: int) -> Tensor:
    outputs, inputs = shape
    zeros = (unpacked(parts["zeros"], bits, outputs).T + offset) & ((1 << bits) - 1)  # all ones are 0

    def codes_of(piece: slice) -> Tensor:
        return unpacked(parts["codes"][:, piece].T, bits, inputs)

    return _decoded(parts, shape, codes_of, zeros, parts["scales"].float().T)


def _decoded_awq(parts: Parts, shape: tuple[int, int]) -> Tensor:
    def in_order(words: Tensor) -> Tensor:
        codes = unpacked(words, 4, 8 * words.shape[1])
        return codes.view(len(words), -1, 8)[:, :, _AWQ_ORDER].flatten(1).T

    def codes_of(piece: slice) -> Tensor:
        first, last = piece.start // 8, -(-piece.stop // 8)
        return in_order(parts["codes"][:, first:last])[piece.start - 8 * first : piece.stop - 8 * first]

    return _decoded(parts, shape, codes_of, in_order(parts["zeros"]), parts["scales"].float().T)


def _decoded_packed(parts: Parts, shape: tuple[int, int], bits: int) -> Tensor:
    height, width = shape
    scales = of_each_row(parts["scales"], height)
    zeros = torch.full((height, scales.shape[1]), 1 << (bits - 1), dtype=torch.int32)
    if "zeros" in parts:  # they are packed along the rows
        zeros = unpacked(parts["zeros"].T, bits, height).T

    def codes_of(piece: slice) -> Tensor:
        return unpacked(parts["codes"][piece], bits, width)

    return _decoded(parts, shape, codes_of, zeros, scales)
