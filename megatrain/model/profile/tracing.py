"""Runs a decoder layer on fake tensors as the engine runs it, under every policy, and meters it.

What the engine does around a layer is done here too: weights come out of one autograd function per fragment,
which is where their gradients end; recomputation is torch's checkpoint; caches are a layer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from megatrain.config.policies import Policy
from megatrain.layout.blocks import BlockLayout
from megatrain.model.blocks import Block
from megatrain.model.caches import with_own_caches
from megatrain.model.experts.routes import Routes, routers_of, watched
from megatrain.model.profile.anatomy import CompiledKeep
from megatrain.model.profile.cost import Cost
from megatrain.model.profile.metering import Meter
from megatrain.model.profile.rows import most
from megatrain.model.profile.saved import SavedTensors, may_wait
from megatrain.model.selective import Contexts, Here, keeping
from megatrain.model.tiles.kept import Store, Stored, Whole

Collect: TypeAlias = Callable[[Sequence[Tensor | None]], None]
"""A function that is given the gradients of a block's weights."""


class _Weights(torch.autograd.Function):
    """Hands out a block's weights, and is given their gradients together, last of the block."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, collect: Collect, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.collect = collect
        ctx.set_materialize_grads(False)
        return tuple(weight.detach() for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        ctx.collect(grads)
        return None, None, None


class _Sink(torch.autograd.Function):
    """Ends a graph: holds nothing of what it is given, and sends a gradient of its size back."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.like = [(output.shape, output.dtype) for output in outputs]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.like)


class FakeBlock:
    """A block's parameters as fake tensors, to put where its modules look them up."""

    def __init__(self, block: Block, layout: BlockLayout) -> None:
        """Make them; call this in a fake mode, outside of what is metered."""
        self.name = block.name
        self.entries = block.entries
        self.is_behind, self.is_head = block.is_behind, block.is_head
        self._names = [entry.name for entry in layout.entries]
        self._is_trained = [entry.state_offset is not None for entry in layout.entries]
        self._weights = [torch.empty(entry.shape, dtype=entry.dtype) for entry in layout.entries]
        self._sites = block.sites

    def stream_weights(self, collect: Collect, anchor: Tensor | None = None) -> list[Tensor]:
        """Let the modules find new aliases of the weights, whose gradients go to `collect`; return these."""
        pairs = list(zip(self._weights, self._is_trained, strict=True))
        trained = [weight for weight, flag in pairs if flag]
        if torch.is_grad_enabled() and trained:
            anchor = torch.zeros((), requires_grad=True) if anchor is None else anchor
            brought = iter(_Weights.apply(anchor, collect, trained))
            tensors = [next(brought) if flag else weight.detach() for weight, flag in pairs]
        else:
            tensors = [weight.detach() for weight in self._weights]
        self.put(tensors)
        return tensors

    @property
    def weights(self) -> list[Tensor]:
        """New aliases of the weights; those that are trained want gradients."""
        pairs = zip(self._weights, self._is_trained, strict=True)
        return [weight.detach().requires_grad_(is_trained) for weight, is_trained in pairs]

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Let the modules find these in place of the weights."""
        by_name = dict(zip(self._names, tensors, strict=True))
        for site in self._sites:
            site.module._parameters[site.leaf] = by_name[site.name]  # type: ignore[assignment]

    def draw(self, generator: torch.Generator) -> None:
        """Draw weights of a common size, where the tensors have memory."""
        for weight in self._weights:
            weight.normal_(std=0.02, generator=generator)

    def storages(self) -> set[int]:
        """Name the storages of the weights, as `Meter` names them."""
        return {weight.untyped_storage()._cdata for weight in self._weights}


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A layer with what the model's forward calls it with."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def place(self) -> str | int:
        """Where the hidden states are among the arguments: the first that has a gradient, if any has one."""
        given: dict[str | int, Any] = dict(enumerate(self.args))
        given.update(self.kwargs)
        floats = {
            place: value
            for place, value in given.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        trained = [place for place, value in floats.items() if value.requires_grad]
        return trained[0] if trained else next(iter(floats))

    @property
    def hidden(self) -> Tensor:
        """Return the hidden states."""
        place = self.place
        hidden = self.args[place] if isinstance(place, int) else self.kwargs[place]
        assert isinstance(hidden, Tensor)
        return hidden

    def by_itself(self, hidden: Tensor) -> LayerCall:
        """Return the call with other hidden states, and with no graph behind any tensor: it can run often.

        What layers leave for each other in a mapping, such as keys and values to share, is changed there.
        """
        args, kwargs = self.given(hidden)
        own = {name: value if value is hidden else _cut_off(value) for name, value in kwargs.items()}
        return LayerCall(
            self.module, tuple(value if value is hidden else _cut_off(value) for value in args), own
        )

    def given(self, hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other hidden states."""
        place = self.place
        if isinstance(place, int):
            return (*self.args[:place], hidden, *self.args[place + 1 :]), dict(self.kwargs)
        return self.args, {**self.kwargs, place: hidden}


def _cut_off(value: Any) -> Any:
    """Return an argument with leaves of autograd in the place of tensors that it has computed."""
    if isinstance(value, MutableMapping):
        value.update({key: _cut_off(held) for key, held in value.items()})
        return value
    return tree_map_only(Tensor, _leaf, value)


def _leaf(value: Tensor) -> Tensor:
    return value if value.grad_fn is None else value.detach().requires_grad_()


@dataclass(slots=True)
class Trace:
    """The memory of one pass of a layer, in bytes alive at a time; weights are not counted."""

    input_bytes: int = 0
    """Bytes of the hidden states that come in."""
    saved_bytes: int = 0
    """Bytes after the forward, with nothing left but the graph."""
    holds_input: bool = False
    """Whether the graph holds the layer's input, which `saved_bytes` then counts."""
    forward_peak_bytes: int = 0
    """Most bytes in the forward, input and output included."""
    backward_peak_bytes: int = 0
    """Most bytes in the backward, with gradients of all weights alive until the layer's end."""
    fragment_peak_bytes: int = 0
    """Most bytes in the backward, with gradients of weights alive until their fragment's end."""
    backward_made_bytes: int = 0
    """The part of `backward_peak_bytes` that is made in the backward, when that is most."""
    fragment_made_bytes: int = 0
    """The same part of `fragment_peak_bytes`."""
    collect_bytes: tuple[int, ...] = ()
    """Bytes when the gradients of a fragment's weights are complete, by fragment; others are gone."""
    whole_collect_bytes: int = 0
    """Bytes when the gradients of all weights are complete."""
    forward: list[Cost] = field(default_factory=list)
    """The cost of the forward, by fragment."""
    backward: Cost = field(default_factory=Cost)
    offloaded_bytes: int = 0
    """Saved bytes that `offload` takes to the host, as laid out there."""
    offload_copied_bytes: int = 0
    """The same bytes without what aligns them."""
    offload_left_bytes: int = 0
    """Saved bytes that `offload` leaves on the device."""
    route_bytes: int = 0
    """Bytes of what its routers have chosen, where they are kept: `saved_bytes` counts them too."""
    results_room_bytes: int = 0
    """The part of `saved_bytes` that is results which wait where the layer's input does: the room there."""
    results_copied_bytes: int = 0
    """The same bytes without what aligns them."""
    compiled: tuple[CompiledKeep, ...] = ()
    """What stays of the layer where it is compiled, of `keep`; None: it is not known."""
    late: Trace | None = None
    """The same where the layer's input waits elsewhere and comes back late; None: it is not in tiles."""
    beside: Trace | None = None
    """The same with experts that come apart, left out; None: the layer has none."""
    others: tuple[Any, ...] | None = None
    """The layer's results beside its hidden states, of tensors only indices, which a next layer may be given
    and no gradient passes; None: it returns no tuple."""

    def result(self, hidden: Tensor) -> Any:
        """Return what the layer would, with these hidden states."""
        return hidden if self.others is None else (hidden, *self.others)


class _Source(torch.autograd.Function):
    """Begins a graph at new hidden states, which only the graph then holds, if it wants them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None]:
        return None, None


def trace_layer(
    call: LayerCall, blocks: Sequence[FakeBlock], policy: Policy, meter: Meter, *, is_late: bool = False
) -> Trace:
    """Run a layer forward and backward under a policy, one of `COUNTED`.

    Args:
        call: The layer and its call.
        blocks: Its blocks.
        policy: The policy.
        meter: What measures the runs.
        is_late: Whether its input waits elsewhere, and comes back late. It passes in tiles then.
    """
    trace = Trace()
    base = meter.settle()
    saved = SavedTensors(meter, (key for block in blocks for key in block.storages()))
    routes = Routes(blocks[0].name, keeps=policy.reruns)
    entered = _Entered(call.module, blocks, meter, routes)
    hidden = _Source.apply(torch.zeros((), requires_grad=call.hidden.requires_grad), call.hidden)
    if hidden.requires_grad:
        hidden.register_hook(lambda grad: meter.write([grad]))
    run = _run_late if is_late else _run
    sink = _end(run(call, hidden, policy, entered, saved), trace)
    trace.forward_peak_bytes = meter.peak_bytes - base
    trace.forward = entered.take_costs()
    held = StorageWeakRef(hidden.untyped_storage())
    trace.input_bytes = meter.storage_bytes(hidden)
    del hidden
    trace.saved_bytes = meter.settle() - base
    trace.holds_input = not held.expired()
    trace.route_bytes = meter.bytes_of(routes.kept)
    if policy.moves_results:
        trace.results_room_bytes, trace.results_copied_bytes, _ = saved.offloaded()
    if not policy.reruns:
        trace.offloaded_bytes, trace.offload_copied_bytes, own_bytes = saved.offloaded()
        trace.offload_left_bytes = trace.saved_bytes - own_bytes
    start = meter.cost
    entered.begin_backward()
    sink.backward()
    trace.backward = meter.cost - start
    fragment, whole = entered.peaks()
    trace.fragment_peak_bytes, trace.fragment_made_bytes = fragment.alive - base, fragment.made
    trace.backward_peak_bytes, trace.backward_made_bytes = whole.alive - base, whole.made
    trace.collect_bytes = tuple(most(0, alive - base) for alive in entered.collected.values())
    trace.whole_collect_bytes = entered.whole_collected - base
    routes.kept.clear()  # the next trace would begin with them: they are in a circle that nobody collects
    return trace


@dataclass(slots=True)
class _Peak:
    """Most bytes at a time."""

    alive: Any = 0
    made: Any = 0
    """The part that was made since the backward began."""

    def raise_to(self, alive: Any, made: Any) -> None:
        self.alive, self.made = most(self.alive, alive), most(self.made, made)


def _run(call: LayerCall, hidden: Tensor, policy: Policy, entered: _Entered, saved: SavedTensors) -> Any:
    args, kwargs = call.given(hidden)
    if not policy.reruns:
        saved.share(args, kwargs)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held):
            return entered.run(args, kwargs)
    store = Store(keeps_attention=policy.keeps_attention, save=lambda tensor: Whole(saved.pack(tensor)))
    return checkpoint(
        lambda _, *args, **kwargs: entered.run(args, kwargs),
        torch.empty(0),
        *args,
        use_reentrant=False,
        context_fn=partial(_contexts, policy, saved, store),
        **kwargs,
    )


def _contexts(policy: Policy, saved: SavedTensors, store: Store) -> Contexts:
    """Return the contexts of a layer's first run and of its second one."""
    save = (lambda tensor: Here.of(tensor, saved.pack)) if policy.moves_results else None
    kept = keeping(policy, save)() if policy.keeps_results else (nullcontext(), nullcontext())
    return _both(kept[0], store.running()), _both(kept[1], store.running(is_last=True))


@contextmanager
def _both(first: AbstractContextManager[object], second: AbstractContextManager[object]) -> Iterator[None]:
    with first, second:
        yield


class _Elsewhere:
    """Stands for a tensor that has left the device, or is about to."""

    def __init__(self, tensor: Tensor, *, is_gone: bool = False) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self._tensor = None if is_gone else tensor.detach()
        self._ahead: Tensor | None = None

    def leave(self) -> None:
        """Let it be gone from the device."""
        self._tensor = None

    def load(self) -> Tensor:
        """Return a tensor like it, on the device."""
        return torch.empty(self.shape, dtype=self.dtype) if self._tensor is None else self._tensor

    def rows(self, tile: slice) -> Tensor:
        """Return some tokens like its own, while the next ones come."""
        if self._tensor is not None:
            return self._tensor[:, tile]
        count = tile.stop - tile.start
        here = self._ahead if self._ahead is not None and self._ahead.shape[1] == count else self._some(count)
        self._ahead = self._some(count) if tile.stop < self.shape[1] else None
        return here

    def _some(self, count: int) -> Tensor:
        return torch.empty((self.shape[0], count, *self.shape[2:]), dtype=self.dtype)


def _run_late(call: LayerCall, hidden: Tensor, policy: Policy, entered: _Entered, saved: SavedTensors) -> Any:
    """Run a layer whose input leaves the device, and with it what attention returns if that is kept."""
    leaving: list[_Elsewhere] = []

    def save(tensor: Tensor) -> Stored:
        if not policy.moves_results or not may_wait(tensor):
            return Whole(tensor.detach())
        leaving.append(_Elsewhere(tensor))
        return leaving[-1]

    def settle() -> None:
        for each in leaving:
            each.leave()

    store = Store(keeps_attention=policy.keeps_attention, save=save, settle=settle)
    source = _Elsewhere(hidden, is_gone=True)
    first, like = [hidden], (hidden.shape, hidden.dtype, hidden.requires_grad)

    def run(_: Tensor) -> Any:
        given = first.pop() if first else torch.empty(like[0], dtype=like[1], requires_grad=like[2])
        store.has_input(given, source)
        return entered.run(*call.given(given))

    result = checkpoint(
        run, torch.empty(0), use_reentrant=False, context_fn=partial(_contexts, policy, saved, store)
    )
    settle()
    return result


def _end(result: Any, trace: Trace) -> Tensor:
    hidden = result
    if isinstance(result, (tuple, list)):
        hidden = result[0]
        trace.others = tuple(None if _is_computed(value) else value for value in result[1:])
    sink: Tensor = _Sink.apply(hidden)
    return sink


def _is_computed(value: Any) -> bool:
    """Whether a value is a tensor of numbers, and no indices."""
    return isinstance(value, Tensor) and value.is_floating_point()


class _Entered:
    """Runs a layer, bringing each fragment's weights when a module of it is called."""

    def __init__(self, module: nn.Module, blocks: Sequence[FakeBlock], meter: Meter, routes: Routes) -> None:
        self._module = module
        self._routers = routers_of(module)
        self._routes = routes
        self._blocks = blocks
        self._meter = meter
        self._entered: FakeBlock | None = None
        self._spent = dict.fromkeys((block.name for block in blocks), Cost())
        self._start = Cost()
        self._gone_bytes: Any = 0
        self._fragment_peak, self._whole_peak = _Peak(), _Peak()
        self.collected: dict[str, Any] = dict.fromkeys((block.name for block in blocks), 0)
        """Bytes alive when a fragment's gradients are complete."""
        self.whole_collected: Any = 0
        """The same with the gradients of all fragments before."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer's own forward."""
        if torch.is_grad_enabled():
            args, kwargs = with_own_caches(args, kwargs)
        self._entered, self._start = None, self._meter.cost
        if not self._blocks[0].entries:
            self._enter(self._blocks[0])
        with ExitStack() as stack:
            for block in self._blocks:
                for module in block.entries:
                    stack.enter_context(self._entering(module, block))
            stack.enter_context(self._routes.running())
            stack.enter_context(watched(self._routers))
            result = type(self._module).forward(self._module, *args, **kwargs)
        self._meter.write(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self._note()
        return result

    def take_costs(self) -> list[Cost]:
        """Return what each fragment has cost so far."""
        return list(self._spent.values())

    def begin_backward(self) -> None:
        """Watch the peak from now on."""
        self._meter.settle()

    def peaks(self) -> tuple[_Peak, _Peak]:
        """Return the peak with weights' gradients that go with their fragment, and with the layer."""
        self._settle_peaks()
        return self._fragment_peak, self._whole_peak

    def _entering(self, module: nn.Module, block: FakeBlock) -> AbstractContextManager[object]:
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._enter(block)
            return inner(*args, **kwargs)

        return mock.patch.object(module, "forward", forward)

    def _enter(self, block: FakeBlock) -> None:
        if self._entered is not block:
            if self._entered is not None:
                self._note()
            self._entered = block
            block.stream_weights(partial(self._collect, block))

    def _note(self) -> None:
        """Charge what has run since the last note to the fragment that is entered."""
        block = self._entered or self._blocks[0]
        self._spent[block.name] += self._meter.cost - self._start
        self._start = self._meter.cost

    def _collect(self, block: FakeBlock, grads: Sequence[Tensor | None]) -> None:
        self._settle_peaks()
        self._meter.write(grad for grad in grads if grad is not None)
        self.collected[block.name] = self._meter.live_bytes
        self.whole_collected = self._meter.live_bytes + self._gone_bytes
        gone = self._meter.bytes_of(grad for grad in grads if grad is not None)
        self._gone_bytes = self._gone_bytes + gone

    def _settle_peaks(self) -> None:
        alive, made, gone = self._meter.peak_bytes, self._meter.young_peak_bytes, self._gone_bytes
        self._fragment_peak.raise_to(alive, made)
        self._whole_peak.raise_to(alive + gone, made + gone)
        self._meter.settle(ages=False)
