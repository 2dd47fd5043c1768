"""The time of a step: its program, each operation with its seconds, placed on lanes.

An operation says how long it takes, at the rates of `Pricing`. A step of many rounds, or of many
micro-batches in a round, is timed by a shorter program of the same builder: a few rounds, of which the last
goes on, and micro-batches that pass together in one visit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from megatrain.config.choice import Choice, StepBatch
from megatrain.config.runs import RoundSums, StepSums
from megatrain.layout.exchange import Exchange
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.cost.collectives import Collectives
from megatrain.plan.cost.contention import Demand, Shares, memory_s
from megatrain.plan.cost.layer_costs import LayerCosts
from megatrain.plan.cost.pricing import Pricing
from megatrain.plan.cost.rates import Rates
from megatrain.plan.cost.timetable import busy_seconds, links, steady_ends
from megatrain.plan.memory.block_sums import (
    BlockSums,
    exchanged,
    given_weights,
    updated_share,
)
from megatrain.plan.memory.planned_blocks import PlannedBlock
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import KINDS, Program, Task
from megatrain.plan.program.spec import StepSpec
from megatrain.plan.program.step import step_program

_MAX_ROUNDS = 3
"""Rounds that are timed; more go on as the middle one of these did."""

_MAX_GROUPS, _MAX_SAVING = 4, 8
"""Micro-batches of a round that are operations of their own; more pass together. Where activations leave the
device, how finely their copies alternate counts for more."""

_MANY_LAYERS = 60
"""Layers of a model above which a visit is two operations at most: a layer is a small part of a step then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedBytes:
    """The bytes that a step copies at least, both ways over the link and the drives."""

    up: float
    down: float
    read: float
    written: float
    exchanged: float = 0.0
    """Sums that a rank sends to others."""
    gathered: float = 0.0
    """Weights that it gets from those of its node."""
    given: float = 0.0
    """New weights of resident blocks that it sends to others."""


class Step:
    """The program of one step, and what is known of its time without placing it."""

    def __init__(
        self,
        rates: Rates,
        anatomy: Anatomy,
        choice: Choice,
        batch: StepBatch,
        *,
        clips: bool = True,
        commit_every: int | None = 1,
    ) -> None:
        """Describe a step; `step_s` times it.

        Args:
            rates: The rates of the machine as a rank has it.
            anatomy: The model.
            choice: The choice, in which nothing is open.
            batch: The batch of one rank.
            clips: Whether gradients are clipped to a norm.
            commit_every: The number of steps between commits of the state on drives, of which this one does
                its part; None: there are none.
        """
        self.rates = rates
        self.anatomy = anatomy
        self.choice = choice
        self.batch = batch
        self.clips = clips
        self.commit_every = commit_every
        self.num_placed = 0
        """Operations that were placed to time it: what that has cost."""

    @cached_property
    def blocks(self) -> list[PlannedBlock]:
        """Return what streams as one: of all layers in forward order, then the outer ones."""
        return self.block_sums.listed(self.anatomy, self.choice, self.rates.optimizer, self.batch)

    @cached_property
    def block_sums(self) -> BlockSums:
        """Return the sums over the blocks."""
        return BlockSums.of(self.anatomy, self.choice)

    @cached_property
    def spec(self) -> StepSpec:
        """Return the specification of the step."""
        layers = range(len(self.anatomy.layers))
        spec = StepSpec.of(
            self.choice,
            [block.size for block in self.blocks],
            [self.block_sums.passed(number) for number in layers],
            ends=self.block_sums.ends,
            behind=self.block_sums.behind,
            saved=[(run.leaving_bytes, run.host_bytes) for run in self.costs.runs],
            num_chunks=self.block_sums.num_chunks,
        )
        return replace(
            spec,
            splits=self.anatomy.precision == "bf16",
            tiers=self.block_sums.gradient_tiers(self.choice),
            heads_in_turn=not self.anatomy.loss_reaches_layers,
            clips=self.clips,
            drives=self.block_sums.drive_spec(self.choice, self.batch, self.rates.optimizer),
            num_runs=self.partial_sums.runs.number,
            num_ranks=self.batch.num_ranks,
            gathers=self.batch.gathers,
        )

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds of the step."""
        return -(-self.batch.num_micro_batches // self.choice.lockstep)

    def _rounds(self, *, is_short: bool) -> list[list[int]]:
        """List the rounds, each with how many micro-batches pass in each of its visits."""
        count = self.batch.num_micro_batches
        together = min(self.choice.lockstep, count)
        num_rounds = min(self.num_rounds, _MAX_ROUNDS) if is_short else self.num_rounds
        most = _MAX_SAVING if any(layer.saves for layer in self.spec.layers) else _MAX_GROUPS
        most = most if len(self.anatomy.layers) <= _MANY_LAYERS else 2
        most = most if self.choice.expert_chunks == 1 else 1  # there are many visits, and each is short
        sizes = [together] * (num_rounds - 1) + [count % together or together]
        return [_shared_out(size, min(size, most) if is_short else size) for size in sizes]

    def program(self, *, is_short: bool = False) -> Program:
        """List the operations of the step.

        Args:
            is_short: Whether to list the program that `step_s` times: with few rounds and visits, and whole
                parts of blocks in a commit.
        """
        return (
            self._short_program if is_short else self._program(self._rounds(is_short=False), in_pieces=True)
        )

    @cached_property
    def _short_program(self) -> Program:
        return self._program(self._rounds(is_short=True), in_pieces=False)

    def _program(
        self, rounds: list[list[int]], sums: Sequence[RoundSums] | None = None, *, in_pieces: bool
    ) -> Program:
        return step_program(
            self.spec,
            rounds,
            sums=self._round_sums(len(rounds)) if sums is None else sums,
            num_passes_before=self.batch.num_passes_before,
            in_pieces=in_pieces,
            commit_every=self.commit_every,
        )

    def _round_sums(self, num_rounds: int) -> list[RoundSums]:
        """Return what each of so many rounds does with partial sums.

        Where rounds are left out, they have the most that there are, and of shares the mean, which is one.
        """
        found = self.partial_sums.by_round
        if num_rounds == len(found):
            return found
        most = range(1) if self.partial_sums.are_shared else max((each.left for each in found), key=len)
        return [replace(each, loaded=most, left=most) for each in [*found[: num_rounds - 1], found[-1]]]

    @cached_property
    def partial_sums(self) -> StepSums:
        """Return the partial sums of the step."""
        return self.batch.sums(self.choice)

    @cached_property
    def moved_bytes(self) -> dict[str, int]:
        """Return the bytes that a step moves, by the label of the operations."""
        rounds = self._rounds(is_short=True)
        sums = self._round_sums(len(rounds))
        moved = _bytes_by_label(self._short_program)
        more = self.num_rounds - len(rounds)
        if more:  # each goes on as the last but one did
            fewer = _bytes_by_label(self._program(rounds[1:], sums[1:], in_pieces=False))
            moved = {kind: nbytes + more * (nbytes - fewer[kind]) for kind, nbytes in moved.items()}
        return moved

    @cached_property
    def step_s(self) -> float:
        """Return the seconds of one step of many equal ones; host memory, which no lane is, may bound it."""
        step_s = max(self.timed(is_short=True), self.bounds_s.get("host memory", 0.0))
        name = max(self.bounds_s, key=lambda bound: self.bounds_s[bound])
        least_s = self.bounds_s[name]
        assert step_s > least_s * (1 - 1e-6), f"a step of {step_s} s is below its bound {name}, {least_s} s"
        return step_s

    def timed(self, *, is_short: bool) -> float:
        """Return the seconds of one step among many equal ones, by its whole program or the short one."""
        tasks, marked = self.tasks(is_short=is_short)
        self.num_placed += len(tasks)
        more = self.num_rounds - len(marked)
        spec = self.rates.spec
        if spec.is_cpu:
            again = sum(task.seconds for task in tasks[marked[0] + 1 : marked[1] + 1]) if more else 0.0
            return sum(task.seconds for task in tasks) + more * again
        ends, before = steady_ends(tasks, waits_for_compute=spec.launches_inline, link_of=self.link_of)
        step_s = ends[marked[-1]] - before[marked[-1]]
        busy = busy_seconds(tasks, link_of=self.link_of)
        if more:
            step_s += more * (ends[marked[1]] - ends[marked[0]])
            middle = busy_seconds(tasks[marked[0] + 1 : marked[1] + 1], link_of=self.link_of)
            for lane, seconds in middle.items():
                busy[lane] += more * seconds
        return max(step_s, *busy.values())  # two steps do not show a backlog that grows with each

    def tasks(self, *, is_short: bool = False) -> tuple[list[Task], list[int]]:
        """Return the operations as timed tasks, and the number of each round's last backward."""
        shares = Shares.of(self.rates, self.demand)
        pricing = Pricing(self.rates, self.costs, self.blocks, shares, self.collectives)
        tasks: list[Task] = []
        backwards = []
        for operation in self.program(is_short=is_short).operations:
            if operation.is_backward and operation.is_visit:
                backwards.append(len(tasks))
            tasks += operation.tasks(pricing)
        rounds = self._rounds(is_short=is_short)
        counts = accumulate(len(visits) * self.spec.num_backwards for visits in rounds)
        return tasks, [backwards[count - 1] for count in counts]

    @property
    def link_of(self) -> Mapping[Lane, Lane]:
        """Return which lanes take turns, on which link."""
        drives = self.rates.spec.drives
        shares = drives is not None and not drives.is_duplex
        return links(drives_share=shares, passes_host=self.collectives.passes_host)

    @cached_property
    def collectives(self) -> Collectives:
        """Return what it costs that ranks send each other."""
        return Collectives.of(self.rates, self.batch)

    @cached_property
    def costs(self) -> LayerCosts:
        """Return what the layers cost."""
        return LayerCosts(self.rates, self.anatomy, self.choice, self.batch)

    @cached_property
    def sums(self) -> list[float]:
        """Return `LayerCosts.sums` of all micro-batches."""
        found = self.costs.sums(self.block_sums.first_trained)
        return [value * self.batch.num_micro_batches for value in found]

    @cached_property
    def compute_s(self) -> float:
        """Return the seconds of all that the device computes."""
        costs = self.costs
        forward, backward, again, _ = self.sums
        count, num_before = self.batch.num_micro_batches, self.batch.num_passes_before
        head_forward = (costs.head_forward_s + costs.outer_s) * count
        head = head_forward + costs.head_backward_s * count
        on_device_s = costs.step_s if self.rates.updates_in_compute else 0.0
        return num_before * (forward + head_forward) + forward + backward + again + head + on_device_s

    @cached_property
    def bounds_s(self) -> dict[str, float]:
        """Return the seconds below which no order of these tasks can be, by cause."""
        if not self.rates.spec.has_accelerator:
            return self._lane_bounds_s
        return {**self._lane_bounds_s, "host memory": memory_s(self.rates, self.demand)}

    @cached_property
    def _lane_bounds_s(self) -> dict[str, float]:
        """Return the seconds below which its lanes cannot be, by cause."""
        return _lane_bounds(self)

    @cached_property
    def copied_bytes(self) -> CopiedBytes:
        """Return what every program of the step has to copy: what its slots hold already is left out."""
        choice, sums, rounds = self.choice, self.block_sums, self.num_rounds
        num_ranks = self.batch.num_ranks
        among, residency = self.batch.gathers_among, sums.residency(choice)
        fetched, offloaded = sums.moved_bytes(choice, self.partial_sums, among)
        saved = self.sums[3]
        first = self.block_sums.first_trained
        unread = sum(run.leaving_bytes for run in self.costs.runs[:first]) * self.batch.num_micro_batches
        restored = max(0.0, saved - unread - rounds * self.costs.newest_bytes)
        read, written = sums.drive_bytes(choice, rounds, self.batch, self.commit_every, self.rates.optimizer)
        places = sums.gradient_places(choice, self.batch.num_micro_batches)
        parked = sum(self.blocks[block].size.parked_bytes for block in places.on_drives)
        parked += (rounds - 1) * sum(
            self.blocks[block].size.parked_sum_bytes for block in places.sums_on_drives
        )
        on_drives = choice.boundaries == "nvme"
        kept = self.rates.kernels.sum_bytes / 4
        exchanges = rounds if self.partial_sums.are_shared else 1
        sent = exchanges * residency.all.total(exchanged, Exchange.of(self.batch))
        return CopiedBytes(
            up=fetched + restored,
            down=offloaded + saved,
            read=read + parked + restored * on_drives,
            written=written + parked + saved * on_drives,
            exchanged=sent * kept,
            given=residency.resident.total(given_weights, num_ranks),
            gathered=sums.weights_fetched(choice, rounds) - sums.weights_fetched(choice, rounds, among),
        )

    @cached_property
    def added_bytes(self) -> int:
        """Return the bytes of host memory that adding up gradients there reads and writes."""
        return self.block_sums.added_bytes(self.choice, self.batch.num_micro_batches)

    @property
    def through_host_bytes(self) -> float:
        """Return the bytes that devices without access to each other exchange, both ways over their links."""
        return self.near_bytes if self.collectives.passes_host else 0.0

    @property
    def near_bytes(self) -> float:
        """Return the bytes that a rank sends to others of its node."""
        copied = self.copied_bytes
        return self.collectives.exchanged_near(copied.exchanged) + self.collectives.given_near(copied.given)

    @cached_property
    def update_bytes(self) -> int:
        """Return the bytes of host memory that the optimizer reads and writes, of this rank's share."""
        on_host = self.block_sums.residency(self.choice).on_host
        return on_host.total(updated_share, self.rates.optimizer, self.batch.num_ranks)

    @cached_property
    def demand(self) -> Demand:
        """Return what the step asks of what its lanes share."""
        copied = self.copied_bytes
        return Demand(
            up_bytes=copied.up + self.through_host_bytes,
            down_bytes=copied.down + self.through_host_bytes,
            update_bytes=self.update_bytes,
            sum_bytes=self.added_bytes,
            drive_bytes=copied.read + copied.written,
            least_s=max(self._lane_bounds_s.values()),
        )


def _lane_bounds(step: Step) -> dict[str, float]:
    """Add up what a step of a choice needs of each lane, without listing its tasks."""
    rates, choice, batch = step.rates, step.choice, step.batch
    count = batch.num_micro_batches
    costs, compute = step.costs, step.compute_s
    on_device_s = costs.step_s if rates.updates_in_compute else 0.0
    forward = step.sums[0]
    copied = step.copied_bytes
    through_host = step.through_host_bytes
    up, down = rates.fetch_s(copied.up + through_host), rates.offload_s(copied.down + through_host)
    collectives = step.collectives
    near_s = collectives.near_s(copied.exchanged) + collectives.sum_s(copied.exchanged)
    if copied.given and not collectives.passes_host:
        near_s += collectives.gather_s(collectives.given_near(copied.given))
    near_s += collectives.gather_s(copied.gathered) if batch.gathers else 0.0
    far_s = collectives.network_s(copied.exchanged + copied.given - step.near_bytes)
    update_s = rates.update_s(step.update_bytes)
    sums_s = rates.host_pass_s(step.added_bytes)
    if rates.spec.is_cpu:
        return {"everything in turn": compute + up + down + near_s + sums_s + update_s + costs.step_s}
    limits = {"compute": compute, "copies to the device": up, "copies to the host": down}
    if batch.num_ranks > 1:
        limits["exchange between GPUs"] = near_s
    if batch.num_nodes > 1:
        limits["network"] = far_s
    if choice.updates == "immediate" or sums_s:
        limits["optimizer"] = sums_s + update_s
    if choice.updates == "serial":
        limits["compute + optimizer"] = compute - on_device_s + update_s  # device and host update together
    elif choice.updates == "deferred":
        # updates run beside the next step's first round of forwards, which waits for them
        first_round = min(choice.lockstep, count) / count
        by_then = compute - on_device_s - forward * first_round
        limits["backward + optimizer"] = by_then + update_s
    if copied.read or copied.written:
        read_s, write_s = rates.read_s(copied.read), rates.write_s(copied.written)
        if rates.drives.is_duplex:
            limits |= {"drive reads": read_s, "drive writes": write_s}
        else:
            limits["drives"] = read_s + write_s
    return limits


def _bytes_by_label(program: Program) -> dict[str, int]:
    moved = dict.fromkeys(KINDS, 0)
    for operation in program.operations:
        moved[operation.label] += operation.nbytes
    return moved


def _shared_out(count: int, groups: int) -> list[int]:
    """Share out micro-batches among groups, as evenly as whole numbers allow."""
    return [count // groups + (number < count % groups) for number in range(groups)]
