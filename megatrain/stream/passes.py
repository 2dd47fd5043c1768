"""Blocks as the engine sees them, and one pass of a micro-batch through the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain.errors import ModelError
from megatrain.model.blocks import Block
from megatrain.model.layout import BlockLayout
from megatrain.stream.activations import Activations, BlockVisit
from megatrain.stream.bring import Place, bring, swapped
from megatrain.stream.executor import Executor
from megatrain.stream.slots import Slots

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class AttachedBlock:
    """A block of the model with its layout: where its parameters are looked up, and its own forward."""

    def __init__(
        self,
        index: int,
        block: Block,
        layout: BlockLayout,
        *,
        executor: Executor,
        slots: Slots,
        owners: Mapping[str, tuple[int, int]],
    ) -> None:
        """Tie block `index` to its layout; `owners` maps a name to (block, entry) for borrowed weights."""
        self.index = index
        self.block = block
        self.layout = layout
        self.executor = executor
        self.slots = slots
        self.module = block.module
        self.parameters = [block.parameters[entry.name] for entry in layout.entries]
        position = {entry.name: number for number, entry in enumerate(layout.entries)}
        self._positions = [position[site.name] for site in block.sites]
        self.places: list[Place] = [(site.module._parameters, site.leaf) for site in block.sites]
        self._borrowed = [owners[site.name] for site in block.borrowed]
        self._borrowed_places: list[Place] = [(site.module._parameters, site.leaf) for site in block.borrowed]
        self._has_state = [entry.state_offset is not None for entry in layout.entries]
        self.inner: Callable[..., Any] = block.module.forward if block.module is not None else _no_forward

    def trained_now(self) -> list[bool]:
        """Which entries want a gradient at this moment.

        Raises:
            ModelError: A parameter was unfrozen after attach: there is no room for its state.
        """
        wanted = [parameter.requires_grad for parameter in self.parameters]
        for entry, wants, has_state in zip(self.layout.entries, wanted, self._has_state, strict=True):
            if wants and not has_state:
                raise ModelError(
                    f"parameter {entry.name} was frozen when the engine was attached and requires a gradient "
                    "now; set requires_grad before megatrain.attach"
                )
        return wanted

    def line_up(self, grads: Sequence[Tensor | None], trained: Sequence[bool]) -> list[Tensor | None]:
        """Give every entry that has state its gradient or None, from the gradients of the `trained` ones."""
        given = iter(grads)
        by_entry = [next(given) if wants else None for wants in trained]
        return [grad for grad, has_state in zip(by_entry, self._has_state, strict=True) if has_state]

    def fill(
        self, weights: Sequence[Tensor], resident: Mapping[int, Sequence[Tensor]]
    ) -> tuple[list[Place], list[Tensor]]:
        """Pair every place of the block with its tensor: its own weights, and borrowed ones."""
        own = [weights[position] for position in self._positions]
        borrowed = [resident[block][entry] for block, entry in self._borrowed]
        return self.places + self._borrowed_places, own + borrowed

    def forward(
        self, current: Pass, policy: Activations, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the streamed block in place of its own forward."""
        if getattr(self.module, "gradient_checkpointing", False):
            self.module.gradient_checkpointing = False  # type: ignore[union-attr]  # ours replaces it
        if torch.is_grad_enabled():
            return BlockVisit(self, current).call(args, kwargs, policy)
        self.executor.open(self.index, is_backward=False)
        operation = self.executor.open_visit
        assert operation is not None
        try:
            places, tensors = self.fill(self.slots.aliases(self.index, operation.slot), current.tensors)
            with swapped(places, tensors):
                return self.inner(*args, **kwargs)
        finally:
            self.executor.close()


def _no_forward(*_: Any, **__: Any) -> Any:
    raise AssertionError("a resident block has no forward of its own")


class Pass:
    """One forward of the model, and its backward: holds what resident blocks brought for it."""

    def __init__(
        self, residents: Sequence[AttachedBlock], executor: Executor, on_backward: Callable[[], None]
    ) -> None:
        """Bring the resident blocks; `on_backward` is called whenever a block's backward begins."""
        self.begin_backward = on_backward
        self._residents = residents
        self.tensors = {block.index: self._bring(block, executor, on_backward) for block in residents}

    def swapped(self) -> AbstractContextManager[None]:
        """Let the model find the brought tensors in place of its resident parameters."""
        places: list[Place] = []
        tensors: list[Tensor] = []
        for block in self._residents:
            own_places, own_tensors = block.fill(self.tensors[block.index], self.tensors)
            places += own_places
            tensors += own_tensors
        return swapped(places, tensors)

    @staticmethod
    def _bring(block: AttachedBlock, executor: Executor, on_backward: Callable[[], None]) -> list[Tensor]:
        trained = block.trained_now()

        def collect(grads: Sequence[Tensor | None]) -> None:
            on_backward()
            if any(grad is not None for grad in grads):
                executor.collect_resident(block.index, block.line_up(grads, trained))

        return bring(block.slots.aliases(block.index, -1), trained, collect)


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
