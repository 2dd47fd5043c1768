"""The operations of the model and autograd: they pass blocks, and the head where it does not stream."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.plan.program.buffers import Buffer, gradients_buffer
from megatrain.plan.program.features.roles import BlockPass
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Operation, Prices, Task, Touched
from megatrain.plan.program.visits import Visit


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward(BlockPass):
    """The model passes through a block; also where a recomputation passes it again."""

    saved: int = -1
    """The number, unique in the program, of what it leaves for the host; -1: it leaves nothing."""

    label = "forward"

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """Return what a visit saves, which leaves one visit later: two at a time are on the device."""
        return (("leaving", self.saved % 2),) if self.saved >= 0 else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Backward(BlockPass):
    """Autograd passes through a block, with its recomputation if it has one; gradients add up in a buffer."""

    collects: bool = True
    """Gradients add up; False: the block is not trained."""

    label, is_backward = "backward", True

    @property
    def adds(self) -> bool:
        """Return whether the gradient adds to that of earlier micro-batches of the step."""
        return self.visit.loads or self.visit.adds

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """Return where gradients add up: a buffer of the ring, or the resident block's own."""
        return (gradients_buffer(self.block, self.gradient_buffer),) if self.collects else ()

    def tasks(self, prices: Prices) -> tuple[Task, ...]:
        """Return two tasks: only what autograd has made needs the gradient buffer, not what makes it."""
        visit = Task(self.lane, self.seconds(prices), self.reads, (), self.label)
        return visit, Task(self.lane, 0.0, (), self.writes, "collect")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadForward(Operation):
    """A micro-batch passes the final norm, the head and the loss."""

    visit: Visit
    blocks: tuple[int, ...] = ()
    """The blocks outside all layers."""

    label, lane, is_compute = "head", Lane.COMPUTE, True

    @property
    def micro_batch(self) -> int:
        """Return the number of the micro-batch within the round."""
        return self.visit.micro_batch

    def touches(self) -> Touched:
        """Say that it reads the weights of blocks in no layer."""
        return tuple(("resident", block) for block in self.blocks), ()

    def seconds(self, prices: Prices) -> float:
        """Return the seconds of all micro-batches that pass together."""
        return prices.head_s(is_backward=self.is_backward) * self.visit.num_micro_batches


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadBackward(HeadForward):
    """Autograd passes the loss, the head and the final norm, with what a head in chunks computes again."""

    label, is_backward = "head backward", True


def head_pass(visit: Visit, outer: tuple[int, ...]) -> Operation:
    """Return a pass of a head that does not stream; `outer`: the blocks in no layer."""
    return (HeadBackward if visit.is_backward else HeadForward)(visit=visit, blocks=outer)
