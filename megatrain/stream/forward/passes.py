"""One pass of a micro-batch through the whole model, and through the outer blocks that stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from megatrain.errors import ModelError
from megatrain.model.chunk_sums import ChunkSums
from megatrain.plan.program.kinds import Kind
from megatrain.store.state import HostState
from megatrain.store.tiered import TieredState
from megatrain.stream.activations.boundaries import LastCall
from megatrain.stream.execute.block_visit import BlockVisit
from megatrain.stream.execute.executor import Executor
from megatrain.stream.execute.slots import Slots
from megatrain.stream.forward.arrangement import Arrangement
from megatrain.stream.forward.attached import AttachedBlock, AttachedLayer
from megatrain.stream.forward.gradient_hooks import Backward
from megatrain.stream.forward.head_backward import Cut
from megatrain.stream.forward.overrides import Overrides
from megatrain.stream.forward.stream_weights import (
    ANCHOR,
    HEAD_ANCHOR,
    Place,
    SavedWeight,
    exchange,
    stream_weights,
    swapped,
)

_STAGED_BYTES = 16 << 20
"""Two million ids. Larger inputs, which are embeddings, would leave as much locked memory behind."""


class Pass:
    """One forward of the model, and its backward: holds the weights of outer blocks for it."""

    def __init__(self, arrangement: Arrangement, whole: Pass | None = None) -> None:
        """Stream the outer blocks for the pass that comes next, or for a part of one that goes on."""
        rounds = arrangement.rounds
        self.begin_backward = rounds.begin_backward
        self.micro_batch: int = rounds.micro_batch if whole is None else whole.micro_batch
        own = Backward(rounds.call)
        self.backward: Backward = own if whole is None else whole.backward._replace(is_part=True)
        """Of whom its gradients are."""
        self._adds_up = rounds.adds_up
        """The gradients of other micro-batches will be added to this one's."""
        self._passed: set[AttachedLayer] = set()
        self.last_call = LastCall()
        self._arrangement = arrangement
        self._outer = arrangement.resident_outer
        is_part = whole is not None
        self._chunk_sums: dict[int, ChunkSums] = {}
        """By block: what chunks of the head add to the gradients of weights that others use too."""
        self.tensors = {
            block.index: self._stream_block(block, whole, of_head=is_part) for block in self._outer
        }
        self._of_head: Mapping[int, Sequence[Tensor]] = self.tensors
        """What head and loss compute with, by block."""
        self._places: list[Place] = []
        self._own = self._fill(self.tensors)
        self._parameters: list[Any] | None = None
        self.is_in_head = is_part
        """The last layer is behind it."""
        self._head_visit: OuterVisit | None = None
        self.until_end = ExitStack()
        """What lasts until the forward has ended."""

    def enter_head(self, output: Any, cuts: list[Cut] | None) -> Any:
        """Return the last layer's output for head and loss to go on with, which find weights of their own.

        What is registered behind the layers has all of its gradient when the head's backward has ended.

        Args:
            output: Hidden states, or a tuple that begins with them.
            cuts: Of the step's call that makes the pass; None: somebody else does, and runs the backward.
        """
        self.is_in_head = True
        cut = Cut()
        behind = [block for block in self._outer if block.block.is_behind]
        found = dict(self.tensors)
        for block in behind:
            found[block.index] = self._stream_block(block, None, of_head=True)
        if cuts is not None:
            cuts.append(cut)
            hidden = output[0] if type(output) is tuple else output
            if isinstance(hidden, Tensor) and hidden.requires_grad:
                others = [block.index for block in self._outer if not block.block.is_behind]
                held = [tensor for index in others for tensor in found[index] if tensor.requires_grad]
                hidden, passed = cut.through(hidden, held)
                output = (hidden, *output[1:]) if type(output) is tuple else hidden
                handed = iter(passed)
                for index in others:
                    found[index] = [next(handed) if t.requires_grad else t for t in found[index]]
        self._of_head = found
        self._own = self._fill(found)
        if self._parameters is not None:
            exchange(self._places, self._own)
        return output

    def _fill(self, found: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
        """Return the tensors for all places of outer blocks, from those of each block."""
        own: list[Tensor] = []
        self._places = []
        for block in self._outer:
            places, tensors = block.fill(found[block.index], self.tensors)
            self._places += places
            own += tensors
        return own

    def visit_outer(self, block: AttachedBlock) -> OuterVisit:
        """Return the micro-batch's visit of an outer block that streams: one for all chunks of a head."""
        if block.block.is_head and self._head_visit is not None:
            return self._head_visit
        arrangement = self._arrangement
        visit = OuterVisit(
            block,
            arrangement.executor,
            arrangement.slots,
            self.micro_batch,
            self.begin_backward,
            self.until_end,
            self.backward,
        )
        self._head_visit = visit if block.block.is_head else None
        return visit

    def note(self, layer: AttachedLayer) -> None:
        """Take note that a layer runs, with gradients.

        Raises:
            ModelError: It runs again, and its gradients could not add up in a resident model's order.
        """
        if layer in self._passed and self._adds_up:
            raise ModelError(
                f"the model runs {layer.name} more than once in a forward: with several micro-batches in a "
                "step, its gradients would be rounded in another order than without streaming; use one "
                "micro-batch per step"
            )
        self._passed.add(layer)

    def put(self) -> None:
        """Let the model find the streamed tensors in place of its own parameters."""
        assert self._parameters is None
        self._parameters = exchange(self._places, self._own)

    def restore(self) -> None:
        """Give the model its parameters back, if they are not there."""
        if self._parameters is not None:
            exchange(self._places, self._parameters)
            self._parameters = None

    def __enter__(self) -> Pass:
        self.put()
        return self

    def __exit__(self, *_: object) -> None:
        self.until_end.close()
        self.restore()
        # what the head was given leads back here by ways that no garbage collector sees
        self._places, self._own, self._of_head, self._chunk_sums = [], [], self.tensors, {}

    def _sums_of_chunks(self, block: AttachedBlock) -> ChunkSums | None:
        """Return where chunks add up a block's gradients; None: it is the head's own, or wants none."""
        if block.index not in self._chunk_sums and not block.block.is_behind:
            held = [tensor for tensor in self._of_head[block.index] if tensor.requires_grad]
            if held:
                self._chunk_sums[block.index] = ChunkSums(held)
        return self._chunk_sums.get(block.index)

    def _stream_block(self, block: AttachedBlock, whole: Pass | None, *, of_head: bool) -> list[Tensor]:
        arrangement, micro_batch = self._arrangement, self.micro_batch
        trained, begin_backward, executor = block.trained_now(), self.begin_backward, arrangement.executor
        aliases = arrangement.slots.aliases(block.index, -1)
        sums = None if whole is None or not torch.is_grad_enabled() else whole._sums_of_chunks(block)
        if sums is not None:
            return stream_weights(aliases, trained, sums.add, anchor=sums.token)

        def collect(grads: Sequence[Tensor | None]) -> None:
            begin_backward()
            if any(grad is not None for grad in grads):
                by_entry = block.line_up(grads, trained, self.backward)
                executor.collect_resident(block.index, micro_batch, by_entry)

        return stream_weights(aliases, trained, collect, anchor=HEAD_ANCHOR if of_head else ANCHOR)


class OuterVisit(BlockVisit):
    """A micro-batch in an embedding or a head that streams, which is entered when its module is called.

    A head may run in chunks, whose forwards run again in the backward: all chunks of a micro-batch are one
    visit each way. What autograd saves of the weights is their place in the block, as in a layer that keeps
    what it saves.
    """

    def __init__(
        self,
        block: AttachedBlock,
        executor: Executor,
        slots: Slots,
        micro_batch: int,
        begin_backward: Callable[[], None],
        until_end: ExitStack,
        backward: Backward,
    ) -> None:
        """Prepare the visit of `block` by a micro-batch, by its number within the round.

        Args:
            block: The embedding, or the head.
            executor: Opens and closes visits.
            slots: Where the block's weights are then.
            micro_batch: Number within the round.
            begin_backward: Called when autograd reaches the block.
            until_end: Is closed when the pass's forward has ended.
            backward: Of whom its gradients are.
        """
        super().__init__(block.index, micro_batch, self)
        self._attached = block
        self._executor = executor
        self._slots = slots
        self._begin_backward = begin_backward
        self._trained = block.trained_now()
        self._is_head = block.block.is_head
        self._until_end = until_end
        self._backward = backward
        self._read: dict[str, Tensor] | None = None

    def run(
        self,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        in_chunk: bool,
    ) -> Any:
        """Run the module's own forward on the weights in the slot.

        Args:
            inner: That forward.
            args: Of the call.
            kwargs: Of the call.
            in_chunk: It runs again in the backward, so that autograd keeps nothing of it until then.
        """
        if in_chunk:
            self._backward = self._backward._replace(is_part=True)
        places, found = self._weights()
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with swapped(places, found), nullcontext() if in_chunk else hooks:
            result = inner(*args, **kwargs)
        if not self._is_head:
            self._executor.close()
        return result

    def read(self) -> Mapping[str, Tensor]:
        """Return the head's weights, for somebody who computes with them in place of the module.

        What autograd saves of them until the end of the forward is their place in the block.

        Raises:
            ModelError: In a recomputation, which nobody closes.
        """
        if self._read is None:
            if torch._C._current_graph_task_id() != -1:
                raise ModelError(
                    f"the weights of {self._attached.block.name} are read in a recomputation of the head, "
                    "which streams; call the module, or attach with outer_streams=False"
                )
            places, found = self._weights()
            self._read = {leaf: tensor for (_, leaf), tensor in zip(places, found, strict=True)}
            self._until_end.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
        return self._read

    def _weights(self) -> tuple[Sequence[Place], Sequence[Tensor]]:
        """Open the visit, and return the places of its parameters with the tensors in the slot."""
        if torch._C._current_graph_task_id() != -1:
            self._open_backward(is_again=True)
        elif self._executor.open_visit is not self:
            self._executor.open(self, is_backward=False, is_again=False)
        aliases = self._slots.aliases(self.block, self.operation.slot)
        anchor = HEAD_ANCHOR if self._is_head else ANCHOR
        weights = stream_weights(aliases, self._trained, self._collect, anchor=anchor)
        return self._attached.fill(weights, {})

    def _open_backward(self, *, is_again: bool = False) -> None:
        executor = self._executor
        if executor.open_visit is self and self.operation.kind is Kind.BACKWARD:
            return
        self._begin_backward()
        executor.open(self, is_backward=True, is_again=is_again)

    def _collect(self, grads: Sequence[Tensor | None]) -> None:
        self._open_backward()
        by_entry = self._attached.line_up(grads, self._trained, self._backward)
        if self._is_head:  # other chunks may follow: whatever is opened next closes the visit
            self._executor.collect_part(self.operation, by_entry)
        else:
            self._executor.close(by_entry)

    def _pack(self, tensor: Tensor) -> Tensor | SavedWeight:
        assert self.place is not None
        return SavedWeight.of(tensor, self.place, 0) or tensor.detach()

    def _unpack(self, saved: Tensor | SavedWeight) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._open_backward()
        assert self.place is not None
        return saved.found(self.place)


VisitOf: TypeAlias = Callable[[AttachedBlock], "OuterVisit | None"]


class _Parameters(dict[str, Any]):
    """A module's parameters, of which those that a pass streams are found where they are then.

    A loss that multiplies by `lm_head.weight` itself, such as TRL's, never calls the module: its dictionary
    of parameters notices the read.
    """

    def __init__(self, held: dict[str, Any], block: AttachedBlock, visit_of: VisitOf) -> None:
        """Stand for `held`, the module's own dictionary."""
        super().__init__(held)
        self._held = held
        self._block = block
        self._visit_of = visit_of

    def __getitem__(self, leaf: str) -> Any:
        """Return a parameter, or the streamed tensor that takes its place now."""
        own, now = super().__getitem__(leaf), self._held[leaf]
        if now is not own or own is None:  # the module's own forward is running
            return now
        visit = self._visit_of(self._block)
        return own if visit is None else visit.read()[leaf]

    def __setitem__(self, leaf: str, value: Any) -> None:
        super().__setitem__(leaf, value)
        self._held[leaf] = value


def let_reads_stream(block: AttachedBlock, visit_of: VisitOf) -> Callable[[], object]:
    """Let reads of a head's weights stream, and return what undoes it.

    Args:
        block: The head.
        visit_of: Returns its visit in the running pass; None: it does not stream now.
    """
    module = block.block.caller
    assert module is not None
    held = module._parameters
    module.__dict__["_parameters"] = _Parameters(held, block, visit_of)

    def undo() -> None:
        module.__dict__["_parameters"] = held

    return undo


def refuse_calls_beside(
    block: AttachedBlock, overrides: Overrides, host: HostState, current: Callable[[], Pass | None]
) -> None:
    """Refuse calls of an outer block's modules beside every pass, while its weights are on drives.

    Args:
        block: Its modules are called by the model.
        overrides: Of the model.
        host: Where its weights are.
        current: Returns the pass that is going on.
    """
    if not isinstance(host, TieredState):
        return

    def check(*_: Any) -> None:
        if current() is None and not host.has_working:
            raise ModelError(
                f"{block.block.name} was called outside the model's forward, and its weights are on drives; "
                "call the model, or engine.sync() before"
            )

    for module in {id(site.module): site.module for site in block.block.sites}.values():
        overrides.before_call(module, check)


def to_device(value: Any, device: torch.device) -> Any:
    """Move tensors in (nested) arguments to the device; for ids, labels and masks the host does not wait."""
    if isinstance(value, Tensor):
        is_there = device.type == "cpu" or value.device.type != "cpu"
        if not is_there and value.nbytes <= _STAGED_BYTES and not value.is_pinned():
            # A copy of other memory waits for all that was launched before it. Torch keeps this memory, and
            # uses it again once the copies of it are done.
            value = torch.empty_like(value, pin_memory=True).copy_(value)
        return value.to(device, non_blocking=True)
    if type(value) in (list, tuple):
        return type(value)(to_device(item, device) for item in value)
    if type(value) is dict:
        return {key: to_device(item, device) for key, item in value.items()}
    return value


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move every buffer of the model to the device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
