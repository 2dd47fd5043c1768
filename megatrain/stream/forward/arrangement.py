"""The parts of an engine that its choice decides: device memory, gradients, order.

All of an engine that can be changed between two steps is here. Nothing of it outlives a step but the state of
resident layers, which goes home first, so what follows a change begins as a new engine's would.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatrain.config.choice import Choice
from megatrain.errors import CapacityError, ConfigError
from megatrain.layout.blocks import BlockLayout
from megatrain.layout.totals import BlockTotals, GradientPlaces, Residency, gradient_tiers
from megatrain.model.blocks import Block, ends_of, group_layers, num_chunks, outer_of
from megatrain.model.profile.flops import ModelFlops, count_flops
from megatrain.model.shares import adds_router_loss
from megatrain.plan.program.spec import DriveSpec, StepSpec
from megatrain.store.drives.scratch import ScratchFiles
from megatrain.store.precision import Precision
from megatrain.store.ranks import on_each
from megatrain.store.state import HostState
from megatrain.stream.activations.boundaries import Boundaries
from megatrain.stream.activations.offload import OffloadedActivations
from megatrain.stream.execute.compute_work import ComputeWork
from megatrain.stream.execute.executor import Executor
from megatrain.stream.execute.gradient_buffers import GradientBuffers, Home
from megatrain.stream.execute.gradients import Gradients
from megatrain.stream.execute.guard import StateGuard
from megatrain.stream.execute.integrity import Integrity
from megatrain.stream.execute.parts import Counts, EngineParts
from megatrain.stream.execute.resident_state import DeviceStates
from megatrain.stream.execute.slots import Slots
from megatrain.stream.execute.state_on_drives import StateOnDrives
from megatrain.stream.execute.weights import Weights
from megatrain.stream.forward.attached import AttachedBlock, Binding, attach_blocks
from megatrain.stream.forward.rounds import Rounds
from megatrain.stream.lanes import Lanes
from megatrain.stream.ranks.shared_gradients import gradients_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Arrangement:
    """What an engine's choice decides. The object stays; `change` puts other parts in it."""

    choice: Choice
    """The one in force, in which nothing is open."""
    residents: frozenset[int]
    """Blocks of which everything is on the device."""
    resident_outer: list[AttachedBlock]
    """Blocks in no layer whose weights stay on the device."""
    slots: Slots
    gradients: Gradients
    executor: Executor
    rounds: Rounds

    def __init__(
        self,
        model: PreTrainedModel,
        binding: Binding,
        lanes: Lanes,
        choice: Choice,
        *,
        activation_bytes: int | None = None,
    ) -> None:
        """Allocate device memory, and let the layers use it.

        Args:
            model: The model whose blocks these are.
            binding: The model's blocks and state.
            lanes: The lanes in which operations run.
            choice: The resolved choice.
            activation_bytes: The host memory that saved activations may take, in bytes; None: any number.

        Raises:
            CapacityError: The device does not hold it.
        """
        self.lanes = lanes
        self.host: HostState = binding.host
        self.counts = Counts()
        """What has been moved since attach."""
        self.integrity = Integrity()
        """Of the state; it outlives every change."""
        self.guard = StateGuard()
        """Of the state, for those who read it while training goes on."""
        lanes.judge = self.integrity.judging
        self._model = model
        self.binding = binding
        self.layers, self.outer = attach_blocks(binding)
        self.offloaded = OffloadedActivations(lanes, activation_bytes)
        self._drives = StateOnDrives(lanes, binding.host)
        directories = binding.host.on_drives.store.directories
        self.scratch = ScratchFiles(directories, rank=binding.job.ranks.rank) if directories else None
        """Room for saved activations on the drives, if there are any."""
        self.parking = ScratchFiles(directories, rank=binding.job.ranks.rank)
        """And for gradients that wait for the norm, or their sums for the next round."""
        self.num_ranks = binding.job.ranks.size
        lanes.squares_in_chunks = binding.job.runs.number * self.num_ranks > 1
        self.shared = gradients_of(
            binding.job.ranks, self.host.layouts, lanes, binding.job.sequence, binding.job.optimizer
        )
        """The part of the gradients that this rank keeps."""
        self._arrange(choice)

    def settle(self) -> None:
        """Wait for every update, and bring home what is newer on the device; all ranks call it."""
        self.executor.sync()

    def named_gradients(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, gradient) as `Engine.named_gradients`; several ranks put their shares together first.

        Raises:
            ConfigError: The gradients are used up.
            ModelError: A gradient went past the engine.
        """
        self.binding.check_gradients()
        if any(home is Home.UPDATED for home in self.gradients.homes):
            raise ConfigError(
                "with updates=immediate, gradients are used up as soon as they are complete; use deferred to "
                "read them"
            )
        self.executor.wait_for_gradients()
        self.shared.show_gradients(self.host)
        return self.gradients.named(names)

    def change(self, choice: Choice, then: Callable[[], object]) -> None:
        """Go on with another choice; all work is done, and no step is open.

        Args:
            choice: The choice, resolved and checked.
            then: The function that is called with the new parts in place; if it fails, on any rank, the old
                ones come back, and it is called once more.

        Raises:
            CapacityError: The device does not hold it; all is as it was.
        """
        before, ranks = self.choice, self.binding.job.ranks
        self._release()
        held = self.lanes.device_bytes
        self.offloaded.trim()
        failed: BaseException | None = None
        try:
            self._take(choice)
            then()
        except BaseException as error:
            failed = error
        if not any(on_each(ranks, failed is not None)):
            return
        self._release()
        self.lanes.device_bytes = held
        self._take(before)
        then()
        raise failed or CapacityError("another rank cannot go on with this choice, so all go on as before")

    def _release(self) -> None:
        """Give the device memory back, with what is there alone in RAM."""
        self.executor.states.bring_home()
        self.executor.states.release()
        self.gradients.buffers.release()
        self.slots.release()

    def _take(self, choice: Choice) -> None:
        for plane in self._planes_to_drop(choice):
            self.lanes.unlock(self.host.arena(plane))
            self.host.planes.release(plane)
        self._arrange(choice)

    def _planes_to_drop(self, new: Choice) -> list[str]:
        """List the host planes that what was chosen before may have left, and that are not needed now.

        Fp32 sums go too if rounds are cut in another way, since a step may be one round now, or if others are
        resident, whose sums are on the device. The next step makes what it needs.
        """
        planes = ["staging"]  # of another size, perhaps
        in_ram = frozenset(places_of(new, self.binding.blocks, self.host.layouts).on_host)
        if new.updates == "immediate" or in_ram != self.gradients.buffers.in_ram:
            planes.append("gradient")
        is_other = (self.choice.lockstep, self.choice.sums) != (new.lockstep, new.sums)
        is_other = is_other or residents_of(new, self.binding.blocks) != self.residents
        return planes + (["accumulator"] if is_other else [])

    def _arrange(self, choice: Choice) -> None:
        self.choice = choice
        self.offloaded.use(self.scratch if choice.boundaries == "nvme" else None)
        blocks, host, lanes = self.binding.blocks, self.host, self.lanes
        self.residents = residents = residents_of(choice, blocks)
        residency = residency_of(blocks, host.layouts, residents, streams_outer=choice.outer_streams)
        streamed = set(residency.streamed)
        self.resident_outer = [block for block in self.outer if block.index not in streamed]
        shares = self.shared.shares
        sizes = [
            self.shared.block_size(n, is_streamed=n in streamed, on_device=n in residents)
            for n in range(len(blocks))
        ]
        lanes.lock(host.arena("working"))
        self.slots = Slots(lanes, host.layouts, residency, choice.num_slots)
        buffers = GradientBuffers(
            lanes,
            host,
            choice,
            residency,
            places_of(choice, blocks, host.layouts),
            self.binding.job.sums(choice).on_device,
            shares,
            self.parking,
        )
        self.gradients = Gradients(lanes, host, buffers, self.shared)
        parts = EngineParts(
            lanes,
            host,
            self.slots,
            Weights(lanes, host, self.slots, shared=self.shared, drives=self._drives),
            self.gradients,
            DeviceStates(lanes, host, self.slots, residents, shares, self.binding.job.ranks),
            self.offloaded,
            self.counts,
            self.integrity,
            self.guard,
            self._drives,
        )
        behind = [number for number, block in enumerate(blocks) if block.is_behind]
        groups = group_layers(blocks)
        spec = replace(
            StepSpec.of(
                choice,
                sizes,
                groups,
                ends=ends_of(blocks),
                behind=behind,
                num_chunks=[num_chunks(blocks, layer) for layer in groups],
            ),
            splits=host.precision is Precision.BF16,
            tiers=tiers_of_gradients(choice, blocks, host.layouts),
            heads_in_turn=not adds_router_loss(self._model.config),
            drives=_drive_spec(host),
            num_runs=self.binding.job.runs.number,
            num_ranks=self.num_ranks,
            gathers=self.binding.job.ranks.gathers,
        )
        self.executor = Executor(parts, spec)
        for layer, policy, boundaries in zip(self.layers, choice.policies, self._boundaries(), strict=True):
            layer.arrange(self.executor, self.offloaded, policy, boundaries)
        self.rounds = Rounds(self.executor, choice, self.binding.job.runs.number)

    def _boundaries(self) -> list[Boundaries]:
        policies = self.choice.policies
        drops = [policy.drops(number) for number, policy in enumerate(policies)]
        return [
            Boundaries(
                self.layers[number].name,
                self.offloaded,
                on_host=self.choice.boundaries != "device" and policy.reruns and not drops[number],
                drops=drops[number],
                is_source=number + 1 < len(drops) and drops[number + 1],
            )
            for number, policy in enumerate(policies)
        ]

    @property
    def layer_modules(self) -> list[nn.Module]:
        """The decoder layers, in forward order."""
        return [layer.module for layer in self.layers]

    @cached_property
    def flops(self) -> ModelFlops:
        """What a token costs, by what is trained when this is read first."""
        return count_flops(self._model, self.layer_modules)

    @property
    def work(self) -> ComputeWork:
        """What says how much each visit computes; the executor reads it from now on."""
        if self.executor.work is None:
            layers = [
                [(block.index, sum(entry.numel for entry in block.layout.entries)) for block in layer.blocks]
                for layer in self.layers
            ]
            self.executor.work = ComputeWork(self.flops, layers, self.choice.policies)
        return self.executor.work


def residents_of(choice: Choice, blocks: Sequence[Block]) -> frozenset[int]:
    """Return the blocks of which everything is on the device."""
    layers = group_layers(blocks)[: choice.resident_layers]
    outer = outer_of(blocks) if choice.outer_resident else []
    return frozenset([*outer, *(block for layer in layers for block in layer)])


def only_on_device(choice: Choice, blocks: Sequence[Block]) -> frozenset[int]:
    """Return the blocks whose state is on the device and nowhere else."""
    return frozenset() if choice.mirror_resident else residents_of(choice, blocks)


def residency_of(
    blocks: Sequence[Block],
    layouts: Sequence[BlockLayout],
    residents: Collection[int],
    *,
    streams_outer: bool = False,
) -> Residency:
    """Return which of a model's blocks stream, and which stay on the device."""
    sizes = (layout.sizes for layout in layouts)
    streams = [block.is_streamed or (streams_outer and block.caller is not None) for block in blocks]
    return Residency.of(sizes, streams, residents)


def _residency(choice: Choice, blocks: Sequence[Block], layouts: Sequence[BlockLayout]) -> Residency:
    residents = residents_of(choice, blocks)
    return residency_of(blocks, layouts, residents, streams_outer=choice.outer_streams)


def tiers_of_gradients(
    choice: Choice, blocks: Sequence[Block], layouts: Sequence[BlockLayout]
) -> tuple[str, ...]:
    """Return where each block's complete gradient waits for the norm."""
    residency = _residency(choice, blocks, layouts)
    return gradient_tiers(choice.gradients, group_layers(blocks), residency)


def places_of(
    choice: Choice,
    blocks: Sequence[Block],
    layouts: Sequence[BlockLayout],
    num_micro_batches: int | None = None,
) -> GradientPlaces:
    """Return which blocks' complete gradients wait where for the norm.

    Args:
        choice: The choice for this model.
        blocks: The model's blocks.
        layouts: The layouts of the blocks.
        num_micro_batches: The number of micro-batches of a step whose updates may use the gradients up; None:
            the places are those of gradients that wait, in a step of several rounds.
    """
    totals = BlockTotals(layout.sizes for layout in layouts)
    residency = _residency(choice, blocks, layouts)
    if num_micro_batches is not None and choice.uses_gradients_up(num_micro_batches):
        return GradientPlaces.none(totals, residency)
    places = GradientPlaces.of(totals, residency, tiers_of_gradients(choice, blocks, layouts))
    if num_micro_batches is None or choice.sums_pass_buffers(num_micro_batches):
        return places.with_sums(choice.sums, residency, at_once=choice.updates == "immediate")
    return places


def _drive_spec(host: HostState) -> DriveSpec | None:
    if not host.has_drives:
        return None
    images, placement = host.on_drives.images, host.on_drives.placement
    return DriveSpec(
        state_bytes=[image.working_start for image in images],
        working_bytes=[image.num_bytes - image.working_start for image in images],
        state=placement.state_on_drives,
        working=placement.working_on_drives,
        rank=host.on_drives.rank,
        num_ranks=host.on_drives.num_ranks,
    )
