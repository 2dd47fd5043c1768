"""Plans how the tensors of a checkpoint become the tensors of a model, by transformers' own key conversion.

A plan is made from names, shapes and dtypes alone and is checked completely before anything is read. What
transformers fuses (the matrices of experts, stacked and concatenated) is planned as one write per source
into a region of its target; every other conversion runs transformers' own operations, one target at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from megatrain.errors import ModelError, first_line
from megatrain.layout.tensor_file import positions
from megatrain.model.weights.encoding import Region, WeightEncoding


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A tensor of a checkpoint, as its file's header describes it."""

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """The dtype as safetensors spells it, such as BF16."""
    making: Making | None = None
    """How it is made of other tensors; None: it is a tensor of the file, under this key."""

    @property
    def files(self) -> list[Path]:
        """Return the files that it is read from."""
        parts = [self] if self.making is None else self.making.parts.values()
        return list(dict.fromkeys(part.file for part in parts))


@dataclass(frozen=True, slots=True)
class Making:
    """How a tensor is made of several of a checkpoint, such as the codes and scales of a quantised weight."""

    parts: Mapping[str, Source]
    make: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
    """The function that is given the tensors of the parts."""
    encode: Callable[[Mapping[str, torch.Tensor], torch.Tensor], dict[str, torch.Tensor]] | None = None
    """The function that returns new codes and scales of a value, given the old ones; None: nobody does."""
    encoding: WeightEncoding | None = None
    """How the parts are the tensor, if a model can keep them in its place; None: it cannot."""


@dataclass(kw_only=True, slots=True)
class Conversion:
    """Sources that together make one target, or several when an operation splits."""

    target: str
    """The target, or the first of them."""
    converter: WeightConverter | None
    """The converter; None where a source is the target."""
    sources: list[tuple[str, Source]] = field(default_factory=list)
    """Pattern of the converter that matched, source; experts in numerical order."""
    regions: list[Region] | None = None
    """The place of each source in the target; None where the operations have to run."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of each target."""

    @property
    def where(self) -> str:
        """Name the source, or the first of several, and its file."""
        first = self.sources[0][1]
        more = f" and {len(self.sources) - 1} more" if len(self.sources) > 1 else ""
        return f"{first.file}: {first.key}{more}"

    def run(self, model: PreTrainedModel, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Apply the operations to the tensors of the sources and return the targets."""
        if self.converter is None:
            return {self.target: tensors[0]}
        converter = copy.deepcopy(self.converter)
        for (pattern, source), tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(self.target, source.key, pattern, tensor)
        targets = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in targets.items()}


def plan_conversions(
    model: PreTrainedModel, sources: Mapping[str, Source]
) -> tuple[list[Conversion], list[Source]]:
    """Match the tensors of a checkpoint to those of a model.

    Leaves on the model which conversions were used, as `from_pretrained` does: saving reverts exactly those.

    Returns:
        The conversions, in the order of their keys; the tensors that the model has no place for.

    Raises:
        ModelError: Two sources claim one target, or sources do not fit together.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    state = model.state_dict()
    conversions: dict[str, Conversion] = {}
    unexpected = []
    for key in sorted(sources, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if target not in state and key in state:
            target, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
        if target not in state:
            unexpected.append(sources[key])
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        conversion = conversions.setdefault(target, Conversion(target=target, converter=converter))
        if conversion.sources and (converter is None or conversion.converter is not converter):
            first = conversion.sources[0][1]
            raise ModelError(
                f"{target} has two sources, {first.key} in {first.file} and {key} in {sources[key].file};"
                f" keep one"
            )
        conversion.sources.append((pattern or key, sources[key]))
    for conversion in conversions.values():
        _resolve(conversion, model, state[conversion.target].shape)
    model._weight_conversions = [each for each in transforms if each.was_used()]
    return list(conversions.values()), unexpected


def as_they_lie(conversions: Sequence[Conversion]) -> list[Conversion]:
    """Return conversions in the order in which their sources lie in files, apart where they can be."""
    begins: dict[Path, dict[str, int]] = {}

    def place(conversion: Conversion) -> tuple[str, int]:
        source = conversion.sources[0][1]
        while source.making is not None:
            source = next(iter(source.making.parts.values()))
        if source.file not in begins:
            begins[source.file] = positions(source.file)
        return str(source.file), begins[source.file][source.key]

    apart: list[Conversion] = []
    for each in conversions:
        if each.regions is None or any(source.making is not None for _, source in each.sources):
            apart.append(each)
            continue
        for source, region in zip(each.sources, each.regions, strict=True):
            apart.append(replace(each, sources=[source], regions=[region]))
    return sorted(apart, key=place)


def _resolve(conversion: Conversion, model: PreTrainedModel, shape: torch.Size) -> None:
    """Fill in the shapes of the targets, and the regions where each source goes straight to its place."""
    if conversion.converter is None:
        conversion.shapes = {conversion.target: conversion.sources[0][1].shape}
        conversion.regions = [()]
        return
    conversion.regions = _fused_regions(conversion, shape)
    if conversion.regions is not None:
        conversion.shapes = {conversion.target: tuple(shape)}
        return
    try:
        empty = [torch.empty(source.shape, device="meta") for _, source in conversion.sources]
        targets = conversion.run(model, empty)
    except Exception as error:  # the operations check little: what a wrong shape raises is up to torch
        raise ModelError(
            f"{conversion.where} cannot be converted to {conversion.target}: {first_line(error)}"
        ) from error
    conversion.shapes = {name: tuple(value.shape) for name, value in targets.items()}


def _fused_regions(conversion: Conversion, shape: torch.Size) -> list[Region] | None:
    """Return where each source goes when the operations only stack and concatenate, else None.

    Raises:
        ModelError: The sources do not fill the target exactly.
    """
    assert conversion.converter is not None
    fusion = _fusion(conversion.converter, len(shape))
    if fusion is None:
        return None
    is_stacked, dim = fusion
    groups: dict[str, list[Source]] = {pattern: [] for pattern in conversion.converter.source_patterns}
    for pattern, source in conversion.sources:
        groups[pattern].append(source)
    regions: dict[str, Region] = {}
    start = 0
    for group in filter(None, groups.values()):
        if len(group) != (shape[0] if is_stacked else 1):
            raise ModelError(
                f"{group[0].file}: {conversion.target} is made of {shape[0] if is_stacked else 1} tensors "
                f"like {group[0].key}, and the checkpoint has {len(group)} of them"
            )
        part = list(shape)
        if dim is not None:
            first = group[0].shape
            part[dim] = first[dim - is_stacked] if len(first) == len(shape) - is_stacked else 0
        expected = tuple(part[int(is_stacked) :])
        for index, source in enumerate(group):
            if source.shape != expected:
                raise ModelError(
                    f"{source.file}: {source.key} has shape {list(source.shape)}, and {conversion.target} of "
                    f"shape {list(shape)} takes {list(expected)}"
                )
            region: list[int | slice] = [index] if is_stacked else []
            if dim is not None:
                region += [slice(None)] * (dim - is_stacked) + [slice(start, start + part[dim])]
            regions[source.key] = tuple(region)
        start += part[dim] if dim is not None else 0
    if dim is not None and start != shape[dim]:
        raise ModelError(
            f"{conversion.where} fill {start} of the {shape[dim]} places in dimension {dim} of "
            f"{conversion.target}, which has shape {list(shape)}"
        )
    return [regions[source.key] for _, source in conversion.sources]


def _fusion(converter: WeightConverter, num_dims: int) -> tuple[bool, int | None] | None:
    """Return whether sources are stacked in dimension 0, and the dimension of their concatenation.

    None stands for no concatenation, and in place of both for operations of another kind.
    """
    operations = list(converter.operations)
    if len(converter.target_patterns) != 1:
        return None
    is_stacked = type(operations[0]) is MergeModulelist and operations[0].dim == 0
    if is_stacked:
        operations.pop(0)
    if not operations:
        return (True, None) if len(converter.source_patterns) == 1 else None
    if len(operations) > 1 or type(operations[0]) is not Concatenate:
        return None
    dim = operations[0].dim
    return (is_stacked, dim) if int(is_stacked) <= dim < num_dims else None
