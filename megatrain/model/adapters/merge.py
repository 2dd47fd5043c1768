"""Writes a model with its adapters merged into it, tensor by tensor.

What must stay true: no model is ever in memory. A tensor of the base is read when it is its turn, its adapter
is added to it in fp32 by PEFT's own code, and it is written in the type that it has in the base.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain.errors import ModelError, first_line
from megatrain.files import write_bytes_durably
from megatrain.model.adapters.adapt import add_adapters, read_adapter, saved_config, saved_vocabulary
from megatrain.model.adapters.files import CONFIG_NAME, is_adapter
from megatrain.model.blocks import find_blocks
from megatrain.model.sequence.scaling import scale_rope
from megatrain.model.vocabulary import grow
from megatrain.model.weights.export import export_weights
from megatrain.model.weights.files import PlannedWeights, model_directory, read_processor
from megatrain.model.weights.generation import take_generation_config
from megatrain.model.weights.on_demand import OnDemand
from megatrain.model.weights.skeleton import build_skeleton, read_config
from megatrain.model.weights.untouched import Untouched

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BASE = ".base_layer"


def write_model_of(
    source: Path, out: Path, *, max_shard_bytes: int, rope_scaling: Mapping[str, Any] | None = None
) -> None:
    """Write what a directory holds as a model directory: its model, or its adapters merged into their base.

    Args:
        source: A model directory, or one with adapters, whose base is where it says.
        out: A directory without a model.
        max_shard_bytes: Size from which the weights are split into several files.
        rope_scaling: The scaling of rotary embeddings with which the model was trained, as in `scale_rope`.

    Raises:
        ModelError: The base or the adapters cannot be read, or do not fit together.
        OutputError: `out` cannot be written.
    """
    config = saved_config(source) if is_adapter(source) else None
    if config is not None and not config.base_model_name_or_path:
        raise ModelError(f"{source}: {CONFIG_NAME} names no base (base_model_name_or_path); write it there")
    place = model_directory(source if config is None else config.base_model_name_or_path)
    model_config = read_config(place)
    scale_rope(model_config, rope_scaling)
    model = build_skeleton(model_config, dtype=torch.float32)
    weights = PlannedWeights(model, place)
    if config is not None:
        grow(model, saved_vocabulary(model, source))
    take_generation_config(model, place)
    for name, content in read_processor(place).items():
        write_bytes_durably(out / name, content)
    with OnDemand(weights) as base:
        read = base.value if config is None else _Merged(model, config, source, base.value).value
        export_weights(
            model,
            out,
            groups=[list(block.parameters) for block in find_blocks(model)],
            read=lambda name: read(name).to(base.dtype(name)),
            dtype=base.dtype,
            untouched=Untouched(weights.untouched),
            max_shard_bytes=max_shard_bytes,
        )


class _Merged:
    """The parameters of a base with its adapters, one at a time."""

    def __init__(
        self, model: PreTrainedModel, config: Any, source: Path, base: Callable[[str], Tensor]
    ) -> None:
        """Put adapters into a copy of a model without weights, and read theirs."""
        self._base = base
        self._adapted = copy.deepcopy(model)
        pairs = zip(self._adapted.parameters(), model.named_parameters(), strict=True)
        plain = {id(parameter): name for parameter, (name, _) in pairs}
        add_adapters(self._adapted, config)
        self._names = {
            plain[id(parameter)]: name
            for name, parameter in self._adapted.named_parameters()
            if id(parameter) in plain
        }
        self._adapters: dict[str, Tensor] = {}
        read_adapter(self._adapted, source, self._keep)

    def _keep(self, name: str, value: Tensor) -> None:
        self._adapters[name] = value.clone()

    def value(self, name: str) -> Tensor:
        """Return a parameter of the base with what its adapter adds, by its name in the base.

        Raises:
            ModelError: PEFT cannot merge an adapter of its kind.
        """
        name, plain = self._names[name], name
        if name in self._adapters:  # trained whole
            return self._adapters[name]
        path, leaf = name.rpartition(".")[::2]
        wrapper = self._wrapper_of(path, leaf)
        if wrapper is None:
            return self._base(plain)
        held, kept = self._adapted.get_submodule(path)._parameters, {}
        try:
            for key, value in self._own(wrapper):
                inner, _, last = key.rpartition(".")
                place = self._adapted.get_submodule(inner)._parameters
                kept[key] = place, last, place[last]
                place[last] = nn.Parameter(value.float(), requires_grad=False)
            kept[name] = held, leaf, held[leaf]
            # a copy in any case: what is written into a private mapping of a file stays in memory with it
            own = self._base(plain).to(torch.float32, copy=True)
            held[leaf] = nn.Parameter(own, requires_grad=False)
            try:
                self._adapted.get_submodule(wrapper).merge()
            except Exception as error:  # whatever a kind of adapter does not do
                raise ModelError(f"{wrapper}: PEFT cannot merge this adapter: {first_line(error)}") from error
            return held[leaf].detach()
        finally:
            for place, last, parameter in kept.values():
                place[last] = parameter

    def _wrapper_of(self, path: str, leaf: str) -> str | None:
        """Return the path of the module whose adapter is of a parameter; None: it has none."""
        while path.endswith(_BASE):
            path = path.removesuffix(_BASE)
            adapted = getattr(self._adapted.get_submodule(path), "parameter_name", None) or "weight"
            if adapted == leaf:
                return path
        return None

    def _own(self, wrapper: str) -> list[tuple[str, Tensor]]:
        """Return the adapters of a module, without those of the module inside of it."""
        return [
            (name, value)
            for name, value in self._adapters.items()
            if name.startswith(f"{wrapper}.") and not name.startswith(f"{wrapper}{_BASE}")
        ]
