"""One step of a choice as timed tasks: the program, and around it outer parts, head, norm, updates, drives.

The order is the engine's: what outer parts need, the rounds of the program, the norm, the updates in the
order in which the next forward wants them. The next step follows at once; its fetches wait for the updates
by the names of buffers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from functools import cached_property

from megatrain.config.choice import Choice, StepBatch
from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.host_buffers import (
    NUM_ACTIVATION_STAGING,
    NUM_GRADIENT_STAGING,
    NUM_PAGES,
    NUM_STATE_STAGING,
)
from megatrain.layout.moments import MomentFormat
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.cost.layer_costs import RECOMPUTED, LayerCosts
from megatrain.plan.cost.rates import Rates
from megatrain.plan.cost.timetable import Task, steady_ends
from megatrain.plan.memory.block_sums import Block, BlockSums, list_blocks
from megatrain.plan.program.drive_traffic import with_activations_through
from megatrain.plan.program.operations import Buffer, Kind, Lane, LayerPlan, Operation, Visit
from megatrain.plan.program.schedule import fetch_residents, offload_residents, round_visits, schedule

_MAX_ROUNDS = 3
"""Rounds that are timed; more go on as the last of these did."""

_MAX_GROUPS = 4
"""Micro-batches of a round that are tasks of their own; more follow each other in one task."""

_MANY_LAYERS = 60
"""Of models with more layers, a visit is two tasks at most: a layer is a small part of a step."""


class Step:
    """The tasks of one step, and what is known of them without placing them."""

    def __init__(self, rates: Rates, anatomy: Anatomy, choice: Choice, batch: StepBatch) -> None:
        """List the tasks; `steady_s` places them."""
        self.rates = rates
        self.anatomy = anatomy
        self.choice = choice
        self.batch = batch

    @cached_property
    def blocks(self) -> list[Block]:
        """What streams as one: of all layers in forward order, then the outer ones."""
        return list_blocks(self.anatomy, self.choice, self.rates.moments)

    @cached_property
    def block_sums(self) -> BlockSums:
        """Sums over the blocks."""
        return BlockSums.of(self.anatomy, self.choice.fragments)

    @cached_property
    def step_s(self) -> float:
        """Seconds of one step among many equal ones."""
        rounds = -(-self.batch.num_micro_batches // self.choice.lockstep)
        tasks, marked = self.tasks(min(rounds, _MAX_ROUNDS))
        spec = self.rates.spec
        if spec.is_cpu:
            more = sum(task.seconds for task in tasks[marked[-2] + 1 : marked[-1] + 1]) if rounds > 1 else 0.0
            return sum(task.seconds for task in tasks) + max(0, rounds - _MAX_ROUNDS) * more
        shares = spec.drives is not None and not spec.drives.is_duplex
        ends, before = steady_ends(tasks, waits_for_compute=spec.launches_inline, drives_share=shares)
        step_s = ends[marked[-1]] - before[marked[-1]]
        if rounds <= _MAX_ROUNDS:
            lanes: Counter[Lane] = Counter()
            for task in tasks:
                lanes[task.lane] += task.seconds  # type: ignore[assignment]
            return max(step_s, *lanes.values())  # two steps do not show a backlog that grows with each
        return step_s + (rounds - _MAX_ROUNDS) * (ends[marked[1]] - ends[marked[0]])

    def tasks(self, num_rounds: int | None = None) -> tuple[list[Task], list[int]]:
        """Return the tasks of a step of so many rounds, and the number of each round's last backward."""
        rounds = -(-self.batch.num_micro_batches // self.choice.lockstep)
        return _Builder(self, num_rounds or rounds).build()

    @cached_property
    def costs(self) -> LayerCosts:
        """What the layers cost."""
        return LayerCosts(self.rates, self.anatomy, self.choice, self.batch)

    @cached_property
    def sums(self) -> list[float]:
        """`LayerCosts.sums` of all micro-batches."""
        return [value * self.batch.num_micro_batches for value in self.costs.sums()]

    @cached_property
    def compute_s(self) -> float:
        """Seconds of all that the device computes."""
        costs = self.costs
        forward, backward, again, _ = self.sums
        outside = (costs.head_s + costs.outer_s) * self.batch.num_micro_batches + costs.step_s
        return forward + backward + again + outside

    @cached_property
    def bounds_s(self) -> dict[str, float]:
        """Seconds below which no order of these tasks can be, by cause."""
        return bounds(self)


def bounds(step: Step) -> dict[str, float]:
    """Add up what a step of a choice needs of each lane, without listing its tasks."""
    rates, choice, batch = step.rates, step.choice, step.batch
    count = batch.num_micro_batches
    rounds = -(-count // choice.lockstep)
    costs, block_sums, compute = step.costs, step.block_sums, step.compute_s
    forward, _, _, saved = step.sums
    fetched, offloaded = block_sums.moved_bytes(choice, rounds)
    up, down = rates.fetch_s(fetched + saved), rates.offload_s(offloaded + saved)
    on_host = block_sums.residency(choice).on_host
    update_s = rates.update_s(on_host.total(BlockBytes.update_bytes, rates.moments))
    if rates.spec.is_cpu:
        return {"everything in turn": compute + up + down + update_s}
    limits = {"compute": compute, "copies to the device": up, "copies to the host": down}
    if choice.updates == "immediate":
        limits["optimizer"] = update_s
    elif choice.updates == "serial":
        limits["compute + optimizer"] = compute - costs.step_s + update_s  # device and host update together
    else:
        # updates run beside the next step's first round of forwards, which waits for them
        first_round = min(choice.lockstep, count) / count
        by_then = compute - costs.step_s - forward * first_round
        limits["backward + optimizer"] = by_then + update_s
    drive = block_sums.drive_bytes(choice, rounds)
    if drive != (0, 0) or choice.boundaries == "nvme":
        stowed = saved if choice.boundaries == "nvme" else 0.0
        read_s, write_s = rates.read_s(drive[0] + stowed), rates.write_s(drive[1] + stowed)
        if rates.drives.is_duplex:
            limits |= {"drive reads": read_s, "drive writes": write_s}
        else:
            limits["drives"] = read_s + write_s
    return limits


class _Builder:
    """Lists the tasks of one step."""

    def __init__(self, step: Step, num_rounds: int) -> None:
        self.step, self.rates, self.choice = step, step.rates, step.choice
        self.blocks = step.blocks
        self.sizes = [block.size for block in self.blocks]
        self.num_rounds = num_rounds
        together = min(step.choice.lockstep, step.batch.num_micro_batches)
        left = step.batch.num_micro_batches % together or together
        self.rounds = [together] * (num_rounds - 1) + [left]
        """Micro-batches of each round."""
        self.most_groups = _MAX_GROUPS if len(step.anatomy.layers) <= _MANY_LAYERS else 2
        self.groups = min(together, self.most_groups)
        """Tasks of a visit of a whole round."""
        self.weight = together / self.groups
        """Micro-batches in one task."""
        self.costs = step.costs
        self.tasks: list[Task] = []
        self.num_saved = self.num_restored = self.num_staged = 0
        self.restored: dict[tuple[int, int], Buffer] = {}
        self.staging = deque(range(NUM_ACTIVATION_STAGING))
        """Host buffers before the drives that no visit has."""
        self.staged: dict[tuple[int, int], int] = {}
        self.begins: dict[int, int] = {}
        """Visits with which a round begins, and its micro-batches."""
        self.turns: set[int] = set()
        """Visits before which the head is passed."""
        self.heads: list[int] = []
        """Tasks with which it is."""
        self.outer = [n for n, block in enumerate(self.blocks) if block.layer < 0]
        self.at_home = [n for n in self.outer if not self.sizes[n].updates_on_device]

    def build(self) -> tuple[list[Task], list[int]]:
        is_immediate = self.choice.updates == "immediate"
        program = schedule(
            self._visits(),
            self.sizes,
            [None] * self.choice.num_slots,
            num_gradient_buffers=self.choice.num_gradient_buffers,
            num_staging=NUM_GRADIENT_STAGING if is_immediate else 0,
            updates_at_once=is_immediate,
        )
        self._begin()
        passed = 0
        operations: Sequence[Operation] = program.operations
        if self.choice.boundaries == "nvme":
            operations = with_activations_through(operations)
        for operation in operations:
            if operation.kind in (Kind.FORWARD, Kind.BACKWARD):
                if passed in self.begins:
                    self._begin_round(self.begins[passed])
                if passed in self.turns:
                    self._pass_head()
                passed += 1
            self._add(operation)
        self._end(is_immediate)
        backwards = [n for n, task in enumerate(self.tasks) if task.kind == "backward"]
        ends = [max(n for n in backwards if n < head) for head in self.heads[1:]]
        return self.tasks, [*ends, backwards[-1]]

    def _visits(self) -> list[Visit]:
        layers: list[list[int]] = [[] for _ in self.step.anatomy.layers]
        for number, block in enumerate(self.blocks):
            if block.layer >= 0:
                layers[block.layer].append(number)
        plans = [
            LayerPlan(
                tuple(numbers),
                is_recomputed=policy in RECOMPUTED,
                saves=policy == "offload" or (self.choice.boundaries != "device" and policy in RECOMPUTED),
                drops=policy == "drop_boundary" and number > 0,
            )
            for number, (numbers, policy) in enumerate(zip(layers, self.choice.activations, strict=True))
        ]
        visits: list[Visit] = []
        for number, size in enumerate(self.rounds):
            groups = min(size, self.most_groups)
            round_ = round_visits(
                plans,
                num_micro_batches=groups,
                loads=number > 0,
                completes=number == self.num_rounds - 1,
            )
            # the head comes after every layer's forward, before what backward makes again
            self.begins[len(visits)] = size
            self.turns.add(len(visits) + groups * sum(len(plan.blocks) for plan in plans))
            visits += round_
        return visits

    def _begin(self) -> None:
        for operation in fetch_residents(self.sizes):
            self._add(operation)

    def _begin_round(self, size: int) -> None:
        self.groups = min(size, self.most_groups)
        self.weight = size / self.groups

    def _pass_head(self) -> None:
        self.heads.append(len(self.tasks))
        reads = tuple(("resident", n) for n in self.outer)
        writes = tuple(("resident_gradient", n) for n in self.outer)
        seconds = (self.costs.head_s + self.costs.outer_s) * self.weight
        for _ in range(self.groups):
            self.tasks.append(Task(Lane.COMPUTE, seconds, reads, writes, "head"))

    def _end(self, is_immediate: bool) -> None:
        # gradients of resident blocks are complete where the last backward ends, and the norm is of all
        complete: Buffer = ("complete", 0)
        leaving = tuple(("resident_gradient", n) for n in self.at_home)
        self.tasks.append(Task(Lane.COMPUTE, 0.0, (), (complete, *leaving), "collect"))
        for operation in offload_residents(self.sizes, self.at_home):
            self._add(operation)
        on_device = [n for n, size in enumerate(self.sizes) if size.updates_on_device]
        by_host = [n for n in (*self.outer, *range(len(self.blocks))) if n not in on_device]
        order = list(dict.fromkeys(n for n in by_host if self.sizes[n].is_trained))
        if not is_immediate:
            squares = tuple(("squares", n) for n in range(len(self.blocks)) if self.sizes[n].is_trained)
            self.tasks.append(Task(Lane.HOST, 0.0, (*squares, complete), (("norm", 0),), "norm"))
            for number in order:
                self._update(number, follows_norm=True)
        else:
            for number in order:
                if not self.sizes[number].is_streamed:
                    self._update(number, follows_norm=False)
        if on_device:
            seconds = self.costs.step_s
            reads: tuple[Buffer, ...] = () if is_immediate else (("norm", 0),)
            writes = tuple(("resident", n) for n in on_device)
            self.tasks.append(Task(Lane.COMPUTE, seconds, reads, writes, "update on the device"))
        if self.choice.updates == "serial":
            written = tuple(("working", n) for n in order)
            self.tasks.append(Task(Lane.COMPUTE, 0.0, written, (), "wait"))

    def _update(self, number: int, *, follows_norm: bool, staging: int = -1) -> None:
        """Add one block's update, with its gradient from the device and its state from the drives."""
        block = self.blocks[number]
        reads: tuple[Buffer, ...] = (("norm", 0),) if follows_norm else ()
        if follows_norm and self.choice.gradients == "device" and block.size.is_streamed:
            home: Buffer = ("gradient_staging", self.num_staged % NUM_GRADIENT_STAGING)
            seconds = self.rates.offload_s(block.size.offload_bytes)
            waiting = (("waiting_gradient", number), *reads)
            self.tasks.append(Task(Lane.OFFLOAD, seconds, waiting, (home,), "offload"))
        else:
            home = ("staging", staging) if staging >= 0 else ("gradient", number)
        state: Buffer = ("moments", number)
        on_drive = self.step.block_sums.is_state_on_drives(self.choice, number)
        nbytes = block.sizes.remainder_bytes + block.sizes.moment_bytes(MomentFormat.FP32)
        if self.step.block_sums.is_working_on_drives(self.choice, number):
            nbytes += block.size.fetch_bytes
        if on_drive:
            state = ("state_staging", self.num_staged % NUM_STATE_STAGING)
            self.tasks.append(Task(Lane.READ, self.rates.read_s(nbytes), (), (state,), "read"))
        self.num_staged += 1
        writes: tuple[Buffer, ...] = (("working", number), state)
        seconds = self.rates.update_s(block.size.update_bytes)
        self.tasks.append(Task(Lane.HOST, seconds, (home, *reads, state), writes, "update"))
        if on_drive:
            seconds = self.rates.write_s(nbytes)
            self.tasks.append(Task(Lane.WRITE, seconds, (state,), (), "write"))

    def _add(self, operation: Operation) -> None:
        number = operation.block
        kind, reads, writes = operation.kind, operation.reads, operation.writes
        spec = self.rates.spec
        beside = spec.both_share < 1.0 and not spec.is_cpu and operation.kind is not Kind.FETCH
        match kind:
            case Kind.FETCH:
                self._fetch(operation)
                return
            case Kind.UPDATE:
                self._update(number, follows_norm=False, staging=operation.staging)
                return
            case Kind.LOAD:
                seconds = self.rates.fetch_s(operation.nbytes, beside=beside)
            case Kind.OFFLOAD:
                seconds = self.rates.offload_s(operation.nbytes, beside=beside)
                if self._waits_on_device(operation):
                    seconds = self.rates.device_pass_s(2 * operation.nbytes)
                    writes = (("waiting_gradient", number), ("squares", number))
            case Kind.FORWARD:
                seconds, writes = self._forward(operation)
            case Kind.BACKWARD:
                block = self.blocks[number]
                seconds = self.costs.backward_s(block.layer) * block.share * self.weight
                if block.is_last:  # the others' recomputation is a visit of its own
                    share = block.share if self.costs.passes_again(block.layer) else 1.0
                    seconds += self.costs.inside_s(block.layer) * share * self.weight
                buffer = self.restored.get((number, operation.micro_batch))
                reads = reads if buffer is None else (*reads, buffer)
                self.tasks.append(Task(operation.lane, seconds, reads, (), kind.value))
                # only what autograd has made needs the gradient buffer, not what makes it
                self.tasks.append(Task(operation.lane, 0.0, (), writes, "collect"))
                return
            case Kind.SAVE | Kind.RESTORE | Kind.STOW | Kind.RECALL:
                self._carry(operation)
                return
            case _:
                raise AssertionError(f"{operation} is no part of a program")
        self.tasks.append(Task(operation.lane, seconds, reads, writes, kind.value))

    def _waits_on_device(self, operation: Operation) -> bool:
        is_streamed = self.sizes[operation.block].is_streamed
        return self.choice.gradients == "device" and operation.completes and is_streamed

    def _fetch(self, operation: Operation) -> None:
        seconds = self.rates.fetch_s(operation.nbytes)
        reads = operation.reads
        if self.step.block_sums.is_working_on_drives(self.choice, operation.block):
            buffer: Buffer = ("weights_staging", self.num_staged % NUM_PAGES)
            self.num_staged += 1
            read_s = self.rates.read_s(operation.nbytes)
            self.tasks.append(Task(Lane.PAGE, read_s, reads, (buffer,), "page"))
            reads = (buffer,)
        self.tasks.append(Task(operation.lane, seconds, reads, operation.writes, "fetch"))

    def _forward(self, operation: Operation) -> tuple[float, tuple[Buffer, ...]]:
        block = self.blocks[operation.block]
        seconds = self.costs.forward_s(block.layer) * block.share * self.weight
        if not self.costs.saved_of(block.layer):
            return seconds, operation.writes
        # a visit's tensors leave the device one visit later: two at a time are there
        return seconds, (*operation.writes, ("leaving", self.num_saved % 2))

    def _carry(self, operation: Operation) -> None:
        """Add a copy of saved activations."""
        number = operation.block
        home = ("activations", number * _MAX_GROUPS + operation.micro_batch)
        nbytes = self.costs.saved_of(self.blocks[number].layer) * self.weight
        if self.choice.boundaries == "nvme":
            drive, home = home, self._pass_staging(operation)
            if operation.kind is Kind.STOW:
                self.tasks.append(Task(operation.lane, self.rates.write_s(nbytes), (home,), (drive,), "stow"))
                return
            if operation.kind is Kind.RECALL:
                self.tasks.append(
                    Task(operation.lane, self.rates.read_s(nbytes), (drive,), (home,), "recall")
                )
                return
        if operation.kind is Kind.SAVE:
            ring = ("leaving", self.num_saved % 2)
            self.num_saved += 1
            seconds = self.rates.offload_s(nbytes)
            self.tasks.append(Task(operation.lane, seconds, (ring,), (home,), "save"))
            return
        ring = ("arriving", self.num_restored % 2)
        self.num_restored += 1
        self.restored[number, operation.micro_batch] = ring
        seconds = self.rates.fetch_s(nbytes, beside=not self.rates.spec.is_cpu)
        self.tasks.append(Task(operation.lane, seconds, (home,), (ring,), "restore"))

    def _pass_staging(self, operation: Operation) -> Buffer:
        """Return the host buffer of a visit on its way to the drives or back, as the engine finds them."""
        visit = operation.block, operation.micro_batch
        if operation.kind in (Kind.SAVE, Kind.RECALL):
            self.staged[visit] = self.staging.popleft()
        buffer = self.staged.get(visit, -1)  # none: of a later round, restored when that is there
        if buffer >= 0 and operation.kind in (Kind.STOW, Kind.RESTORE):
            self.staging.append(self.staged.pop(visit))
        return "activation_staging", buffer
