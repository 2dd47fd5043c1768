"""The outer blocks that stream, embeddings and heads: visits of theirs, and reads and calls beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megatrain.errors import ModelError
from megatrain.model.places import swapped
from megatrain.store.state import HostState
from megatrain.stream.execute.block_visit import BlockVisit
from megatrain.stream.execute.executor import Executor
from megatrain.stream.forward.attached import AttachedBlock
from megatrain.stream.forward.overrides import Overrides
from megatrain.stream.forward.stream_weights import ANCHOR, HEAD_ANCHOR, SavedWeight, stream_weights


class OuterVisit(BlockVisit):
    """A micro-batch in an embedding or a head that streams, which is entered when its module is called.

    What autograd saves of the weights is their place in the block, as in a layer that keeps what it saves. A
    head that runs in chunks of tokens is one visit each way all the same: `connect` and `aliases` are for it.
    """

    def __init__(
        self,
        block: AttachedBlock,
        executor: Executor,
        micro_batch: int,
        begin_backward: Callable[[], None],
        until_end: ExitStack,
        call: int,
    ) -> None:
        """Prepare the visit of `block` by a micro-batch, by its number within the round.

        Args:
            block: The embedding, or the head.
            executor: The executor, which opens and closes visits.
            micro_batch: The number of the micro-batch within the round.
            begin_backward: The function that is called when autograd reaches the block.
            until_end: The stack of contexts that is closed when the pass's forward has ended.
            call: The call of a step to which the block's gradients belong.
        """
        super().__init__(block.index, micro_batch, self)
        self._attached = block
        self._executor = executor
        self._begin_backward = begin_backward
        self._trained = block.trained_now()
        self._is_head = block.block.is_head
        self._until_end = until_end
        self._call = call
        self._read: dict[str, Tensor] | None = None

    def run(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's own forward on the weights in the slot.

        Args:
            inner: The module's own forward.
            args: The positional arguments of the call.
            kwargs: The keyword arguments of the call.
        """
        places, found = self._attached.fill(self.connect(), {})
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with swapped(places, found), hooks:
            result = inner(*args, **kwargs)
        if not self._is_head:
            self._executor.close()
        return result

    def read(self) -> Mapping[str, Tensor]:
        """Return the head's weights, for somebody who computes with them in place of the module.

        What autograd saves of them until the end of the forward is their place in the block.

        Raises:
            ModelError: The head is read in a recomputation, which nobody closes.
        """
        if self._read is None:
            if torch._C._current_graph_task_id() != -1:
                raise ModelError(
                    f"the weights of {self._attached.block.name} are read in a recomputation of the head, "
                    "which streams; call the module, or attach with outer_streams=False"
                )
            places, weights = self._attached.fill(self.connect(), {})
            self._read = {leaf: tensor for (_, leaf), tensor in zip(places, weights, strict=True)}
            self._until_end.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
        return self._read

    def connect(self) -> list[Tensor]:
        """Open the visit, and return the block's weights in the slot, whose gradients come back to it."""
        aliases = self.aliases()
        anchor = HEAD_ANCHOR if self._is_head else ANCHOR
        return stream_weights(aliases, self._trained, self._collect, anchor=anchor)

    def aliases(self) -> Sequence[Tensor]:
        """Open the visit, if it is not, and return the block's weights in the slot; in a backward, again."""
        if torch._C._current_graph_task_id() != -1:
            self.open_backward(is_again=True)
        elif self._executor.open_visit is not self:
            self._executor.open(self, is_backward=False, is_again=False)
        return self._executor.slots.aliases(self.block, self.operation.slot)

    def open_backward(self, *, is_again: bool = False) -> None:
        """Open the visit of the backward, if it is not; `is_again`: the forward runs again in it."""
        executor = self._executor
        if executor.open_visit is self and self.operation.is_backward:
            return
        self._begin_backward()
        executor.open(self, is_backward=True, is_again=is_again)

    @contextmanager
    def adding(self) -> Iterator[list[Tensor]]:
        """Go on to the backward before the forward has ended; see `Gradients.adding`."""
        if self._executor.open_visit is self and not self.operation.is_backward:
            self._executor.close()
        self.open_backward()
        with self._executor.gradients.adding(self.block, self.micro_batch, self.operation) as sums:
            yield sums

    def _collect(self, grads: Sequence[Tensor | None]) -> None:
        self.open_backward()
        by_entry = self._attached.line_up(grads, self._trained, self._call)
        if self._is_head:  # other passes of it may follow: whatever is opened next closes the visit
            self._executor.gradients.collect(self.operation, by_entry)
        else:
            self._executor.close(by_entry)

    def _pack(self, tensor: Tensor) -> Tensor | SavedWeight:
        assert self.place is not None
        if 0 <= tensor.data_ptr() - self.place.data_ptr() < self.place.nbytes:
            return SavedWeight.of(tensor, self.place, 0)
        return tensor.detach()

    def _unpack(self, saved: Tensor | SavedWeight) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self.open_backward()
        assert self.place is not None
        return saved.found(self.place)


ReadOf: TypeAlias = Callable[[AttachedBlock], Mapping[str, Tensor] | None]


class _Parameters(dict[str, Any]):
    """A module's parameters, of which those that a pass streams are found where they are then.

    A loss that multiplies by `lm_head.weight` itself, such as TRL's, never calls the module: its dictionary
    of parameters notices the read.
    """

    def __init__(self, held: dict[str, Any], block: AttachedBlock, read_of: ReadOf) -> None:
        """Stand for `held`, the module's own dictionary."""
        super().__init__(held)
        self._held = held
        self._block = block
        self._read_of = read_of

    def __getitem__(self, leaf: str) -> Any:
        """Return a parameter, or the streamed tensor that takes its place now."""
        own, now = super().__getitem__(leaf), self._held[leaf]
        if now is not own or own is None:  # the module's own forward is running
            return now
        found = self._read_of(self._block)
        return own if found is None else found[leaf]

    def __setitem__(self, leaf: str, value: Any) -> None:
        super().__setitem__(leaf, value)
        self._held[leaf] = value


def let_reads_stream(block: AttachedBlock, read_of: ReadOf) -> Callable[[], object]:
    """Let reads of a head's weights stream, and return what undoes it.

    Args:
        block: The head.
        read_of: The function that returns the head's weights in the running pass; None: it does not stream
            now.
    """
    module = block.block.caller
    assert module is not None
    held = module._parameters
    module.__dict__["_parameters"] = _Parameters(held, block, read_of)

    def undo() -> None:
        module.__dict__["_parameters"] = held

    return undo


def refuse_calls_beside(
    block: AttachedBlock, overrides: Overrides, host: HostState, runs: Callable[[], bool]
) -> None:
    """Refuse calls of an outer block's modules beside every pass, while its weights are not in RAM.

    Args:
        block: The outer block, whose modules the model calls.
        overrides: The overrides of the model.
        host: The state that holds the block's weights.
        runs: The function that says whether a pass is going on.
    """
    if not host.has_drives and block.index not in host.on_device.blocks:
        return

    def check(*_: Any) -> None:
        if not runs() and not host.weights.are_whole:
            raise ModelError(
                f"{block.block.name} was called outside the model's forward, and its weights are not in RAM; "
                "call the model, or engine.sync() before"
            )

    for module in {id(site.module): site.module for site in block.block.sites}.values():
        overrides.before_call(module, check)
