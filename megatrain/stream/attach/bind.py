"""Ties a model to host state: its parameters become views of the working plane."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatrain.config.choice import Choice
from megatrain.errors import ConfigError, ModelError
from megatrain.layout.blocks import BlockLayout
from megatrain.model.blocks import Block
from megatrain.model.layouts import lay_out_blocks
from megatrain.model.weights.built import cast_buffers
from megatrain.store.digests import drop_remainders_of_changed
from megatrain.store.precision import Precision
from megatrain.store.state import HostState
from megatrain.stream.attach.kept_base import refuse_beside_codes, require_loaded_for
from megatrain.stream.forward.arrangement import only_on_device, places_of, residents_of
from megatrain.stream.forward.attached import Binding
from megatrain.stream.job.job import Job
from megatrain.stream.job.ranks import Ranks
from megatrain.stream.memory import require_host_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)


def bind(
    model: PreTrainedModel,
    blocks: list[Block],
    layouts: list[BlockLayout],
    choice: Choice,
    job: Job,
) -> Binding:
    """Move a model's parameters into host state, one at a time; a model from `load` is there already.

    Args:
        model: The model with its weights.
        blocks: The model's blocks.
        layouts: The layouts of the blocks.
        choice: The choice by which the model will stream.
        job: The job; the values are those of the first rank's model on each node.

    Raises:
        ModelError: Weights that were never loaded, or a dtype that is no float.
        CapacityError: The state, optimizer included, does not fit into host memory, or what `tiers` says;
            nothing was allocated.
        ConfigError: The model was loaded for other tiers.
    """
    room, places = job.sum_room(choice), places_of(choice, blocks, layouts, job.runs.num_micro_batches)
    job, precision, ranks = job.with_gradients(places), job.precision, job.ranks
    on_device = only_on_device(choice, blocks)
    fits = partial(
        require_host_memory,
        job,
        layouts,
        places,
        room,
        residents=residents_of(choice, blocks),
        mirrors=choice.mirror_resident,
    )
    if any(layout.encoded for layout in layouts):
        refuse_beside_codes(choice, job)
    loaded: HostState | None = model.__dict__.get("_megatrain_host")
    is_for_this = loaded is not None and loaded.is_for(
        layouts, precision, job.tiers, job.optimizer, on_device
    )
    if loaded is not None:
        drop_remainders_of_changed(loaded)
    if loaded is not None and is_for_this:
        binding = Binding(blocks, loaded, job)
        if loaded.has_drives or loaded.is_parted or binding.moved is None:
            binding.check()
            fits(held=loaded.host_bytes + loaded.planes.apart_bytes)
            loaded.limit = job.host_limit
            return binding
    require_loaded_for(layouts)
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ModelError(f"parameter {name} has no data (it is on the meta device); use megatrain.load")
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(
                f"parameter {name} is {parameter.dtype}; weights must be float32, bfloat16 or float16"
            )
    given = sum(parameter.nbytes for parameter in model.parameters())
    fits(held=0 if loaded is not None else given)
    host = job.allocate(layouts, room, on_device)
    fills = ranks.local_rank == 0
    cast_buffers(model, torch.bfloat16 if precision is Precision.BF16 else torch.float32)
    rounded: list[str] = []
    with torch.no_grad():
        parameters = {name: parameter for block in blocks for name, parameter in block.parameters.items()}
        for name, parameter in parameters.items():
            _, entry = host.places(name)[0]
            master = _master(loaded, name, parameter) if fills else None
            if master is not None and entry.dtype == torch.bfloat16 and entry.state_offset is None:
                if not torch.equal(master, parameter.data.float()):
                    rounded.append(name)
                master = None  # frozen weights stay the ones that are computed with
            if fills:
                host.put(name, parameter.data if master is None else master)
            parameter.data = host.weight(name)
    if rounded:
        _log.warning(
            "%d parameters, %s among them, were trained in bf16 and are frozen now: their fp32 masters are "
            "dropped, and they stay as they are in bf16; to keep the masters, freeze after megatrain.attach",
            len(rounded),
            rounded[0],
        )
    model.__dict__["_megatrain_host"] = host
    require_same_weights(host, ranks)
    host.limit = job.host_limit
    return Binding(blocks, host, job)


def require_same_weights(host: HostState, ranks: Ranks) -> None:
    """Wait until every node has its weights, which may take long, and refuse other ones on one of them.

    Raises:
        ConfigError: The weights differ.
    """
    sums = torch.zeros(len(host.blocks), dtype=torch.int64)
    if ranks.num_nodes > 1 and ranks.local_rank == 0:
        sums = torch.stack([block.working.view(torch.int64).sum() for block in host.blocks])
    first, *others = ranks.gather(sums, "orders")[:: ranks.size // ranks.num_nodes]
    for node, found in enumerate(others, start=1):
        for block in (found != first).nonzero().flatten().tolist()[:1]:
            raise ConfigError(
                f"node {node} has other weights than node 0, such as in the block of "
                f"{host.layouts[block].entries[0].name}; give every node the same model files"
            )


def _master(loaded: HostState | None, name: str, parameter: nn.Parameter) -> Tensor | None:
    """Return a parameter's exact fp32 value if earlier host state has it; None: the parameter is all."""
    if loaded is not None and loaded.has(name):
        number, entry = loaded.places(name)[0]
        if parameter.data_ptr() == loaded.blocks[number].weight(entry).data_ptr():
            ((_, master),) = loaded.masters([name])
            return master
    return None


def plan_layouts(model: PreTrainedModel, blocks: Sequence[Block], precision: Precision) -> list[BlockLayout]:
    """Lay out every block; bf16 leaves parameters in fp32 that the model keeps so."""
    return lay_out_blocks(model, blocks, splits=precision is Precision.BF16)
