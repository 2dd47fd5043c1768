"""Our step as tasks: the program that `megatrain.plan` makes, with outer parts, head and state around it.

The order is the engine's: what outer parts need, the program, the norm, the updates in the order in which
the next forward wants them. The next step follows at once; its fetches wait for the updates by buffer names.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.overlap.work import DEVICE_STATE_BYTES, UPDATE_BYTES, Costs, Step, Task
from megatrain.plan.program.operations import BlockSize, Buffer, Kind, Lane, Operation
from megatrain.plan.program.schedule import schedule
from megatrain.plan.program.spec import StepSpec
from megatrain.plan.program.step import fetch_residents, offload_residents, update_program
from megatrain.plan.program.visits import LayerPlan, round_visits

NUM_SLOTS = 2
NUM_GRADIENT_BUFFERS = 2
NUM_STAGING = 4
MAX_TASK_BATCHES = 16
"""Micro-batches of a round that are tasks of their own; more follow each other in one task."""
LOGITS_BYTES = 1 << 30
"""Device memory for a chunk of logits and its gradient."""
USABLE = 0.95
"""Part of device memory that tensors may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What can be chosen about our step."""

    tokens: int
    num_micro_batches: int = 1
    is_immediate: bool = False
    """No clipping: every gradient is used up at once. Otherwise updates follow the norm (deferred)."""
    keeps: bool = False
    """Blocks keep the outputs of matmuls and attention where device memory allows, last blocks first.
    Otherwise every block keeps its input only, and is recomputed."""
    head_in_turn: bool = False
    """Where the head's state is on the host: its gradient leaves after its backward and it is updated last.
    Otherwise, as in the engine, all outer parts leave after the backward and are updated first."""
    num_resident: int = 0
    """First blocks that stay on the device with all of their state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What is on the device."""

    outer_on_device: bool
    saves_boundaries: bool
    num_kept: int
    device_bytes: float


def place(costs: Costs, setting: Setting) -> Placement:
    """Decide by arithmetic what the device has room for."""
    shape, limit = costs.shape, USABLE * costs.rates.device_bytes
    boundary = setting.tokens * shape.hidden * 2
    micro_tokens = setting.tokens / setting.num_micro_batches
    base: float = (
        NUM_SLOTS * 2 * shape.block_params + NUM_GRADIENT_BUFFERS * 4 * shape.block_params + LOGITS_BYTES
    )
    base += micro_tokens * shape.kept_bytes(whole=True) + 4 * boundary
    base += setting.num_resident * DEVICE_STATE_BYTES * shape.block_params
    outer = 2 * shape.part_params
    on_device = base + outer * DEVICE_STATE_BYTES <= limit
    base += outer * (DEVICE_STATE_BYTES if on_device else 6)
    saves = base + shape.num_blocks * boundary > limit
    base += 0 if saves else shape.num_blocks * boundary
    kept = setting.tokens * shape.kept_bytes(whole=False)
    has_room = setting.keeps and not saves
    num_kept = min(shape.num_blocks, max(0, int((limit - base) // kept))) if has_room else 0
    return Placement(
        outer_on_device=on_device,
        saves_boundaries=saves,
        num_kept=num_kept,
        device_bytes=base + num_kept * kept,
    )


def our_step(costs: Costs, setting: Setting) -> Step:
    """List one step's tasks."""
    return _Builder(costs, setting, place(costs, setting)).build()


class _Builder:
    def __init__(self, costs: Costs, setting: Setting, placement: Placement) -> None:
        self.costs, self.setting, self.placement = costs, setting, placement
        shape = costs.shape
        self.num_blocks = shape.num_blocks
        self.embedding, self.head = shape.num_blocks, shape.num_blocks + 1
        self.num_batches = min(setting.num_micro_batches, MAX_TASK_BATCHES)
        self.tokens = setting.tokens / self.num_batches
        self.boundary_bytes = self.tokens * shape.hidden * 2
        self.sizes = [
            self._size(shape.block_params, is_streamed=number >= setting.num_resident)
            for number in range(self.num_blocks)
        ]
        self.sizes += [self._size(shape.part_params, is_outer=True)] * 2
        self.tasks: list[Task] = []
        self.num_saved = self.num_restored = 0
        self.restored: dict[tuple[int, int], int] = {}

    def build(self) -> Step:
        layers = [
            LayerPlan(
                (number,),
                is_recomputed=number < self.num_blocks - self.placement.num_kept,
                saves=self.placement.saves_boundaries,
            )
            for number in range(self.num_blocks)
        ]
        program = schedule(
            round_visits(layers, num_micro_batches=self.num_batches),
            self.sizes,
            [None] * NUM_SLOTS,
            num_gradient_buffers=NUM_GRADIENT_BUFFERS,
            num_staging=NUM_STAGING if self.setting.is_immediate else 0,
            updates_at_once=self.setting.is_immediate,
        )
        in_turn = self.setting.head_in_turn
        self._begin(in_turn)
        passes_head = True
        for operation in program.operations:
            if operation.kind is Kind.BACKWARD and passes_head:
                passes_head = False
                self._pass_head(in_turn)
            self._add(operation)
        marked = max(number for number, task in enumerate(self.tasks) if task.kind == "backward")
        self._end(in_turn)
        details = {
            "outer_on_device": self.placement.outer_on_device,
            "boundaries_on_host": self.placement.saves_boundaries,
            "blocks_kept": self.placement.num_kept,
            "device_bytes": self.placement.device_bytes,
            "program_bytes": {kind.value: program.nbytes(kind) for kind in (Kind.FETCH, Kind.OFFLOAD)},
        }
        name = "immediate" if self.setting.is_immediate else "deferred"
        return Step(
            name=f"ours, {name}" + (", keep" if self.setting.keeps else ""),
            tasks=self.tasks,
            costs=self.costs,
            tokens=self.setting.tokens,
            marked=marked,
            is_deferred=not self.setting.is_immediate,
            details=details,
        )

    def _size(self, params: int, *, is_streamed: bool = False, is_outer: bool = False) -> BlockSize:
        return BlockSize(
            is_streamed=is_streamed,
            is_trained=True,
            fetch_bytes=2 * params,
            offload_bytes=2 * params,
            accumulator_bytes=4 * params,
            update_bytes=UPDATE_BYTES * params,
            updates_on_device=not is_streamed and (not is_outer or self.placement.outer_on_device),
        )

    @property
    def _spec(self) -> StepSpec:
        layers = [LayerPlan((number,)) for number in range(self.num_blocks)]
        return StepSpec(
            sizes=self.sizes,
            layers=layers,
            num_slots=NUM_SLOTS,
            num_gradient_buffers=NUM_GRADIENT_BUFFERS,
        )

    @property
    def _device_parts(self) -> list[int]:
        return [number for number, size in enumerate(self.sizes) if size.updates_on_device]

    @property
    def _host_outer(self) -> list[int]:
        return [] if self.placement.outer_on_device else [self.embedding, self.head]

    def _begin(self, in_turn: bool) -> None:
        first = self._host_outer[: 1 if in_turn else None]
        self._add_all(fetch_residents(self.sizes, first))
        work = self.costs.device_pass(2 * self.setting.tokens * self.costs.shape.hidden * 2)
        self._compute("forward", work, reads=(("resident", self.embedding),))

    def _pass_head(self, in_turn: bool) -> None:
        """Pass the head and the loss, in token chunks that are recomputed: 2 forwards and a backward."""
        if in_turn:
            self._add_all(fetch_residents(self.sizes, self._host_outer[1:]))
        for _ in range(self.num_batches):
            self._compute(
                "head",
                4 * self.costs.head(self.tokens),
                reads=(("resident", self.head),),
                writes=(("resident_gradient", self.head),),
            )
        if in_turn:
            self._add_all(offload_residents(self.sizes, self._host_outer[1:]))
            if self.setting.is_immediate:
                self._update_outer(self._host_outer[1:])

    def _end(self, in_turn: bool) -> None:
        gradient = (("resident_gradient", self.embedding),)
        work = self.costs.device_pass(6 * self.costs.shape.part_params)
        self._compute("backward", work, writes=gradient)
        last = self._host_outer[: 1 if in_turn else None]
        self._add_all(offload_residents(self.sizes, last))
        parts = self._device_parts
        numel = sum(self.sizes[part].fetch_bytes // 2 for part in parts)
        if self.setting.is_immediate:
            self._update_outer(last)
        else:
            if parts:
                squares = tuple(("squares", part) for part in parts)
                self._compute("norm", self.costs.device_pass(4 * numel), writes=squares)
            operations = [o for o in update_program(self._spec, range(len(self.sizes))) if not o.on_device]
            if in_turn:
                operations.sort(key=lambda operation: operation.block == self.head)
            self._add_all(operations)
        if parts:  # after the norm; the embedding and the first blocks wait for it
            norm_read: tuple[Buffer, ...] = () if self.setting.is_immediate else (("norm", 0),)
            resident = tuple(("resident", part) for part in parts)
            work = self.costs.device_pass((UPDATE_BYTES + 2) * numel)
            self._compute("update", work, reads=norm_read, writes=resident)

    def _update_outer(self, parts: list[int]) -> None:
        for part in parts:
            nbytes = self.sizes[part].update_bytes
            self._add(Operation(kind=Kind.UPDATE, block=part, follows_norm=False, nbytes=nbytes))

    def _compute(
        self, kind: str, work: float, *, reads: tuple[Buffer, ...] = (), writes: tuple[Buffer, ...] = ()
    ) -> None:
        self.tasks.append(Task(Lane.COMPUTE, work, reads, writes, kind))

    def _add_all(self, operations: list[Operation]) -> None:
        for operation in operations:
            self._add(operation)

    def _add(self, operation: Operation) -> None:
        task = Task(
            operation.lane,
            float(operation.nbytes),
            operation.reads,
            operation.writes,
            operation.kind.value,
        )
        match operation.kind:
            case Kind.FORWARD:
                task = task._replace(work=self.costs.forward(self.tokens))
                if self.placement.saves_boundaries:
                    task = task._replace(writes=(*task.writes, ("boundary", self.num_saved % 4)))
            case Kind.SAVE:
                ring, home = ("boundary", self.num_saved % 4), ("home", self._key(operation))
                self.num_saved += 1
                task = task._replace(work=self.boundary_bytes, reads=(ring,), writes=(home,))
            case Kind.RESTORE:
                ring = ("restored", self.num_restored % 2)
                self.restored[operation.block, operation.micro_batch] = ring[1]
                self.num_restored += 1
                home = ("home", self._key(operation))
                task = task._replace(work=self.boundary_bytes, reads=(home,), writes=(ring,))
            case Kind.BACKWARD:
                task = task._replace(work=self._backward_work(operation))
                ring_number = self.restored.get((operation.block, operation.micro_batch))
                if ring_number is not None:
                    task = task._replace(reads=(*task.reads, ("restored", ring_number)))
            case _:
                pass
        self.tasks.append(task)

    def _key(self, operation: Operation) -> int:
        return operation.block * MAX_TASK_BATCHES + operation.micro_batch

    def _backward_work(self, operation: Operation) -> float:
        """Backward, recomputation, and the passes that add gradients up and sum their squares."""
        costs, shape = self.costs, self.costs.shape
        is_kept = operation.block >= self.num_blocks - self.placement.num_kept
        work = (2 if is_kept else 3) * costs.forward(self.tokens)
        if is_kept:  # norms and the activation function, made again
            work += costs.device_pass(self.tokens * 2 * (4 * shape.hidden + 3 * shape.intermediate))
        # one micro-batch: summed up on the way out. More: bf16 in, fp32 read and written, rounded at the end
        num_batches = self.setting.num_micro_batches
        passes = 2 if num_batches == 1 else (2 + 4) + (num_batches - 1) * (2 + 8) + (4 + 2)
        return work + costs.device_pass(passes * shape.block_params) / self.num_batches
