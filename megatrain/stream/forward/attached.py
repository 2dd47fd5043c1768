"""Layers and blocks as the engine sees them: with their layouts, and where their parameters are looked up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain.config.policies import Policy
from megatrain.errors import ModelError
from megatrain.layout.blocks import BlockLayout
from megatrain.model.blocks import Block, group_layers, outer_of
from megatrain.model.sequence.attention import SharedRows, rows_shared
from megatrain.model.weights.kept import give_values
from megatrain.store.digests import note_weights
from megatrain.store.read_in import require_room
from megatrain.store.state import HostState
from megatrain.stream.activations.boundaries import Boundaries
from megatrain.stream.activations.offload import OffloadedActivations
from megatrain.stream.execute.executor import Executor
from megatrain.stream.forward.gradient_hooks import GradientHooks, refuse_hooks
from megatrain.stream.forward.stream_weights import Place
from megatrain.stream.job.job import Job

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VALUES = "the values of weights that are kept as stored (lora.base) take"


@dataclass(frozen=True, slots=True)
class Binding:
    """A model's blocks, the host state that its parameters are views of, and the job that both are for."""

    blocks: list[Block]
    host: HostState
    job: Job

    def check(self) -> None:
        """Refuse to go on with parameters that are no views of the host state any more, or with their hooks.

        Raises:
            ModelError: Something replaced a parameter's data, or a hook could never be run.
        """
        for block in self.blocks:
            for name, parameter in block.parameters.items():
                if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                    refuse_hooks(name, parameter, is_shared=self.job.sequence > 1)
        if self.moved is not None:
            raise ModelError(
                f"parameter {self.moved} was moved or cast after the engine was attached; call "
                "engine.detach(), change the model, and attach again"
            )

    @property
    def moved(self) -> str | None:
        """Name of a parameter that is no view of the host state any more; None: all are."""
        for block, state in zip(self.blocks, self.host.blocks, strict=True):
            base = state.working.data_ptr()
            for entry in state.layout.entries:
                parameter = block.parameters[entry.name]
                is_kept = entry.encoding is not None and parameter.is_meta
                if not is_kept and parameter.data_ptr() != base + entry.byte_offset:
                    return entry.name
        return None

    def give_back(self, model: PreTrainedModel) -> None:
        """Let go of what training has taken, and leave the weights to whoever changes or attaches them."""
        self.host.planes.release_training()
        note_weights(self.host)
        give_values(model, self.host.value)

    def require_room_for_values(self) -> None:
        """Refuse to give weights back that are kept in codes, if the machine has no room for their values.

        Raises:
            CapacityError: It has none.
        """
        nbytes = sum(layout.sizes.decoded_bytes for layout in self.host.layouts)
        if nbytes:
            require_room(nbytes, _VALUES, "save the adapters, and load the model again")

    @property
    def hooked(self) -> str | None:
        """Name of a parameter with hooks on its gradient; None: no parameter has any."""
        parameters = (item for block in self.blocks for item in block.parameters.items())
        return next((name for name, parameter in parameters if parameter._backward_hooks), None)

    def check_gradients(self) -> None:
        """Refuse to go on with gradients that are not the engine's.

        Raises:
            ModelError: A gradient went past the engine into `parameter.grad`.
        """
        for block in self.blocks:
            for name, parameter in block.parameters.items():
                if parameter.grad is not None:
                    instead = "; or attach with fragments=False, if its layers call methods of their parts"
                    raise ModelError(
                        f"parameter {name} got a gradient outside the engine (parameter.grad is set), which "
                        "no update would see: a part of the model was called on its own, or the loss has a "
                        "term of the weights themselves; compute it from model(...) alone, and use "
                        "weight_decay or parameter.register_hook for such a term"
                        f"{instead if block.entries else ''}"
                    )

    @contextmanager
    def rows_shared(
        self, model: PreTrainedModel, note: Callable[[int], object]
    ) -> Iterator[SharedRows | None]:
        """Let ranks share out rows, as `megatrain.model.sequence.attention.rows_shared`; None: none does."""
        if self.job.sequence == 1:
            yield None
            return
        with rows_shared(model, self.job.ranks.neighbours(self.job.sequence), note) as rows:
            yield rows


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
        self._borrowed = [owners[site.name] for site in block.borrowed]
        self._is_one_to_one = not self._borrowed and self._positions == list(range(len(self.parameters)))
        sites = [*block.sites, *block.borrowed]
        self.places: list[Place] = [(site.module._parameters, site.leaf) for site in sites]
        self._has_state = [entry.state_offset is not None for entry in layout.entries]
        self._hooks = GradientHooks([entry.name for entry in layout.entries], self.parameters)

    def trained_now(self) -> list[bool]:
        """Which entries want a gradient at this moment.

        Raises:
            ModelError: A parameter was unfrozen after attach: there is no room for its state. In a pass
                without gradients it may be: peft marks an adapter as trained while it is the active one.
        """
        wanted = [parameter.requires_grad for parameter in self.parameters]
        if wanted == self._has_state or not torch.is_grad_enabled():
            return wanted
        for entry, wants, has_state in zip(self.layout.entries, wanted, self._has_state, strict=True):
            if wants and not has_state:
                raise ModelError(
                    f"parameter {entry.name} was frozen when the engine was attached and requires a gradient "
                    "now; set requires_grad before megatrain.attach"
                )
        return wanted

    @property
    def is_plain_now(self) -> bool:
        """Whether all that may be trained is at this moment, and nobody has hooked its gradients."""
        wanted = [parameter.requires_grad for parameter in self.parameters]
        return wanted == self._has_state and not any(
            parameter._backward_hooks for parameter in self.parameters
        )

    def line_up(
        self, grads: Sequence[Tensor | None], trained: Sequence[bool], call: int
    ) -> list[Tensor | None]:
        """Give every entry that has state its gradient or None, from the gradients of the `trained` ones.

        Hooks of the parameters are run on them, as gradients of this call of a step.

        Raises:
            ModelError: A hook cannot be run.
        """
        grads = self._hooks.run(grads, trained, call)
        if trained == self._has_state:
            return list(grads)
        given = iter(grads)
        by_entry = [next(given) if wants else None for wants in trained]
        return [grad for grad, has_state in zip(by_entry, self._has_state, strict=True) if has_state]

    def fill(
        self, weights: Sequence[Tensor], resident: Mapping[int, Sequence[Tensor]]
    ) -> tuple[Sequence[Place], Sequence[Tensor]]:
        """Pair every place of the block with its tensor: its own weights, and borrowed ones."""
        if self._is_one_to_one:
            return self.places, weights
        own = [weights[position] for position in self._positions]
        return self.places, own + [resident[block][entry] for block, entry in self._borrowed]


class AttachedLayer:
    """A decoder layer: its fragments (one, if it streams as a whole), its own forward, and its policy."""

    executor: Executor
    offloaded: OffloadedActivations
    policy: Policy
    boundaries: Boundaries

    def __init__(self, blocks: Sequence[AttachedBlock]) -> None:
        """Tie a layer to its blocks, which are of one module; `arrange` comes before its first use."""
        module = blocks[0].block.module
        assert module is not None
        self.blocks = list(blocks)
        self.module: nn.Module = module
        self.has_fragments = bool(blocks[0].block.entries)
        self.inner: Callable[..., Any] = module.forward
        self.entering: Callable[[AttachedBlock], None] | None = None
        """What takes note of the fragment whose module is called; None: the layer is not running."""

    def arrange(
        self, executor: Executor, offloaded: OffloadedActivations, policy: Policy, boundaries: Boundaries
    ) -> None:
        """Let the layer run through `executor`, under `policy`."""
        self.executor, self.offloaded = executor, offloaded
        self.policy, self.boundaries = policy, boundaries

    @property
    def is_trained(self) -> bool:
        """Whether anything of the layer is trained at this moment."""
        return any(parameter.requires_grad for block in self.blocks for parameter in block.parameters)

    @property
    def name(self) -> str:
        """Name of the layer, or of its first fragment."""
        return self.blocks[0].block.name

    def enter(self, block: AttachedBlock) -> None:
        """Enter a fragment: one of its modules is called.

        Raises:
            ModelError: The module was called outside its layer's forward.
        """
        if self.entering is None:
            raise ModelError(
                f"{block.block.name} was called outside its layer's forward; call the model, or attach it "
                "with fragments=False"
            )
        self.entering(block)


def attach_blocks(binding: Binding) -> tuple[list[AttachedLayer], list[AttachedBlock]]:
    """Tie a model's blocks to their layouts: the layers in forward order, and the blocks in no layer."""
    blocks, layouts = binding.blocks, binding.host.layouts
    owners = {
        entry.name: (index, number)
        for index, layout in enumerate(layouts)
        for number, entry in enumerate(layout.entries)
    }
    attached = [
        AttachedBlock(index, block, layout, owners)
        for index, (block, layout) in enumerate(zip(blocks, layouts, strict=True))
    ]
    layers = [AttachedLayer([attached[index] for index in indices]) for indices in group_layers(blocks)]
    return layers, [attached[index] for index in outer_of(blocks)]
