"""The flat layouts of a model's blocks, with the working dtype of every parameter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatrain.errors import ModelError
from megatrain.layout.blocks import BlockLayout, ParameterSpec, lay_out
from megatrain.model.blocks import Block
from megatrain.model.weights.built import built_in
from megatrain.model.weights.kept import encoding_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTED = re.compile(
    r"^base_model\.model\.|\.base_layer(?=\.)|\.modules_to_save\.\w+|\.original_module(?=\.)"
)
"""The parts that PEFT adds to the name of a parameter."""


def lay_out_blocks(model: PreTrainedModel, blocks: Sequence[Block], *, splits: bool) -> list[BlockLayout]:
    """Lay out every block.

    Args:
        model: The model, on any device.
        blocks: All of its blocks.
        splits: Weights are kept as bf16 and a remainder, but for those that the model keeps in fp32;
            otherwise all are fp32.
    """
    keeps = _KeptInFp32(model) if splits else None

    def dtype(name: str, parameter: nn.Parameter) -> torch.dtype:
        return torch.float32 if keeps is None or keeps(name, parameter) else torch.bfloat16

    return [
        lay_out(
            ParameterSpec(
                name=name,
                shape=block.shape_of(parameter),
                dtype=dtype(name, parameter),
                is_trained=parameter.requires_grad,
                rows=block.rows,
                encoding=encoding_of(parameter),
            )
            for name, parameter in block.parameters.items()
        )
        for block in blocks
    ]


class _KeptInFp32:
    """The parameters that keep fp32 in a bf16 model: those that transformers keeps, and fp32 ones among bf16.

    In a model that is in fp32 as a whole these are the ones that its class makes in fp32 whatever the dtype.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        names = sorted(model._keep_in_fp32_modules_strict or ())
        self._pattern = re.compile("|".join(rf"((^|\.){name}($|\.))" for name in names)) if names else None
        dtypes = {parameter.dtype for parameter in model.parameters()}
        self._is_mixed = torch.float32 in dtypes and len(dtypes) > 1
        self._built: frozenset[str] = frozenset()
        if dtypes == {torch.float32}:
            with suppress(ModelError):  # a class of the caller's is as it is
                built = built_in(model, torch.bfloat16).named_parameters()
                self._built = frozenset(n for n, parameter in built if parameter.dtype == torch.float32)

    def __call__(self, name: str, parameter: nn.Parameter) -> bool:
        if self._pattern is not None and self._pattern.search(name):
            return True
        if self._built and _ADAPTED.sub("", name) in self._built:
            return True
        return self._is_mixed and parameter.dtype == torch.float32
