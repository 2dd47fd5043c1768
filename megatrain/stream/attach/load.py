"""Loads a model straight into host state: no resident copy is ever made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain.config.adaptation import Adaptation
from megatrain.config.choice import AUTO, Choice, StepBatch
from megatrain.config.optimizers.registry import DEFAULT
from megatrain.config.read_choice import read_choice
from megatrain.errors import ConfigError
from megatrain.layout.blocks import BlockLayout, Entry
from megatrain.model.adapters.adapt import (
    adapt,
    add_adapters,
    initialise,
    read_adapter,
    saved_config,
    saved_vocabulary,
)
from megatrain.model.adapters.files import is_adapter
from megatrain.model.blocks import find_blocks, group_layers
from megatrain.model.causal import refuse_encoder
from megatrain.model.documents.able import implementation_of
from megatrain.model.expert_numbers import require_possible
from megatrain.model.sequence.range import OF_LOAD, check_row, row_range
from megatrain.model.sequence.scaling import require_scaled, scale_rope
from megatrain.model.vocabulary import grow, rows_of
from megatrain.model.weights.encoding import Region, WeightEncoding
from megatrain.model.weights.files import OpenFile, PlannedWeights, has_weights, model_directory
from megatrain.model.weights.generation import take_generation_config
from megatrain.model.weights.initialise import initialise_weights
from megatrain.model.weights.kept import encoding_of, keep_encoded
from megatrain.model.weights.skeleton import build_skeleton, read_config
from megatrain.store.arena import Arena, file_arena
from megatrain.store.block_state import joined_rows
from megatrain.store.placement import Tiers
from megatrain.store.precision import Precision
from megatrain.store.state import HostState
from megatrain.stream.attach.bind import plan_layouts, require_same_weights
from megatrain.stream.attach.kept_base import keep_base
from megatrain.stream.choice_checks import refuse_on_drives, require_apart
from megatrain.stream.forward.arrangement import only_on_device, places_of, residents_of
from megatrain.stream.job.job import Job
from megatrain.stream.job.ranks import Ranks
from megatrain.stream.memory import require_host_memory

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def load(
    path: str | Path | None = None,
    choice: Choice | None = None,
    *,
    config: PretrainedConfig | None = None,
    seed: int = 0,
    precision: str = "fp32",
    attn_implementation: str | None = None,
    batch: StepBatch | None = None,
    optimizer: str = DEFAULT.name,
    optimizer_state: str = DEFAULT.state,
    host_limit: int | str | None = None,
    tiers: Tiers | None = None,
    adaptation: Adaptation | None = None,
    adapter: str | Path | None = None,
    vocab_size: int | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
    opened: OpenFile | None = None,
    **fields: Any,
) -> PreTrainedModel:
    """Load a Hugging Face causal LM into host state, ready for `megatrain.attach` with the same precision.

    Peak host memory is the state plus one tensor; a random bf16 model needs 4 bytes per parameter more while
    its fp32 masters are drawn, which is less than its optimizer takes later.

    Args:
        path: The directory with config.json and safetensors, or a hub id; or a directory with LoRA adapters
            that PEFT or a run has saved: then their base is loaded, and they are put into it. Nothing is
            unpickled and no remote code is run.
        choice: The choice, as in `attach`. Weights are laid out for its `fragments`, so that they need not be
            moved later; where that is open, in whole layers, and a plan keeps to it.
        config: The configuration from which to start, with random weights, instead of `path`.
        seed: The seed of the random weights, which the model's own initialisation draws.
        precision: The precision of the weights: `fp32`, or `bf16`, which means bf16 weights that are the
            upper half of exact fp32 masters.
        attn_implementation: The attention implementation, by its name in transformers; None takes the
            default.
        batch: The batch that a step trains on, as in `attach`; only the check before allocation uses it.
        optimizer: The optimizer that will train, as in `attach`, for the check and for state on drives.
        optimizer_state: The format in which its state will be kept, as in `attach`, for the same purposes.
        host_limit: The host memory that the state may take, as in `attach`.
        tiers: The tiers, as in `attach`: each block goes straight to where it belongs. With `tiers.resumes`,
            weights are what is committed on the drives, and `path` gives the configuration.
        adaptation: The part of the model that is trained, adapters among it; None: all of it. With a `base`
            of `as_stored` the frozen weights of a checkpoint in MXFP4 or FP8 stay in its codes and scales.
        adapter: The directory with the weights of the adapters; None: they begin as PEFT begins, by `seed`.
        vocab_size: The number of rows of the embedding and the head, if the model has fewer: those for new
            tokens begin as the mean of the others. None: as many as the model has, or the embedding that was
            trained with the adapters.
        rope_scaling: The scaling of rotary embeddings, for rows beyond the model's context, with the
            parameters that transformers has for `yarn` and `linear`: `{"rope_type": "yarn", "factor": 4}`.
            The model's configuration has it from then on. None: they are as the configuration says.
        ranks: The ranks that train together, as in `attach`: the first one of each node reads the weights
            into the state of its node.
        opened: The function that opens the model's files of weights, as in `PlannedWeights.read`; None: they
            are mapped.
        **fields: The fields of `Choice` by name.

    Returns:
        The model in evaluation mode, as `from_pretrained` does; its parameters are views of host memory.

    Raises:
        ModelError: The directory or the configuration cannot be used, with the reason.
        CapacityError: The state does not fit into host memory; nothing was allocated.
        ConfigError: Neither or both of `path` and `config`, an unknown precision or keyword, a base that
            cannot be kept as it is stored, `expert_chunks` of a model whose experts stay whole, a scaling
            that the model cannot have, or rows of `batch` that are longer than it takes.
    """
    choice = read_choice(choice, fields)
    if (path is None) == (config is None):
        raise ConfigError("load takes a path or a config, one of the two")
    choice, job = Job.read(
        choice,
        precision=precision,
        batch=batch,
        optimizer=optimizer,
        optimizer_state=optimizer_state,
        host_limit=host_limit,
        tiers=tiers,
        ranks=ranks,
    )
    if job.tiers is not None:
        refuse_on_drives(job.optimizer)
    job = job.as_chosen(choice)
    lora = None
    if path is not None and adapter is None and is_adapter(Path(path)):
        path, adapter = None, path
    if adapter is not None and adaptation is None:
        lora = saved_config(Path(adapter))
        path = path or lora.base_model_name_or_path
    if path is not None:
        config = read_config(path)
        path = model_directory(path)
    if config is None or (path is None and adaptation is not None and adaptation.lora is not None):
        raise ConfigError("adapters need a base with weights; give load the path of one")
    require_possible(config)
    refuse_encoder(config)
    if rope_scaling is not None:
        config = copy.deepcopy(config)
        scale_rope(config, rope_scaling)
    if batch is not None:
        is_set = rope_scaling is not None
        check_row(
            batch.seq_len, row_range(config), named="batch.seq_len {seq_len}", extends=OF_LOAD, is_set=is_set
        )
    dtype = torch.float32 if job.precision is Precision.FP32 else torch.bfloat16
    attention = implementation_of(config, attn_implementation, dtype)
    model = build_skeleton(config, dtype=dtype, attn_implementation=attention)
    require_scaled(model, rope_scaling)
    resumes = job.tiers is not None and job.tiers.resumes
    has_files = path is not None and (not resumes or has_weights(path))
    weights = PlannedWeights(model, path) if path is not None and has_files else None
    if adaptation is not None and adaptation.keeps_codes:
        keep_base(model, weights, adaptation, choice, job)
    if adapter is not None:
        vocab_size = max(vocab_size or 0, saved_vocabulary(model, Path(adapter)))
    grow(model, vocab_size)
    plain_names = {id(parameter): name for name, parameter in model.named_parameters()}
    if lora is not None:
        add_adapters(model, lora)
    elif adaptation is not None:
        adapt(model, adaptation)
    now = {plain_names[id(p)]: name for name, p in model.named_parameters() if id(p) in plain_names}
    blocks = find_blocks(model, **choice.split)
    require_apart(choice, blocks)
    layouts = plan_layouts(model, blocks, job.precision)
    number = job.runs.num_micro_batches
    # what is open may yet be decided so that it takes least
    num_layers = len(group_layers(blocks))
    spare: dict[str, Any] = {"gradients": "device", "lockstep": number, "updates": "deferred"}
    least = Choice(**spare | choice.given).with_defaults(num_layers)
    places = places_of(least, blocks, layouts, number)
    if choice.gradients != AUTO:
        job = job.with_gradients(places)
    on_device = only_on_device(least, blocks)
    require_host_memory(
        job,
        layouts,
        places,
        job.sum_room(least),
        held=0,
        residents=residents_of(least, blocks),
        mirrors=least.mirror_resident,
    )
    most = replace(least, lockstep=choice.given.get("lockstep", 1))
    host, ranks = job.allocate(layouts, job.sum_room(most), on_device), job.ranks
    try:
        if ranks.local_rank > 0 or host.is_resumed:
            _bind_parameters(model, lambda name: _working(host, name))
            if path is not None:
                take_generation_config(model, path)
        elif weights is not None and not resumes:
            _bind_parameters(model, lambda name: _working(host, name))
            sink = _Renamed(host, now, {name: len(p) for name, p in model.named_parameters() if p.ndim})
            weights.read(sink, sink, opened)
            _fill_adapters(model, host, adapter, seed)
        else:
            _draw(model, host, seed)
            _bind_parameters(model, lambda name: _working(host, name))
        if weights is not None:
            weights.keep_untouched()
        require_same_weights(host, ranks)
    except Exception:
        host.on_drives.store.close()  # the caller may try another model, with the same drives
        raise
    model.__dict__["_megatrain_host"] = host
    return model


class _Renamed:
    """Takes parameters as they were before the model had adapters and new tokens."""

    def __init__(self, host: HostState, names: Mapping[str, str], num_rows: Mapping[str, int]) -> None:
        self._host, self._names, self._num_rows = host, names, num_rows

    def put(self, name: str, value: Tensor, region: Region = ()) -> None:
        now = self._names[name]
        num_rows = self._num_rows.get(now, 0)
        if region or not value.ndim or len(value) == num_rows:
            self._host.put(now, value, region)
            return
        for part, place in rows_of(value, num_rows):
            self._host.put(now, part, place)

    def keeps(self, name: str) -> bool:
        return self._host.places(self._names[name])[0][1].encoding is not None

    def put_codes(
        self, name: str, encoding: WeightEncoding, part: str, tensor: Tensor, region: Region
    ) -> None:
        encoding.put(part, self._host.codes_of(self._names[name])[part], region, tensor)


def _fill_adapters(model: PreTrainedModel, host: HostState, adapter: str | Path | None, seed: int) -> None:
    """Give the adapters of a loaded model, if it has any, the saved values or those that they begin with."""
    if adapter is not None:
        read_adapter(model, Path(adapter), host.put)
        return

    def read(name: str) -> Tensor:  # of the base, which is frozen: the working weight is the whole value
        return host.value(name).to(torch.float32)

    initialise(model, read, host.put, seed=seed)


def _draw(model: PreTrainedModel, host: HostState, seed: int) -> None:
    """Draw initial fp32 values: in place where the working plane is fp32 and in RAM, else in scratch room."""
    if host.precision is Precision.FP32 and not host.has_drives:
        _bind_parameters(model, lambda name: _working(host, name))
        initialise_weights(model, seed=seed)
        return
    scratch = _InitialValues(host.layouts, next(iter(host.on_drives.store.directories), None))
    _bind_parameters(model, scratch.view)
    initialise_weights(model, seed=seed)
    for name in host.names():
        host.put(name, scratch.view(name))


class _InitialValues:
    """fp32 room for every parameter, for as long as initial values are drawn: on a drive if there is one."""

    def __init__(self, layouts: tuple[BlockLayout, ...], directory: Path | None) -> None:
        self._places: dict[str, list[tuple[int, Entry]]] = {}
        size = 0
        for layout in layouts:
            for entry in layout.entries:
                self._places.setdefault(entry.name, []).append((size, entry))
                size += 4 * entry.numel
        self._arena = Arena(size) if directory is None else file_arena(size, directory)

    def view(self, name: str) -> Tensor:
        places = self._places[name]
        parts = [
            self._arena.view(torch.float32, start, entry.numel).view(entry.shape) for start, entry in places
        ]
        return joined_rows(parts)


def _working(host: HostState, name: str) -> Tensor:
    return host.weight(name)


def _bind_parameters(model: PreTrainedModel, view: Callable[[str], Tensor]) -> None:
    """Put a parameter over the view of its name in every place that looks it up; ties stay ties."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            key = id(parameter)
            if key not in made:
                made[key] = nn.Parameter(view(names[key]), requires_grad=parameter.requires_grad)
                keep_encoded(made[key], encoding_of(parameter))
            module._parameters[leaf] = made[key]
