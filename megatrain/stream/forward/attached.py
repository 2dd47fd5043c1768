"""Layers and blocks as the engine sees them: with their layouts, and where their parameters are looked up."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from megatrain.config.policies import Policy
from megatrain.errors import ModelError, warn_once
from megatrain.layout.blocks import BlockLayout
from megatrain.model.attention_results import attends, runs_twice
from megatrain.model.blocks import Block, group_layers, outer_of
from megatrain.model.experts.apart import experts_of
from megatrain.model.experts.products import Factors
from megatrain.model.experts.routes import Count, Router, Routes, routers_of
from megatrain.model.places import Place
from megatrain.model.selective import KeptResults
from megatrain.model.sequence.attention import SharedRows, rows_shared
from megatrain.model.weights.kept import give_values
from megatrain.store.digests import note_weights
from megatrain.store.read_in import require_room
from megatrain.store.state import HostState
from megatrain.stream.activations.boundaries import Boundaries
from megatrain.stream.activations.offload import OffloadedActivations
from megatrain.stream.execute.executor import Executor
from megatrain.stream.forward.expert_chunks import Chunk
from megatrain.stream.forward.gradient_hooks import GradientHooks, refuse_hooks
from megatrain.stream.job.job import Job

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

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
                    if block.rows is not None:
                        raise ModelError(
                            f"parameter {name} has a hook on its gradient, which comes in chunks of experts; "
                            "remove the hook, or attach with expert_chunks=1"
                        )
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
                place = base + entry.byte_offset
                if entry.rows is not None:
                    place -= entry.first_index * entry.dtype.itemsize
                if not is_kept and parameter.data_ptr() != place:
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


class RunningLayer(Protocol):
    """A run of a layer's forward."""

    def enter(self, block: AttachedBlock) -> None:
        """Take note that a module of a fragment is called."""

    def run_experts(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run the layer's experts in chunks."""


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
        self.routers: list[Router] = routers_of(module)
        """Its routers that run uncompiled; the compiler sees to those that it runs."""
        self.router_names = [router.name for router in self.routers]
        self.tile = 0
        """The tokens of a tile in which parts of it pass rows; 0: they pass whole."""
        self.is_first = False
        """Whether it is the first of the decoder's layers."""
        self.count: Count | None = None
        """What is given the experts that each of these routers has chosen; None: nobody wants to know."""
        self.running: RunningLayer | None = None
        """The run of the layer that is going on; None: there is none."""
        self.give_way: Callable[[float], None] = lambda place: None
        """Lets other micro-batches come to a place in the layer, which begins at 0 and ends at 1."""
        self._parts = {block.index: block for block in blocks if block.block.rows is not None}
        self.chunks = _chunks(list(self._parts.values()))
        """The chunks of its experts, in the order of the forward; none: they do not come apart."""
        self.experts = experts_of(module) if self.chunks else None
        self.adapters: dict[str, list[Factors]] = {}
        """The adapters of its experts' matrices that are active in a call of them, by the matrix's name."""
        self._small: list[weakref.ref[Tensor]] = []
        self.is_behind_experts = bool(self.chunks) and len(blocks) > 1 + len(self._parts)
        """Whether a block of it runs behind its experts."""
        self._around_experts = [] if self.experts is None else _around(module, self.experts.module)
        self._attends = attends(module)

    def arrange(
        self, executor: Executor, offloaded: OffloadedActivations, policy: Policy, boundaries: Boundaries
    ) -> None:
        """Let the layer run through `executor`, under `policy`."""
        self.executor, self.offloaded = executor, offloaded
        self.policy, self.boundaries = policy, boundaries

    def look_at(self, results: KeptResults, num_in_tiles: int) -> None:
        """Say, once, if attention runs twice under a policy that is to keep what it returns.

        Args:
            results: The results of the first run.
            num_in_tiles: The number of calls of attention in tiles whose results are kept.
        """
        is_kept = results.num_attention or num_in_tiles
        if results.policy.keeps_attention_alone and self._attends and not is_kept:
            warn_once(_log, runs_twice(type(self.module).__name__, results.policy.name))

    def routes(self) -> Routes | None:
        """Return what takes note of the choices of its routers in one visit; None: nobody needs them."""
        keeps = self.policy.reruns or self.boundaries.is_source
        if not self.router_names or not (keeps or self.count is not None):
            return None
        return Routes(self.name, keeps=keeps, count=self.count)

    def leave_routers(self, part: nn.Module) -> None:
        """Leave the routers in a part of the layer to the compiler that runs it."""
        inside = set(part.modules())
        self.routers = [router for router in self.routers if router.module not in inside]

    @property
    def is_trained(self) -> bool:
        """Whether anything of the layer is trained at this moment."""
        return any(parameter.requires_grad for block in self.blocks for parameter in block.parameters)

    @property
    def name(self) -> str:
        """Name of the layer, or of its first fragment."""
        return self.blocks[0].block.name

    @property
    def trains_experts(self) -> bool:
        """Whether a matrix of its experts is trained at this moment."""
        return any(parameter.requires_grad for part in self._parts.values() for parameter in part.parameters)

    @property
    def keeps_experts_output(self) -> bool:
        """Whether what autograd saves behind the experts may depend on what they return.

        A caller's hook on what they return may do anything with it.
        """
        is_hooked = any(module._forward_hooks for module in self._around_experts)
        return self.blocks[0].block.keeps_experts_output or is_hooked

    def kept_small(self, extras: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of small weights beside the experts, which leave the device before the backward.

        They are shared by the micro-batches that run the experts together.
        """
        found = [kept for reference in self._small if (kept := reference()) is not None]
        if len(found) != len(extras):
            found = [extra.detach().clone() for extra in extras]
            self._small = [weakref.ref(kept) for kept in found]
        return found

    def part(self, block: int) -> AttachedBlock:
        """Return a block of a chunk of experts by its number."""
        return self._parts[block]

    def run_experts(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run its experts in chunks, as their module would run them.

        Raises:
            ModelError: They were called outside their layer's forward.
        """
        return self._now(f"the experts of {self.name}").run_experts(hidden_states, top_k_index, top_k_weights)

    def enter(self, block: AttachedBlock) -> None:
        """Enter a fragment: one of its modules is called.

        Raises:
            ModelError: The module was called outside its layer's forward.
        """
        self._now(block.block.name).enter(block)

    def _now(self, what: str) -> RunningLayer:
        if self.running is None:
            raise ModelError(
                f"{what} was called outside its layer's forward; call the model, or attach it "
                "with fragments=False"
            )
        return self.running


def _around(layer: nn.Module, experts: nn.Module) -> list[nn.Module]:
    """List the experts of a layer, and what holds them, but for the layer."""
    return [module for module in layer.modules() if module is not layer and experts in module.modules()]


def _chunks(parts: Sequence[AttachedBlock]) -> list[Chunk]:
    """Pair the blocks of a layer's chunks, which come in the order of the forward."""
    found = []
    for first, second in zip(parts[::2], parts[1::2], strict=True):
        assert first.block.rows is not None
        found.append(Chunk(first.block.rows, first.index, second.index))
    return found


def attach_blocks(binding: Binding) -> tuple[list[AttachedLayer], list[AttachedBlock]]:
    """Tie a model's blocks to their layouts: the layers in forward order, and the blocks in no layer."""
    blocks, layouts = binding.blocks, binding.host.layouts
    owners = {
        entry.name: (index, number)
        for index, layout in enumerate(layouts)
        for number, entry in enumerate(layout.entries)
        if entry.rows is None
    }
    attached = [
        AttachedBlock(index, block, layout, owners)
        for index, (block, layout) in enumerate(zip(blocks, layouts, strict=True))
    ]
    layers = [AttachedLayer([attached[index] for index in indices]) for indices in group_layers(blocks)]
    return layers, [attached[index] for index in outer_of(blocks)]
