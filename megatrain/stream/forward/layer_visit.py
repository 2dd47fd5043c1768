"""How a layer runs: forward, recomputation and backward, with slots held no longer than needed.

What stays of a layer between its forward and its backward is its policy (`POLICIES`). A recomputation is
torch's non-reentrant checkpoint around the layer's own forward, which restores RNG and autocast state and
finds the choices of routers again (`Routes`). Kept tensors that are weights are replaced by their place in
the block, so that a slot is free between forward and backward all the same.

A layer of several fragments enters each when a module of it is called. Autograd ends a fragment before it
touches the one before: its weights' node is older than its own operations and younger than those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatrain.config.policies import RECOMPUTE, Policy
from megatrain.errors import ConfigError, ModelError
from megatrain.model.caches import with_own_caches
from megatrain.model.experts.products import Routed, beside_of
from megatrain.model.experts.routes import Routes, watched
from megatrain.model.places import Place, exchange
from megatrain.model.selective import KeptResults
from megatrain.model.sequence.positions import shared_tensors
from megatrain.model.tiles.first_input import let_go
from megatrain.model.tiles.kept import Store
from megatrain.stream.activations.boundaries import Packed
from megatrain.stream.activations.kept_results import Waiting, saving
from megatrain.stream.activations.recompute import Contexts, Recomputation
from megatrain.stream.activations.saved_tensors import Held
from megatrain.stream.execute.block_visit import BlockVisit
from megatrain.stream.forward.attached import AttachedBlock, AttachedLayer
from megatrain.stream.forward.expert_chunks import ExpertsCall
from megatrain.stream.forward.passes import Pass
from megatrain.stream.forward.stream_weights import SavedWeight, stream_weights


class _Entry(BlockVisit):
    """One fragment of a call: entered in the forward, perhaps once more, and left in the backward."""

    call: LayerVisit

    def __init__(self, call: LayerVisit, attached: AttachedBlock) -> None:
        super().__init__(attached.index, call.current.micro_batch, call)
        self.attached = attached
        self.trained = attached.trained_now()
        self.is_backward = False
        self._is_done = False

    def open_backward(self, *, is_again: bool = False) -> None:
        """Begin the backward if nothing has: a recomputation (again), a saved weight, or its own node."""
        if self._is_done:
            raise _second_backward(self.attached.block.name)
        if not self.is_backward:
            self.is_backward = True
            self.call.current.begin_backward()
            self.call.layer.executor.open(self, is_backward=True, is_again=is_again)

    def close_backward(self, grads: Sequence[Tensor | None]) -> None:
        """Take the gradients; autograd is done with the fragment."""
        self.open_backward()
        by_entry = self.attached.line_up(grads, self.trained, self.call.current.call)
        self.call.layer.executor.close(by_entry)
        self._is_done = True
        self.call.go_on_before(self)


class LayerVisit:
    """One call of a layer in the model's forward, until its backward is done."""

    def __init__(self, layer: AttachedLayer, current: Pass) -> None:
        """Prepare the visit of `layer` in the forward pass `current`."""
        self.layer = layer
        self.current = current
        self.entries: list[_Entry] = []
        self.recomputed: list[_Entry] = []
        """Those that are on the device again, for their backward."""
        self.addresses = range(0)
        """Of the fragment's place that is open in the first run, or was last."""
        self._shared: frozenset[int] = frozenset()
        """The addresses of what all layers are given, such as rotary tables, where saved tensors leave."""
        self.experts: ExpertsCall | None = None
        """The call of the layer's experts, where these come apart."""
        self._has_run = False
        self._is_late = False
        """Whether its input leaves the device at once, and comes back when it is asked for."""
        self._key = -1
        """Name of what the visit saves; -1: it saves nothing."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer under its policy."""
        if not torch.is_grad_enabled():
            return self._run(*args, **kwargs)
        layer, current, policy = self.layer, self.current, self.layer.policy
        current.note(layer)
        boundaries, device = layer.boundaries, layer.executor.lanes.device
        routes = layer.routes()
        packed = call = results = store = None
        if boundaries.packs or policy.is_offloaded:
            self._key = layer.offloaded.name_visit(layer.blocks[-1].index, current.micro_batch)
        if policy.keeps_results:
            moves = policy.moves_results and boundaries.are_on_host
            results = KeptResults(policy, saving(layer.offloaded, self._key) if moves else None)
        if boundaries.packs:
            packed = boundaries.pack(
                args, kwargs, key=self._key, last=current.last_call, is_trained=layer.is_trained
            )
        if policy.reruns and layer.tile and layer.experts is None:
            store = self._store(args, packed)
        if packed is not None:
            again = partial(self._run_again, routes, results, store)
            call = boundaries.call_of(packed, kwargs, micro_batch=current.micro_batch, run=again)
        kept: AbstractContextManager[object]
        if policy.reruns:
            bring = None if packed is None else partial(self._bring, packed, store)
            recomputation = Recomputation(
                layer.name,
                self._run,
                device,
                bring=bring,
                contexts=_contexts(results, routes, store),
                note_saved=None if results is None else results.note_saved,
            )
            kept = recomputation.first_run(args, kwargs)
        else:
            _refuse_autocast(layer, policy, device)
            if policy.is_offloaded:
                self._shared = frozenset(map(_address, shared_tensors(args, kwargs)))
            kept = saved_tensors_hooks(self._pack, self._unpack)
            if routes is not None:
                kept = _together(routes.running(), kept)
        with kept:
            result = self._run(*args, **kwargs)
        if results is not None:
            layer.look_at(results, 0 if store is None else store.num_kept)
        current.last_call.note(call, result)
        if self._is_late:
            assert packed is not None
            layer.offloaded.flush(self._key)
            if layer.is_first and current.lets_go_of_embeddings:
                let_go(args[packed.place])
        return result

    def go_on_before(self, entry: _Entry) -> None:
        """After a fragment's backward, open that of the one before: its operations come next."""
        if self.recomputed and self.recomputed[-1] is entry:
            self.recomputed.pop()
        if self.recomputed:
            if not self.recomputed[-1].waits:
                self.recomputed[-1].open_backward()
        elif entry is self.entries[0] and self._key >= 0:
            self.layer.offloaded.leave(self._key)

    def go_on_before_experts(self) -> None:
        """After the backward of all chunks, open that of what was before them, if it was run again."""
        for entry in self.recomputed:
            entry.waits = False
            entry.open_backward()

    def _store(self, args: tuple[Any, ...], packed: Packed | None) -> Store:
        """Return what calls in tiles keep; a long row leaves the device as soon as it can."""
        layer, policy, offloaded, key = self.layer, self.layer.policy, self.layer.offloaded, self._key
        boundary = None if packed is None else packed.boundary
        if packed is None or not isinstance(boundary, Held) or _tokens(args[packed.place]) <= layer.tile:
            return Store(keeps_attention=policy.keeps_attention)
        self._is_late = True
        offloaded.come_late(key)
        leave, settle = partial(offloaded.leave_now, key), partial(offloaded.settle, key)
        if policy.keeps_attention and policy.moves_results:
            save = saving(offloaded, key)
            store = Store(keeps_attention=True, save=save, leave=leave, settle=settle)
        else:
            leave()
            store = Store(keeps_attention=policy.keeps_attention)
        store.has_input(args[packed.place], Waiting(boundary, offloaded))
        return store

    def _bring(self, packed: Packed, store: Store | None) -> tuple[Any, ...]:
        """Return the arguments of a call with their boundary, for its recomputation."""
        args = self.layer.boundaries.bring(packed)
        if store is not None and isinstance(packed.boundary, Held):
            store.has_input(args[packed.place], Waiting(packed.boundary, self.layer.offloaded))
        return args

    def _run_again(
        self,
        routes: Routes | None,
        results: KeptResults | None,
        store: Store | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the layer once more, for the boundary of the next one."""
        between = None if results is None else results.run_between()
        with _together(between, _running(routes), None if store is None else store.running()):
            return LayerVisit(self.layer, self.current)._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the class's own forward on slot views: the forward first, the recomputation after it."""
        layer = self.layer
        run, self._has_run = _Run(self, is_recomputation=self._has_run), True
        held, layer.running = layer.running, run
        try:
            if not layer.has_fragments:
                run.enter(layer.blocks[0])
            if torch.is_grad_enabled():
                args, kwargs = with_own_caches(args, kwargs)
            with watched(layer.routers):
                return layer.inner(*args, **kwargs)
        finally:
            if run.restore():
                layer.executor.close(pins=run.is_recomputation)
            layer.running = held

    def _pack(self, tensor: Tensor) -> Tensor | SavedWeight | Held:
        if tensor.data_ptr() in self.addresses:
            number = len(self.entries) - 1  # the others are closed
            place = self.entries[number].place
            if place is not None:
                return SavedWeight.of(tensor, place, number)
        if self.layer.policy.is_offloaded and _address(tensor) not in self._shared:
            return self.layer.offloaded.save(tensor, self._key)
        # a node that saved its own output, graph and all, would never be freed
        return tensor.detach() if tensor.requires_grad else tensor

    def _unpack(self, saved: Tensor | SavedWeight | Held) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if isinstance(saved, Held):
            return self.layer.offloaded.load(saved)
        entry = self.entries[saved.entry]
        if entry.place is None or not entry.is_backward:
            entry.open_backward()
        assert entry.place is not None, "a weight is needed after its block's backward has ended"
        return saved.found(entry.place)


class _Run:
    """One run of a layer's forward: which fragment is entered, and what its modules find as parameters."""

    def __init__(self, visit: LayerVisit, *, is_recomputation: bool) -> None:
        self._visit = visit
        self.is_recomputation = is_recomputation
        self._entry: _Entry | None = None
        self._count = 0
        self._places: Sequence[Place] = ()
        self._own: Sequence[Any] = ()
        """The modules' own parameters, while they find others."""

    def enter(self, block: AttachedBlock) -> None:
        """Let the modules of `block` find its weights; leaves the fragment that was entered before."""
        if self._entry is not None and self._entry.attached is block:
            return
        visit, executor = self._visit, self._visit.layer.executor
        if self.restore():
            executor.close(pins=self.is_recomputation)
        if self.is_recomputation:
            entry = visit.entries[self._count]
            assert entry.attached is block, "the recomputation took another way than the forward"
            entry.waits = visit.layer.is_behind_experts and self._count == 0
            visit.recomputed.append(entry)
        else:
            entry = _Entry(visit, block)
            visit.entries.append(entry)
        self._count += 1
        if self.is_recomputation and self._stays_open:
            entry.open_backward(is_again=True)
        else:
            executor.open(entry, is_backward=False, is_again=self.is_recomputation)
        self._entry = entry
        assert entry.place is not None
        if not self.is_recomputation:
            start = entry.place.data_ptr()
            visit.addresses = range(start, start + entry.place.nbytes)
        aliases = executor.slots.aliases(block.index, entry.operation.slot)
        weights = stream_weights(aliases, entry.trained, entry.close_backward)
        self._places, found = block.fill(weights, visit.current.tensors)
        self._own = exchange(self._places, found)

    @property
    def _stays_open(self) -> bool:
        """Whether the fragment that was recomputed last is so in its backward's own visit."""
        is_before_experts = self._visit.layer.is_behind_experts and self._count == 1
        return self._count == len(self._visit.entries) and not is_before_experts

    def run_experts(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run the layer's experts chunk by chunk; what is beside them is left for that time."""
        visit, layer = self._visit, self._visit.layer
        assert layer.experts is not None
        beside, extras = beside_of(layer.experts, layer.adapters)
        routed = Routed.of(hidden, chosen, weights, extras)
        if self.is_recomputation:
            assert visit.experts is not None
            small = [] if visit.experts.is_done_by_itself else layer.kept_small(extras)
            return visit.experts.run_again(routed, small)
        small = layer.kept_small(extras)
        if self.restore():
            layer.executor.close()
        visits = _ChunkVisits(visit)
        visit.experts = ExpertsCall(
            layer.experts,
            beside,
            layer.chunks,
            visits,
            layer.executor.lanes.device,
            keeps_input=layer.policy.reruns and not layer.is_behind_experts,
            keeps_output=layer.policy.reruns and layer.keeps_experts_output,
            is_trained=layer.trains_experts,
        )
        return visit.experts.run(routed, small, self._give_way)

    def _give_way(self, place: float) -> None:
        layer = self._visit.layer
        layer.running = None  # others run it meanwhile
        layer.give_way(place)
        layer.running = self

    def restore(self) -> bool:
        """Give the modules their parameters back, and return whether the visit of a fragment is over.

        A recomputed fragment stays in its slot. A recomputation is always left through an exception: it ends
        with the last saved tensor.
        """
        if self._entry is None:
            return False
        exchange(self._places, self._own)
        self._entry = None
        return not (self.is_recomputation and self._stays_open)


class _ChunkVisits:
    """The visits of the blocks of a layer's chunks, in one call of the layer."""

    def __init__(self, visit: LayerVisit) -> None:
        self._visit = visit
        self._executor = visit.layer.executor
        self.read_later = self._executor.lanes.read_later
        self._again: dict[int, BlockVisit] = {}

    @contextmanager
    def forward(self, block: int) -> Iterator[Tensor]:
        """Let a block's weight be passed for the first time."""
        entry = self._entry(block)
        self._executor.open(entry, is_backward=False, is_again=False)
        yield self._weight(entry)
        self._executor.close()

    @contextmanager
    def again(self, block: int) -> Iterator[Tensor]:
        """Let a forward run again; the block stays until its backward."""
        entry = self._again[block] = self._entry(block)
        self._executor.open(entry, is_backward=False, is_again=True)
        yield self._weight(entry)
        self._executor.close(pins=True)

    def backward(self, block: int, run: Callable[[Tensor], Tensor | None]) -> None:
        """Visit a block's backward."""
        is_again = block not in self._again
        entry = self._again.pop(block, None) or self._entry(block)
        self._executor.open(entry, is_backward=True, is_again=is_again)
        weight = self._weight(entry)
        attached = self._visit.layer.part(block)
        gradient = run(weight)
        wants = [weight.requires_grad]
        given = attached.line_up([gradient] if wants[0] else [], wants, self._visit.current.call)
        self._executor.close(given if wants[0] else None)

    def refuse_second_backward(self) -> None:
        """Raise what says that a forward has one backward.

        Raises:
            ModelError: Always.
        """
        raise _second_backward(self._visit.layer.name)

    def begin_backward(self) -> None:
        """Take note that autograd has come to the experts."""
        self._visit.current.begin_backward()

    def end_backward(self) -> None:
        """Take note that autograd goes on with what was before the experts."""
        self._visit.go_on_before_experts()

    def keep(self, tensor: Tensor) -> object:
        """Keep a tensor until the backward: with the layer's input, if that leaves the device."""
        layer, key = self._visit.layer, self._visit._key
        return layer.offloaded.save(tensor, key) if layer.boundaries.are_on_host and key >= 0 else tensor

    def bring(self, kept: object) -> Tensor:
        """Return a tensor that was kept."""
        if isinstance(kept, Held):
            return self._visit.layer.offloaded.load(kept)
        assert isinstance(kept, Tensor)
        return kept

    def _entry(self, block: int) -> BlockVisit:
        return BlockVisit(block, self._visit.current.micro_batch, self._visit)

    def _weight(self, entry: BlockVisit) -> Tensor:
        (alias,) = self._executor.slots.aliases(entry.block, entry.operation.slot)
        return alias.detach().requires_grad_(self._visit.layer.part(entry.block).parameters[0].requires_grad)


def _tokens(hidden: Tensor) -> int:
    return hidden.shape[1] if hidden.dim() > 2 else 0


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else -1


def _second_backward(name: str) -> ModelError:
    return ModelError(
        f"a second backward through the same forward of block {name}; its graph is streamed once: run the "
        "forward again"
    )


def _running(routes: Routes | None) -> AbstractContextManager[object] | None:
    return None if routes is None else routes.running()


@contextmanager
def _together(*contexts: AbstractContextManager[object] | None) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            if context is not None:
                stack.enter_context(context)
        yield


def _contexts(results: KeptResults | None, routes: Routes | None, store: Store | None) -> Contexts | None:
    """Return the contexts of a layer's first run and its recomputation, which hold what is kept for it."""
    if results is None and routes is None and store is None:
        return None
    first = _together(
        None if results is None else results.first_run(),
        _running(routes),
        None if store is None else store.running(),
    )
    second = _together(
        None if results is None else results.second_run(),
        _running(routes),
        None if store is None else store.running(is_last=True),
    )
    return first, second


def _refuse_autocast(layer: AttachedLayer, policy: Policy, device: torch.device) -> None:
    """Refuse to keep what is saved under autocast: copies of weights, which would stay on the device.

    Raises:
        ConfigError: Autocast is on.
    """
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled(device.type):
        raise ConfigError(
            f"activations={policy.name} under torch.autocast: autograd would keep a cast copy of every "
            f"weight of {layer.name}; use "
            f"activations={RECOMPUTE.name}, or precision=bf16 in place of autocast"
        )
