"""`megatrain.attach`: check that a model fits, move its state to the host, and put an engine under it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from megatrain.config.choice import BOUNDARIES, Choice
from megatrain.errors import ConfigError, ModelError
from megatrain.layout.moments import MomentFormat
from megatrain.model.blocks import find_blocks, group_layers
from megatrain.store.placement import Tiers
from megatrain.store.state import read_precision
from megatrain.stream.arrange import NO_DRIVES, check_choice
from megatrain.stream.bind import bind, plan_layouts, require_device_memory
from megatrain.stream.choose import Batch, Room, choose
from megatrain.stream.engine import Engine
from megatrain.stream.forward.arrangement import residents_of
from megatrain.stream.forward.compiled import is_compiled
from megatrain.stream.lanes import Lanes
from megatrain.stream.lanes.devices import make_lanes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def attach(
    model: PreTrainedModel,
    *,
    device: str | torch.device | Lanes = "cpu",
    precision: str = "fp32",
    num_slots: int | None = None,
    activations: str | Sequence[str] = "recompute",
    boundaries: str = "device",
    fragments: bool = False,
    resident_blocks: int | Literal["auto"] = 0,
    lockstep: int | Literal["auto"] = 1,
    num_micro_batches: int = 1,
    micro_batch_size: int | None = None,
    tokens_per_micro_batch: int | None = None,
    num_gradient_buffers: int | None = None,
    head_chunk_tokens: int | None = None,
    gradients: str = "host",
    compile: Literal["auto", "on", "off"] = "auto",
    host_limit: int | None = None,
    device_limit: int | None = None,
    choice: Choice | None = None,
    optimizer_state: str = "fp32",
    tiers: Tiers | None = None,
) -> Engine:
    """Make a model train by streaming, in place; `engine.detach()` undoes it.

    Every choice below but the last changes where bytes are and when they move, and no bit of the result.

    Args:
        model: A Hugging Face causal LM on the CPU, or one from `megatrain.load`.
        device: Where to compute: `cpu`, `cuda`, `cuda:N`, `auto`, or `emulated` and `checked` for tests.
        precision: `fp32`, or `bf16`: bf16 weights that are the upper half of exact fp32 masters.
        num_slots: Device buffers for streamed blocks. None: 2, which overlap a copy with compute, or one
            more than a layer has fragments. 1 saves memory.
        activations: What stays of a layer between forward and backward: `keep`, `offload` (to the host),
            `recompute_cheap` (matrix products and attention stay), `recompute` (the layer's input stays),
            `drop_boundary` (not even that: the layers before make it again), or `auto`. One for all layers,
            or a sequence with one per layer.
        boundaries: Where the inputs of recomputed layers wait: on the `device`, on the `host`, or on the
            drives of `tiers` (`nvme`), where then also goes what `offload` saves.
        fragments: Stream each layer in parts (attention; mlp or experts), in slots as large as a part.
        resident_blocks: How many of the first layers stay on the device with their gradients and optimizer
            state, and are updated there; with all of them, the embedding and the head too. `auto`: as many
            as the device's memory holds.
        lockstep: Micro-batches of `forward_backward` that pass each layer together: a layer is fetched twice
            for all of them, and their boundaries are on the device at the same time. `auto`: all of a step,
            or as many as the device's memory holds. Without seeds, each draws its dropout from a seed of its
            own, since they take turns.
        num_micro_batches: How many `forward_backward` will be given, for `auto` and for the check of memory:
            where they take several rounds, bf16 sums them in fp32, 4 bytes per parameter more.
        micro_batch_size: Split a larger batch of `model(**batch)` into micro-batches of this many rows, which
            run in lockstep. None: never.
        tokens_per_micro_batch: What `auto` reckons with.
        num_gradient_buffers: Device buffers in which gradients of streamed blocks add up. None: as few as
            keep copies and compute apart.
        head_chunk_tokens: Tokens that pass the head and the loss at a time; None: chosen so that small
            batches take one chunk, which is bitwise equal to the model's own loss.
        gradients: Where complete gradients of streamed layers wait for the norm: on the `host`, or in spare
            memory of the `device`, which saves the host 2 bytes per parameter. `auto`: on the device if it
            has room for all of them.
        compile: Run each layer (or fragment) through `torch.compile`, one compilation for all of a kind.
            `auto`: on accelerators. Compiled kernels round differently; what is exact is that streaming,
            recomputation and resuming give the bits of the same compiled layers. Off under `recompute_cheap`.
        host_limit: Bytes of host memory that the state may take; None: what the machine and its cgroups give.
        device_limit: Bytes of device memory for slots, resident blocks and gradients; None: what there is.
        choice: What a plan has chosen, in place of `num_slots`, `num_gradient_buffers`, `activations`,
            `boundaries`, `fragments`, `resident_blocks`, `lockstep`, `head_chunk_tokens` and `gradients`,
            which are then not looked at.
        optimizer_state: What `engine.adamw` will keep the moments in, for which memory is planned: `fp32`, or
            `bf16` or `int8`, which are not exact.
        tiers: Put on drives what of the state does not fit into `tiers.ram`, which then takes the place of
            `host_limit`; no block is resident then. Give `megatrain.load` the same.

    Raises:
        ModelError: The model cannot be streamed exactly.
        CapacityError: The state does not fit into host or device memory; nothing was allocated.
        ConfigError: An argument out of range, or two that exclude each other.
    """
    for name, value in (
        ("num_slots", num_slots),
        ("num_gradient_buffers", num_gradient_buffers),
        ("head_chunk_tokens", head_chunk_tokens),
        ("lockstep", None if lockstep == "auto" else lockstep),
        ("num_micro_batches", num_micro_batches),
        ("micro_batch_size", micro_batch_size),
        ("tokens_per_micro_batch", tokens_per_micro_batch),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; use 1 or more")
    if compile not in ("auto", "on", "off"):
        raise ConfigError(f"compile is {compile!r}; use auto, on or off")
    if boundaries not in BOUNDARIES:
        raise ConfigError(f"boundaries is {boundaries!r}; use {', '.join(BOUNDARIES)}")
    if tiers is None and (boundaries if choice is None else choice.boundaries) == "nvme":
        raise ConfigError(NO_DRIVES)
    if gradients not in ("host", "device", "auto"):
        raise ConfigError(f"gradients is {gradients!r}; use host, device or auto")
    if resident_blocks != "auto" and resident_blocks < 0:
        raise ConfigError(f"resident_blocks is {resident_blocks}; use 0 or more, or auto")
    kept = read_precision(precision)
    moments = MomentFormat.read(optimizer_state)
    if getattr(model, "_megatrain_engine", None) is not None:
        raise ModelError("the model is attached to an engine already; call engine.detach() first")
    fragments = fragments if choice is None else choice.fragments
    if tiers is not None:
        host_limit = tiers.ram_bytes if host_limit is None else host_limit
        if choice is not None and (choice.resident_layers or choice.outer_resident):
            resident_blocks = choice.resident_layers or 1
        if resident_blocks not in ("auto", 0):
            raise ConfigError(
                f"resident_layers (memory.resident_blocks) is {resident_blocks}, but the state is on drives, "
                "from where no block goes to the device for good; use 0, or no drives"
            )
        if moments is not MomentFormat.FP32:
            raise ConfigError(
                f"optim.state is {moments.value}, but state on drives (memory.tiers.nvme) is kept in "
                "fp32; use optim.state=fp32, or no drives"
            )
        resident_blocks = 0
    lanes = make_lanes(device, device_limit)
    blocks = find_blocks(model, fragments=fragments)
    layouts = plan_layouts(model, blocks, kept)
    if choice is None:
        most = max(map(len, group_layers(blocks)))
        room = Room(
            lanes=lanes,
            blocks=blocks,
            layouts=layouts,
            layers=group_layers(blocks),
            num_slots=num_slots or most + 1,
            num_gradient_buffers=num_gradient_buffers or most + 1,
            config=model.config,
            batch=Batch(tokens_per_micro_batch or 0, num_micro_batches),
            boundaries=boundaries,
            moments=moments,
        )
        choice = choose(
            room,
            activations=activations,
            resident_blocks=resident_blocks,
            lockstep=lockstep,
            num_gradient_buffers=num_gradient_buffers,
            fragments=fragments,
            head_chunk_tokens=head_chunk_tokens,
            gradients=gradients,
        )
    is_cheap = "recompute_cheap" in choice.activations
    compiles = compile == "on" or (not is_cheap and is_compiled(compile, lanes.device))
    check_choice(choice, blocks, compiles=compiles)
    residents = residents_of(choice, blocks)
    require_device_memory(
        blocks, layouts, lanes, choice, residents, moments=moments, num_micro_batches=num_micro_batches
    )
    binding = bind(
        model,
        kept,
        choice,
        residents,
        num_micro_batches=num_micro_batches,
        host_limit=host_limit,
        moments=moments,
        tiers=tiers,
    )
    return Engine(model, binding, lanes, choice, micro_batch_size=micro_batch_size, compiles=compiles)
