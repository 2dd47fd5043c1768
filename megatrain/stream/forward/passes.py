"""One pass of a micro-batch through the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.errors import ModelError
from megatrain.stream.activations.boundaries import LastCall
from megatrain.stream.forward.arrangement import Arrangement
from megatrain.stream.forward.attached import AttachedBlock, AttachedLayer
from megatrain.stream.forward.stream_weights import Place, exchange, stream_weights


class Pass:
    """One forward of the model, and its backward: holds the weights of outer blocks for it."""

    def __init__(self, arrangement: Arrangement) -> None:
        """Stream the outer blocks for the pass that comes next."""
        rounds = arrangement.rounds
        self.begin_backward = rounds.begin_backward
        self.micro_batch = rounds.micro_batch
        self._adds_up = rounds.adds_up
        """The gradients of other micro-batches will be added to this one's."""
        self._passed: set[AttachedLayer] = set()
        self.last_call = LastCall()
        outer = arrangement.outer
        self.tensors = {block.index: self._stream_block(block, arrangement) for block in outer}
        self._places: list[Place] = []
        self._own: list[Tensor] = []
        for block in outer:
            places, tensors = block.fill(self.tensors[block.index], self.tensors)
            self._places += places
            self._own += tensors
        self._parameters: list[Any] | None = None

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
        self.restore()

    def _stream_block(self, block: AttachedBlock, arrangement: Arrangement) -> list[Tensor]:
        trained, begin_backward, executor = block.trained_now(), self.begin_backward, arrangement.executor

        def collect(grads: Sequence[Tensor | None]) -> None:
            begin_backward()
            if any(grad is not None for grad in grads):
                executor.collect_resident(block.index, block.line_up(grads, trained))

        return stream_weights(arrangement.slots.aliases(block.index, -1), trained, collect)


def to_device(value: Any, device: torch.device) -> Any:
    """Move tensors in (nested) arguments to the device."""
    if isinstance(value, Tensor):
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
