"""From a choice to policies, and from policies to what they decide: device memory, gradients, order.

An `Arrangement` is all of an engine that can be changed between two steps: nothing in it outlives a step but
the state of resident layers, which goes home first, so the one that follows begins as a new engine's would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatrain.config.choice import Activations, Choice, checked
from megatrain.errors import ConfigError
from megatrain.layout.moments import MomentFormat
from megatrain.model.blocks import Block, group_layers
from megatrain.plan.program.operations import BlockSize
from megatrain.stream.activations.boundaries import Boundaries
from megatrain.stream.activations.offload import OffloadedActivations
from megatrain.stream.execute.executor import Executor
from megatrain.stream.execute.gradients import Gradients
from megatrain.stream.execute.issuer import Counts
from megatrain.stream.execute.resident_state import DeviceStates
from megatrain.stream.execute.slots import Slots
from megatrain.stream.execute.state_on_drives import StateOnDrives
from megatrain.stream.forward.rounds import Rounds
from megatrain.stream.policies import Policies

if TYPE_CHECKING:
    from megatrain.store.placement import Placement
    from megatrain.stream.bind import Binding
    from megatrain.stream.forward.attached import AttachedBlock, AttachedLayer
    from megatrain.stream.lanes import Lanes


NO_DRIVES = (
    "boundaries is nvme, but there are no drives; name a directory on each of them (memory.tiers={nvme: "
    "[DIRECTORY]}, or tiers=Tiers(nvme=...)), or use boundaries=host"
)


def policies_of(
    choice: Choice,
    blocks: Sequence[Block],
    *,
    micro_batch_size: int | None = None,
    compiles: bool = False,
    host_limit: int | None = None,
    moments: MomentFormat = MomentFormat.FP32,
) -> Policies:
    """Translate a choice for a model's blocks, which must be cut as it says.

    Args:
        choice: What was chosen.
        blocks: Of the model, from `find_blocks(model, fragments=choice.fragments)`.
        micro_batch_size: As in `attach`.
        compiles: Layers run through `torch.compile`.
        host_limit: As in `attach`.
        moments: What the optimizer's moments are kept in.

    Raises:
        ConfigError: The choice does not fit the model, or contradicts itself.
    """
    layers = group_layers(blocks)
    choice.require_resolved("an engine")
    checked(choice.for_layers(len(layers)))
    residents = [block for layer in layers[: choice.resident_layers] for block in layer]
    residents += outer_of(blocks) if choice.outer_resident else []
    policies = Policies(
        num_slots=choice.num_slots,
        num_gradient_buffers=choice.num_gradient_buffers,
        activations=tuple(map(Activations, choice.activations)),
        boundaries_on_host=choice.boundaries != "device",
        activations_on_drives=choice.boundaries == "nvme",
        residents=frozenset(residents),
        lockstep=choice.lockstep,
        micro_batch_size=micro_batch_size,
        head_chunk_tokens=choice.head_chunk_tokens,
        compiles=compiles,
        host_limit=host_limit,
        moments=moments,
        fragments=choice.fragments,
        updates=choice.updates,
        gradients_on_device=choice.gradients == "device",
    )
    check(policies, layers)
    return policies


def changed_policies(choice: Choice, old: Choice, now: Policies, blocks: Sequence[Block]) -> Policies:
    """Translate a choice for an engine that goes on with its state as it is.

    Args:
        choice: What is wanted.
        old: What is in force.
        now: Its translation.
        blocks: Of the model.

    Raises:
        ConfigError: The state would have to be another, or the choice does not fit the model.
    """
    if choice.fragments != now.fragments:
        raise ConfigError(
            f"fragments is {choice.fragments}, but the state is laid out for fragments={now.fragments}; "
            "detach the engine, and attach again"
        )
    if choice.head_chunk_tokens not in (None, now.head_chunk_tokens):
        raise ConfigError(
            f"head_chunk_tokens is {choice.head_chunk_tokens}, and was {now.head_chunk_tokens}: the loss "
            "would be rounded in another way; detach the engine, and attach again"
        )
    now_there, wanted = ("nvme" in dict(c.tiers).values() for c in (old, choice))
    if now_there != wanted:
        raise ConfigError(
            f"the choice puts {'a part' if wanted else 'nothing'} of the state on drives (tiers), where "
            f"{'a part' if now_there else 'nothing'} of it is; detach the engine, and attach again"
        )
    return policies_of(
        replace(choice, head_chunk_tokens=now.head_chunk_tokens),
        blocks,
        micro_batch_size=now.micro_batch_size,
        compiles=now.compiles,
        host_limit=now.host_limit,
        moments=now.moments,
    )


def choice_of(policies: Policies, blocks: Sequence[Block]) -> Choice:
    """Return the choice that policies are the translation of."""
    layers = group_layers(blocks)
    is_resident = [policies.residents.issuperset(layer) for layer in layers]
    outer = outer_of(blocks)
    return Choice(
        num_slots=policies.num_slots,
        num_gradient_buffers=policies.num_gradient_buffers,
        activations=tuple(policy.value for policy in policies.activations),
        boundaries=policies.boundaries,
        fragments=policies.fragments,
        resident_layers=[*is_resident, False].index(False),
        outer_resident=bool(outer) and policies.residents.issuperset(outer),
        lockstep=policies.lockstep,
        updates=policies.updates,
        gradients="device" if policies.gradients_on_device else "host",
        head_chunk_tokens=policies.head_chunk_tokens,
    ).with_defaults(len(layers))


def with_tiers(choice: Choice, placement: Placement, num_blocks: int) -> Choice:
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


def outer_of(blocks: Sequence[Block]) -> list[int]:
    """List the blocks that are no part of a decoder layer."""
    return [index for index, block in enumerate(blocks) if not block.is_streamed]


def planes_to_drop(old: Policies, new: Policies) -> list[str]:
    """List the host planes that what was chosen before may have left, and that are not needed now.

    Fp32 sums go too if rounds are cut in another way: a step may be one round now. The next step makes what
    it needs.
    """
    planes = ["staging"]  # of another size, perhaps
    planes += ["gradient"] if new.updates == "immediate" or new.gradients_on_device else []
    return planes + (["accumulator"] if old.lockstep != new.lockstep else [])


def check(policies: Policies, layers: Sequence[Sequence[int]]) -> None:
    """Refuse policies that contradict each other.

    Raises:
        ConfigError: They do.
    """
    most = max(map(len, layers))
    if policies.num_slots < most:
        raise ConfigError(
            f"num_slots is {policies.num_slots}, but a layer has {most} fragments, which are on the device "
            f"together in its backward; use num_slots={most} or more, or fragments=False"
        )
    if policies.lockstep > 1 and policies.num_gradient_buffers < most:
        raise ConfigError(
            f"num_gradient_buffers is {policies.num_gradient_buffers}, but the gradients of a layer's {most} "
            f"fragments add up at the same time; use {most} or more, or fragments=False"
        )
    if policies.gradients_on_device and policies.updates == "immediate":
        raise ConfigError(
            "gradients=device lets gradients wait for the norm, and updates=immediate uses them up at once; "
            "use gradients=host, or updates=deferred"
        )
    if policies.compiles and Activations.RECOMPUTE_CHEAP in policies.activations:
        raise ConfigError(
            "activations=recompute_cheap keeps the results of single operations, which a compiled layer does "
            "not show; use compile=off, or activations=keep: a compiled layer keeps little by itself"
        )


class Arrangement:
    """What an engine's policies decide, for as long as they are in force."""

    def __init__(
        self,
        lanes: Lanes,
        binding: Binding,
        policies: Policies,
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
            policies: What is decided.
            layers: In forward order.
            outer: The blocks in no layer.
            offloaded: For saved activations; it goes from one arrangement to the next, as `counts` does.
            counts: What has been moved so far.
            drives: On which a part of the state is; None: all of it is in RAM.

        Raises:
            CapacityError: The device does not hold it.
        """
        self.policies = policies
        blocks, host = binding.blocks, binding.host
        streamed = [b.is_streamed and n not in policies.residents for n, b in enumerate(blocks)]
        sizes = [
            BlockSize.of(
                layout.sizes,
                is_streamed=streamed[n],
                on_device=n in policies.residents,
                moments=policies.moments,
            )
            for n, layout in enumerate(host.layouts)
        ]
        lanes.lock(host.arena("working"))
        self.slots = Slots(lanes, host.layouts, streamed, policies.num_slots)
        self.gradients = Gradients(
            lanes,
            host,
            streamed,
            policies.num_gradient_buffers,
            on_device=policies.residents,
            holds=policies.gradients_on_device,
        )
        self.executor = Executor(
            lanes,
            host,
            sizes,
            slots=self.slots,
            gradients=self.gradients,
            states=DeviceStates(lanes, host, self.slots, policies.residents),
            offloaded=offloaded,
            outer=outer_of(blocks),
            counts=counts,
            drives=drives,
        )
        for layer, policy, boundaries in zip(
            layers, policies.activations, _boundaries(policies, layers, offloaded), strict=True
        ):
            layer.arrange(self.executor, self.slots, policy, boundaries)
        self.rounds = Rounds(self.executor, host, self.gradients, layers, outer, policies)

    def release(self) -> None:
        """Give the device memory back; nobody may use it any more."""
        self.executor.states.release()
        self.gradients.release()
        self.slots.release()


def _boundaries(
    policies: Policies, layers: Sequence[AttachedLayer], offloaded: OffloadedActivations
) -> list[Boundaries]:
    drops = [policy is Activations.DROP_BOUNDARY for policy in policies.activations]
    drops[0] = False  # there is no layer before the first
    return [
        Boundaries(
            layers[number].name,
            offloaded,
            on_host=policies.boundaries_on_host and policy.is_recomputed,
            drops=drops[number],
            is_source=number + 1 < len(drops) and drops[number + 1],
        )
        for number, policy in enumerate(policies.activations)
    ]
