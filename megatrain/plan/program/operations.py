"""The operations of a training step, as data.

Each kind of operation is a class in `plan.program.features`, which says all that is to be known of it: its
lane, the buffers that it reads and writes, its bytes and seconds, and what the engine does for it. Everything
else asks an operation, and nothing asks which kind it is: the engine executes the list of a step and asserts
that the model's visits match it, the ordering checker proves it, the planner times it, the trace prints it.
Waits are not in the list: they follow from the buffers that the operations read and write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

from megatrain.plan.program.buffers import Buffer
from megatrain.plan.program.kinds import Lane

Work: TypeAlias = Callable[[], object]
"""The function that an operation runs in its lane."""

Touched: TypeAlias = tuple[tuple[Buffer, ...], tuple[Buffer, ...]]
"""The buffers that are read, and those that are written."""

KINDS: dict[str, type[Operation]] = {}
"""The kinds of operations, by the label that their spans and tasks begin with."""

_SHOWN = (("slot", "s"), ("gradient_buffer", "g"), ("drive_staging", "d"), ("page", "p"))
"""Numbers of buffers that a line of a program shows, and how it does."""


class Task(NamedTuple):
    """An operation, or a part of it, with the time that it takes alone."""

    lane: Lane
    seconds: float
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    kind: str
    """The label of its operation, for bounds and charts: `fetch`, `forward`, `head`, ..."""


class Prices(Protocol):
    """The seconds of what operations do on a machine; `Pricing` has more methods, for `Operation.rate`."""

    passes_host: bool
    """What the ranks of a node exchange passes through its memory."""
    updates_in_compute: bool
    """Updates on the device run among the rest of compute."""

    def up_s(self, nbytes: float) -> float:
        """Return the seconds of a copy to the device."""

    def down_s(self, nbytes: float) -> float:
        """Return the seconds of a copy to the host."""

    def decode_s(self, block: int) -> float:
        """Return the seconds in which the device makes values of a block's codes, if it has any."""

    def device_update_s(self, block: int) -> float:
        """Return the seconds of the update of a block on the device."""

    def hold_s(self, block: int) -> float:
        """Return the seconds in which a block's gradient is rounded to where it waits on the device."""

    def kept_bytes(self, block: int, count: int, *, is_share: bool) -> float:
        """Return the bytes of so many partial sums of a block, as the kernels keep them."""

    def exchanged_near(self, nbytes: float) -> float:
        """Return how much of what an exchange of fp32 sums sends stays in the node."""

    def given_near(self, nbytes: float) -> float:
        """Return how much of what every rank gives to all others stays in the node."""

    def visit_s(self, block: int, *, is_backward: bool, is_head: bool) -> float:
        """Return the seconds of one micro-batch in a block."""

    def head_s(self, *, is_backward: bool) -> float:
        """Return the seconds of one micro-batch in a head that does not stream."""


class Parts(Protocol):
    """The parts of an engine, whose methods operations call; they are of torch, and this is not."""

    weights: Any
    """The weights of blocks on the device."""
    gradients: Any
    states: Any
    """The states of resident layers: all that an update changes."""
    activations: Any
    """The activations that wait on the host or on drives."""
    drives: Any
    """The state there, if there is any."""
    optimizer: Any
    """The optimizer, which norms and updates run."""
    counts: Any


class _Known:
    """What an operation knows of itself once it was asked, which is no part of what it is."""

    __slots__ = ("_touched",)
    _touched: Touched


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation(_Known):
    """One operation. A kind derives from this, with a label and a lane of its own.

    A block is what streams as one: a decoder layer, one of its fragments, or a resident part of the model.
    """

    block: int = -1
    """The number of its block; -1: it has several, or none."""
    nbytes: int = 0
    """Bytes that cross the link; of work on the host, bytes of its memory that are read and written."""

    label: ClassVar[str]
    lane: ClassVar[Lane]
    moves: ClassVar[str] = ""
    """The counter of its bytes in the report of a step and in a plan: `fetch_bytes`, `offload_bytes`, ..."""
    rate: ClassVar[str] = ""
    """The method of `Prices` that says how long its bytes take; none: it has its own `seconds`, or none."""
    is_compute: ClassVar[bool] = False
    """The model, or autograd, does it, so nothing is enqueued for it."""
    is_visit: ClassVar[bool] = False
    """It passes a block in compute."""
    is_backward: ClassVar[bool] = False
    """It is autograd's pass of a block or of the head."""
    is_sum: ClassVar[bool] = False
    """Its work on the host adds up gradients, beside the backward."""
    is_update: ClassVar[bool] = False
    """It updates a block's state on the host."""
    joins_update: ClassVar[bool] = False
    """It brings what other ranks have updated of the same block."""
    takes_sum: ClassVar[bool] = False
    """It takes what has added up out of a gradient buffer."""
    loads_sum: ClassVar[bool] = False
    """It brings what earlier rounds have added up into a gradient buffer."""
    ends_gradient: ClassVar[bool] = False
    """It follows a block's last backward of a round, for the block's gradient."""
    ends_round: ClassVar[bool] = False
    """For an outer block, it waits until the round's backward is over."""
    gathers: ClassVar[bool] = False
    """It makes weights whole of which each rank has brought a piece."""
    meets: ClassVar[bool] = False
    """All ranks do it together, and each waits there for the others."""
    brings_weights: ClassVar[bool] = False
    """It brings weights nearer to the device, on this rank alone."""
    is_fixed: ClassVar[bool] = True
    """What is enqueued is what the program says; False: the kind has a `begin`, which has to be asked."""
    changes: ClassVar[str] = ""
    """The method of `Integrity` that counts its work as a change of the state; none: it is no such change."""
    changes_home: ClassVar[bool] = False
    """It changes the state of its block in host memory."""

    def __init_subclass__(cls) -> None:
        """Take note of a kind."""
        if "label" in cls.__dict__:
            KINDS[cls.label] = cls
        cls.is_fixed = cls.begin is Operation.begin

    def touches(self) -> Touched:
        """Return the buffers that the operation reads, and those that it writes."""
        return (), ()

    def touched(self) -> Touched:
        """Return what `touches` does, which is found out once: a program is replayed in every step."""
        try:
            return self._touched
        except AttributeError:
            touched = self.touches()
            object.__setattr__(self, "_touched", touched)
            return touched

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """Return the buffers that the operation reads."""
        return self.touches()[0]

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """Return the buffers that the operation writes."""
        return self.touches()[1]

    def seconds(self, prices: Prices) -> float:
        """Return the seconds that it takes."""
        seconds: float = getattr(prices, self.rate)(self.nbytes) if self.rate else 0.0
        return seconds

    def tasks(self, prices: Prices) -> tuple[Task, ...]:
        """Return it as one task, or as two where its buffers are used one after the other."""
        return (self.task(self.lane, prices),)

    def task(self, lane: Lane, prices: Prices) -> Task:
        """Return it as one task of a lane."""
        reads, writes = self.touches()
        return Task(lane, self.seconds(prices), reads, writes, self.label)

    def through(self, buffer: int, nbytes: int | None = None) -> Operation:
        """Return the same with what it moves passing a host buffer; None: as many bytes as before."""
        raise AssertionError(f"{self} passes no host buffer")

    def begin(self, parts: Parts) -> tuple[Operation, ...]:
        """Return what to enqueue: itself, with what comes first, or nothing where it is done already."""
        return (self,)

    def work(self, parts: Parts) -> Work:
        """Return what it runs in its lane, made at the moment when it is enqueued."""
        raise AssertionError(f"{self} is a visit: the model makes it")

    def settle(self, parts: Parts) -> None:
        """Note, when it is enqueued, what it leaves where."""

    def __str__(self) -> str:
        """Render the operation as a line of a program."""
        parts = [f"{self.label:<9} b{self.block}" if self.block >= 0 else self.label]
        micro_batch = getattr(self, "micro_batch", 0)
        parts += [f"m{micro_batch}"] if micro_batch > 0 else []
        parts += [f"{letter}{n}" for name, letter in _SHOWN if (n := getattr(self, name, -1)) >= 0]
        parts += ["adds"] if getattr(self, "adds", False) else []
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Program:
    """Operations in launch order, and what the slots hold when they are done."""

    operations: tuple[Operation, ...]
    contents: tuple[int | None, ...]

    def __str__(self) -> str:
        """Render one operation per line."""
        return "\n".join(map(str, self.operations))

    def count(self, label: str) -> int:
        """Count the operations with one label."""
        assert label in KINDS, label
        return sum(operation.label == label for operation in self.operations)

    def nbytes(self, label: str) -> int:
        """Add up the bytes that operations with one label move."""
        assert label in KINDS, label
        return sum(operation.nbytes for operation in self.operations if operation.label == label)

    def moved(self) -> Counter[str]:
        """Add up the bytes that a report counts, by what they count as."""
        moved: Counter[str] = Counter()
        for operation in self.operations:
            moved[operation.moves] += operation.nbytes
        return moved


def kind_of(label: str) -> type[Operation]:
    """Return the kind of an operation whose span has a label; of no operation, `Operation` itself."""
    return KINDS.get(label.partition(" ")[0], Operation)
