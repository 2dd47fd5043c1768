"""Layers and blocks as the engine sees them, and one pass of a micro-batch through the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain.config.choice import Activations
from megatrain.errors import ModelError
from megatrain.layout.blocks import BlockLayout
from megatrain.model.blocks import Block
from megatrain.stream.execute.executor import Executor
from megatrain.stream.execute.slots import Slots
from megatrain.stream.forward.layer_visit import LayerVisit
from megatrain.stream.forward.stream_weights import Place, exchange, stream_weights

if TYPE_CHECKING:
    from megatrain.stream.activations.boundaries import Boundaries, Source
    from megatrain.stream.activations.offload import OffloadedActivations
    from megatrain.stream.forward.layer_visit import _Run


class AttachedBlock:
    """A block of the model with its layout, and where its parameters are looked up."""

    def __init__(
        self, index: int, block: Block, layout: BlockLayout, owners: Mapping[str, tuple[int, int]]
    ) -> None:
        """Tie block `index` to its layout; `owners` maps a name to (block, entry) for borrowed weights."""
        self.index = index
        self.block = block
        self.layout = layout
        self.parameters = [block.parameters[entry.name] for entry in layout.entries]
        position = {entry.name: number for number, entry in enumerate(layout.entries)}
        self._positions = [position[site.name] for site in block.sites]
        self.places: list[Place] = [(site.module._parameters, site.leaf) for site in block.sites]
        self._borrowed = [owners[site.name] for site in block.borrowed]
        self._borrowed_places: list[Place] = [(site.module._parameters, site.leaf) for site in block.borrowed]
        self._has_state = [entry.state_offset is not None for entry in layout.entries]

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


class AttachedLayer:
    """A decoder layer: its fragments (one, if it streams as a whole), its own forward, and its policy."""

    executor: Executor
    slots: Slots
    offloaded: OffloadedActivations
    policy: Activations
    boundaries: Boundaries

    def __init__(self, blocks: Sequence[AttachedBlock]) -> None:
        """Tie a layer to its blocks, which are of one module; `arrange` comes before its first use."""
        module = blocks[0].block.module
        assert module is not None
        self.blocks = list(blocks)
        self.module: nn.Module = module
        self.has_fragments = bool(blocks[0].block.entries)
        self.inner: Callable[..., Any] = module.forward
        self.run: _Run | None = None
        """The run of the layer's forward that is going on."""

    def arrange(self, executor: Executor, slots: Slots, policy: Activations, boundaries: Boundaries) -> None:
        """Let the layer run through `executor` and `slots`, under `policy`."""
        self.executor = executor
        self.slots = slots
        self.offloaded = executor.offloaded
        self.policy = policy
        self.boundaries = boundaries

    @property
    def name(self) -> str:
        """Name of the layer, or of its first fragment."""
        return self.blocks[0].block.name

    def forward(self, current: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer in place of its own forward."""
        if getattr(self.module, "gradient_checkpointing", False):
            self.module.gradient_checkpointing = False  # type: ignore[assignment]  # ours replaces it
        return LayerVisit(self, current).call(args, kwargs)

    def enter(self, block: AttachedBlock) -> None:
        """Enter a fragment: one of its modules is called.

        Raises:
            ModelError: The module was called outside its layer's forward.
        """
        if self.run is None:
            raise ModelError(
                f"{block.block.name} was called outside its layer's forward; call the model, or attach it "
                "with fragments=False"
            )
        self.run.enter(block)


class Pass:
    """One forward of the model, and its backward: holds what resident blocks brought for it."""

    def __init__(
        self,
        outer: Sequence[AttachedBlock],
        executor: Executor,
        slots: Slots,
        on_backward: Callable[[], None],
        *,
        micro_batch: int = 0,
        adds_up: bool = False,
    ) -> None:
        """Bring the outer blocks; `on_backward` is called whenever a block's backward begins.

        `adds_up`: the gradients of other micro-batches will be added to this one's.
        """
        self.begin_backward = on_backward
        self.micro_batch = micro_batch
        self._adds_up = adds_up
        self._passed: set[AttachedLayer] = set()
        self.last_call: Source | None = None
        """The last layer's call and its output, if the next layer may want to make it again."""
        self.tensors = {
            block.index: self._stream_block(block, executor, slots, on_backward) for block in outer
        }
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
        """Let the model find the brought tensors in place of its own parameters."""
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

    @staticmethod
    def _stream_block(
        block: AttachedBlock, executor: Executor, slots: Slots, on_backward: Callable[[], None]
    ) -> list[Tensor]:
        trained = block.trained_now()

        def collect(grads: Sequence[Tensor | None]) -> None:
            on_backward()
            if any(grad is not None for grad in grads):
                executor.collect_resident(block.index, block.line_up(grads, trained))

        return stream_weights(slots.aliases(block.index, -1), trained, collect)


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
