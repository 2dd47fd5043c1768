"""What a choice decides in an engine: device memory, gradients, order; and which choices it can run.

An `Arrangement` is all of an engine that can be changed between two steps: nothing in it outlives a step but
the state of resident layers, which goes home first, so the one that follows begins as a new engine's would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatrain.config.choice import Activations, Choice, checked
from megatrain.errors import ConfigError
from megatrain.model.blocks import Block, group_layers
from megatrain.plan.program.operations import BlockSize
from megatrain.plan.program.spec import DriveSpec, StepSpec
from megatrain.store.state import HostState, Precision
from megatrain.store.tiered import TieredState
from megatrain.stream.activations.boundaries import Boundaries
from megatrain.stream.activations.offload import OffloadedActivations
from megatrain.stream.bind import residency_of
from megatrain.stream.execute.executor import Executor
from megatrain.stream.execute.gradient_buffers import GradientBuffers
from megatrain.stream.execute.gradients import Gradients
from megatrain.stream.execute.issuer import Counts
from megatrain.stream.execute.resident_state import DeviceStates
from megatrain.stream.execute.slots import Slots
from megatrain.stream.execute.state_on_drives import StateOnDrives
from megatrain.stream.forward.rounds import Rounds

if TYPE_CHECKING:
    from megatrain.store.placement import Placement
    from megatrain.stream.bind import Binding
    from megatrain.stream.forward.attached import AttachedBlock, AttachedLayer
    from megatrain.stream.lanes import Lanes


NO_DRIVES = (
    "boundaries is nvme, but there are no drives; name a directory on each of them (memory.tiers={nvme: "
    "[DIRECTORY]}, or tiers=Tiers(nvme=...)), or use boundaries=host"
)


def check_choice(choice: Choice, blocks: Sequence[Block], *, compiles: bool = False) -> None:
    """Refuse a choice that an engine cannot run.

    Args:
        choice: What is wanted.
        blocks: Of the model, from `find_blocks(model, fragments=choice.fragments)`.
        compiles: Layers run through `torch.compile`.

    Raises:
        ConfigError: It is not resolved, does not fit the model, or contradicts itself.
    """
    layers = group_layers(blocks)
    choice.require_resolved("an engine")
    checked(choice.for_layers(len(layers)))
    most = max(map(len, layers))
    if choice.num_slots < most:
        raise ConfigError(
            f"num_slots is {choice.num_slots}, but a layer has {most} fragments, which are on the device "
            f"together in its backward; use num_slots={most} or more, or fragments=False"
        )
    if choice.lockstep > 1 and choice.num_gradient_buffers < most:
        raise ConfigError(
            f"num_gradient_buffers is {choice.num_gradient_buffers}, but the gradients of a layer's {most} "
            f"fragments add up at the same time; use {most} or more, or fragments=False"
        )
    if choice.gradients == "device" and choice.updates == "immediate":
        raise ConfigError(
            "gradients=device lets gradients wait for the norm, and updates=immediate uses them up at once; "
            "use gradients=host, or updates=deferred"
        )
    if compiles and Activations.RECOMPUTE_CHEAP in choice.policies:
        raise ConfigError(
            "activations=recompute_cheap keeps the results of single operations, which a compiled layer does "
            "not show; use compile=off, or activations=keep: a compiled layer keeps little by itself"
        )


def changed(choice: Choice, old: Choice) -> Choice:
    """Return a choice as an engine can go on with it, whose state stays as it is.

    Args:
        choice: What is wanted.
        old: What is in force.

    Raises:
        ConfigError: Fields are open, or the state would have to be another.
    """
    choice.require_resolved("engine.reconfigure")
    if choice.fragments != old.fragments:
        raise ConfigError(
            f"fragments is {choice.fragments}, but the state is laid out for fragments={old.fragments}; "
            "detach the engine, and attach again"
        )
    if choice.head_chunk_tokens not in (None, old.head_chunk_tokens):
        raise ConfigError(
            f"head_chunk_tokens is {choice.head_chunk_tokens}, and was {old.head_chunk_tokens}: the loss "
            "would be rounded in another way; detach the engine, and attach again"
        )
    now_there, wanted = ("nvme" in dict(c.tiers).values() for c in (old, choice))
    if now_there != wanted:
        raise ConfigError(
            f"the choice puts {'a part' if wanted else 'nothing'} of the state on drives (tiers), where "
            f"{'a part' if now_there else 'nothing'} of it is; detach the engine, and attach again"
        )
    kept = ("head_chunk_tokens", "tiers", "blocks_in_ram", "weights_in_ram")
    return replace(choice, **{name: getattr(old, name) for name in kept})


def as_placed(choice: Choice, placement: Placement, num_blocks: int) -> Choice:
    """Return a choice with what the store has put on drives."""
    num_state, num_weights = len(placement.state_on_drives), len(placement.working_on_drives)
    if not num_state:
        return choice
    planes = ("remainder", "moments", *(("working",) if num_weights else ()))
    return replace(
        choice,
        tiers=frozenset((plane, "nvme") for plane in planes),
        blocks_in_ram=num_blocks - num_state,
        weights_in_ram=num_blocks - num_weights if num_weights else 0,
    )


def residents_of(choice: Choice, blocks: Sequence[Block]) -> frozenset[int]:
    """Return the blocks of which everything is on the device."""
    layers = group_layers(blocks)[: choice.resident_layers]
    outer = outer_of(blocks) if choice.outer_resident else []
    return frozenset([*outer, *(block for layer in layers for block in layer)])


def outer_of(blocks: Sequence[Block]) -> list[int]:
    """List the blocks that are no part of a decoder layer."""
    return [index for index, block in enumerate(blocks) if not block.is_streamed]


def planes_to_drop(old: Choice, new: Choice) -> list[str]:
    """List the host planes that what was chosen before may have left, and that are not needed now.

    Fp32 sums go too if rounds are cut in another way: a step may be one round now. The next step makes what
    it needs.
    """
    planes = ["staging"]  # of another size, perhaps
    planes += ["gradient"] if new.updates == "immediate" or new.gradients == "device" else []
    return planes + (["accumulator"] if old.lockstep != new.lockstep else [])


class Arrangement:
    """What an engine's choice decides, for as long as it is in force."""

    def __init__(
        self,
        lanes: Lanes,
        binding: Binding,
        choice: Choice,
        layers: Sequence[AttachedLayer],
        outer: Sequence[AttachedBlock],
        *,
        offloaded: OffloadedActivations,
        counts: Counts,
        drives: StateOnDrives | None = None,
    ) -> None:
        """Allocate device memory, and let the layers use it.

        Args:
            lanes: Where things run.
            binding: The model's blocks and state.
            choice: What is decided; resolved.
            layers: In forward order.
            outer: The blocks in no layer.
            offloaded: For saved activations; it goes from one arrangement to the next, as `counts` does.
            counts: What has been moved so far.
            drives: On which a part of the state is; None: all of it is in RAM.

        Raises:
            CapacityError: The device does not hold it.
        """
        self.choice = choice
        self.offloaded = offloaded
        blocks, host = binding.blocks, binding.host
        self.residents = residents = residents_of(choice, blocks)
        """Blocks of which everything is on the device."""
        residency = residency_of(blocks, host.layouts, residents)
        sizes = [
            BlockSize.of(
                layout.sizes,
                is_streamed=blocks[n].is_streamed and n not in residents,
                on_device=n in residents,
                moments=binding.moments,
            )
            for n, layout in enumerate(host.layouts)
        ]
        lanes.lock(host.arena("working"))
        self.slots = Slots(lanes, host.layouts, residency, choice.num_slots)
        buffers = GradientBuffers(
            lanes,
            host,
            residency,
            choice.num_gradient_buffers,
            waits=choice.gradients == "device",
            host_limit=binding.host_limit,
        )
        self.gradients = Gradients(lanes, host, buffers)
        self.executor = Executor(
            lanes,
            host,
            StepSpec.of(
                choice,
                sizes,
                group_layers(blocks),
                splits=host.precision is Precision.BF16,
                drives=_drive_spec(host),
            ),
            slots=self.slots,
            gradients=self.gradients,
            states=DeviceStates(lanes, host, self.slots, residents),
            activations=offloaded,
            counts=counts,
            drives=drives,
        )
        for layer, policy, boundaries in zip(
            layers, choice.policies, _boundaries(choice, layers, offloaded), strict=True
        ):
            layer.arrange(self.executor, self.slots, offloaded, policy, boundaries)
        self.rounds = Rounds(self.executor, host, self.gradients, layers, outer, choice)

    def release(self) -> None:
        """Give the device memory back; nobody may use it any more."""
        self.executor.states.release()
        self.gradients.buffers.release()
        self.slots.release()


def _drive_spec(host: HostState) -> DriveSpec | None:
    if not isinstance(host, TieredState):
        return None
    images, placement = host.on_drives.images, host.on_drives.placement
    return DriveSpec(
        state_bytes=[image.working_start for image in images],
        working_bytes=[image.num_bytes - image.working_start for image in images],
        state=placement.state_on_drives,
        working=placement.working_on_drives,
    )


def _boundaries(
    choice: Choice, layers: Sequence[AttachedLayer], offloaded: OffloadedActivations
) -> list[Boundaries]:
    drops = [policy is Activations.DROP_BOUNDARY for policy in choice.policies]
    drops[0] = False  # there is no layer before the first
    return [
        Boundaries(
            layers[number].name,
            offloaded,
            on_host=choice.boundaries != "device" and policy.is_recomputed,
            drops=drops[number],
            is_source=number + 1 < len(drops) and drops[number + 1],
        )
        for number, policy in enumerate(choice.policies)
    ]
