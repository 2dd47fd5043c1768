"""One pass of a micro-batch through the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.errors import ModelError
from megatrain.model.chunk_sums import ChunkSums
from megatrain.stream.activations.boundaries import LastCall
from megatrain.stream.forward.arrangement import Arrangement
from megatrain.stream.forward.attached import AttachedBlock, AttachedLayer
from megatrain.stream.forward.gradient_hooks import Backward
from megatrain.stream.forward.head_backward import Cut
from megatrain.stream.forward.outer_visits import OuterVisit
from megatrain.stream.forward.stream_weights import (
    ANCHOR,
    HEAD_ANCHOR,
    Place,
    exchange,
    stream_weights,
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
            cuts: The cuts of the step's call that makes the pass; None: somebody else does, and runs the
                backward.
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
            ModelError: The layer runs again, and its gradients could not add up in a resident model's order.
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
                executor.gradients.collect_resident(block.index, micro_batch, by_entry)

        return stream_weights(aliases, trained, collect, anchor=HEAD_ANCHOR if of_head else ANCHOR)


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
