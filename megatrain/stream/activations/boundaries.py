"""The inputs of recomputed layers: on the device, on the host, or made again by the layers before.

The boundary of a call is the first argument by position that wants a gradient. A dropped one is
packed as a recipe: the call of the layer before, on that layer's own boundary, which may be a recipe
too. Bringing it back follows the chain to a boundary that was kept and runs the layers from there,
without a graph, with the random state of their first run; all micro-batches of the round pass a
layer before any passes the next, so that each layer is fetched once. What a chain makes on its way
stays until its own layer's backward: no layer runs twice.

Source of the idea: recursive recomputation (Chen et al., "Training Deep Nets with Sublinear Memory Cost",
2016), here with one level of boundaries and one of recipes.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections import UserDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megatrain.model.torch_state import Autocast, RandomState, saving_nothing
from megatrain.stream.activations.offload import OffloadedActivations
from megatrain.stream.activations.saved_tensors import Held

_log = logging.getLogger(__name__)

RunAgain: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""Runs a layer on the arguments of a call, and returns its result."""


class Packed(NamedTuple):
    """A call's arguments by position, of which the boundary is kept elsewhere."""

    args: tuple[Any, ...]
    """With nothing in the boundary's place."""
    place: int
    boundary: Boundary
    has_gradient: bool
    """The boundary wants one: nothing before a first layer may be trained."""

    def with_boundary(self, hidden: Tensor) -> tuple[Any, ...]:
        """Return the arguments with the boundary in its place, which wants a gradient as it did."""
        # with a graph, libraries choose the forward's kernels
        boundary = hidden.detach().requires_grad_(self.has_gradient)
        return (*self.args[: self.place], boundary, *self.args[self.place + 1 :])


class Call:
    """A layer's call in the forward: everything that another run of it takes, its boundary packed."""

    def __init__(
        self, run: RunAgain, packed: Packed, kwargs: dict[str, Any], *, micro_batch: int, device: torch.device
    ) -> None:
        """Keep what is called, and what it computes by; its forward comes next."""
        self._run = run
        self._packed = packed
        self._kwargs = kwargs
        self._device = device
        self._random = RandomState(device)
        self._autocast = Autocast(device)
        self.micro_batch = micro_batch

    @property
    def boundary(self) -> Boundary:
        """The packed boundary."""
        return self._packed.boundary

    def run_again(self, hidden: Tensor) -> Tensor:
        """Run the layer on its boundary as it ran first, and return its output; no graph is left of it."""
        held = RandomState(self._device)
        args = self._packed.with_boundary(hidden)
        # layers may write into containers that they share
        kwargs = {k: copy.copy(v) if isinstance(v, (dict, UserDict)) else v for k, v in self._kwargs.items()}
        self._random.restore()
        try:
            with (
                self._autocast.again(),
                torch.enable_grad(),
                saving_nothing(),
            ):
                return output_of(self._run(args, kwargs)).detach()
        finally:
            held.restore()


class Recipe:
    """A dropped boundary: the output of a call."""

    def __init__(self, call: Call, peers: list[Recipe]) -> None:
        """Make the output of `call`; `peers` are the same boundary of the round's other micro-batches."""
        self.call = call
        self._peers = weakref.WeakSet(peers)
        self.value: Tensor | None = None

    def peers(self) -> list[Recipe]:
        """Return this boundary's recipes of all micro-batches that are not made yet, as they ran first."""
        waiting = [recipe for recipe in [*self._peers, self] if recipe.value is None]
        return sorted(set(waiting), key=lambda recipe: -recipe.call.micro_batch)

    def share(self, other: Recipe) -> None:
        """Let this recipe make another micro-batch's boundary too."""
        self._peers.add(other)


Boundary: TypeAlias = Tensor | Held | Recipe
"""A boundary that was packed."""


class LastCall:
    """The last layer's call in a pass of the model, known again by its output."""

    def __init__(self) -> None:
        """Know of none."""
        self._found: tuple[Call, weakref.ref[Tensor], int] | None = None

    def note(self, call: Call | None, result: Any) -> None:
        """Remember what a layer has returned; None: nobody will ask for its call."""
        hidden = result[0] if isinstance(result, (tuple, list)) and result else result
        self._found = None
        if call is not None and isinstance(hidden, Tensor):
            self._found = call, weakref.ref(hidden), hidden._version

    def of(self, hidden: Tensor) -> Call | None:
        """Return the call if these are its output, unchanged."""
        if self._found is None:
            return None
        call, output, version = self._found
        return call if output() is hidden and version == hidden._version else None


class Boundaries:
    """Packs and unpacks the boundaries of one layer."""

    def __init__(
        self, name: str, offloaded: OffloadedActivations, *, on_host: bool, drops: bool, is_source: bool
    ) -> None:
        """Decide for one layer.

        Args:
            name: The layer's name, for messages.
            offloaded: The offloaded activations, among which boundaries wait on the host.
            on_host: This layer's wait there.
            drops: This layer's is made again by the layer before.
            is_source: The next layer's is, so this layer's calls are remembered.
        """
        self._name = name
        self._offloaded = offloaded
        self.are_on_host = on_host
        """Whether they leave the device."""
        self._drops = drops
        self.is_source = is_source
        """Whether the layer may run again for the next one's boundary."""
        self.packs = on_host or drops or is_source
        """Whether calls have to be packed at all."""
        self._recipes: list[weakref.ref[Recipe]] = []
        self._round = offloaded.num_dropped
        """Whose recipes these are: what is left of a round that was dropped cannot be made any more."""
        self._has_warned = False

    def pack(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        key: Hashable,
        last: LastCall,
        is_trained: bool,
    ) -> Packed | None:
        """Pack the boundary of the call that follows; None: it stays among the arguments.

        Args:
            args: The positional arguments of the call.
            kwargs: The keyword arguments of the call.
            key: Names what the call saves.
            last: The last call of the pass.
            is_trained: Something of the layer is, so it has a backward whatever its boundary wants.
        """
        assert self.packs, "the boundary stays among the arguments"
        floats = [n for n, value in enumerate(args) if _is_float(value)]
        place = next((n for n in floats if args[n].requires_grad), None)
        wanted = is_trained or self.is_source  # the next layer asks for it, though this one has no backward
        if place is None and wanted and floats and not any(map(_is_boundary, kwargs.values())):
            place = floats[0]
        if place is None:
            if (self.are_on_host or self._drops) and any(map(_is_boundary, kwargs.values())):
                self._say_kept("its input is given by name, so it stays on the device")
            return None
        others = (*args[:place], None, *args[place + 1 :])
        hidden = args[place]
        return Packed(others, place, self._packed(hidden, key, last), hidden.requires_grad)

    def bring(self, packed: Packed) -> tuple[Any, ...]:
        """Return the arguments of a call with their boundary, for its recomputation."""
        boundary = packed.boundary
        if isinstance(boundary, Recipe):
            return packed.with_boundary(make(boundary, self._load))
        return packed.with_boundary(self._load(boundary))

    def call_of(
        self, packed: Packed | None, kwargs: dict[str, Any], *, micro_batch: int, run: RunAgain
    ) -> Call | None:
        """Return the call that follows if the next layer may ask for it.

        Args:
            packed: The packed arguments of the call.
            kwargs: The packed keyword arguments of the call, by name.
            micro_batch: The number of the micro-batch within the round.
            run: The function that runs the layer once more.
        """
        if packed is None or not self.is_source:
            return None
        return Call(run, packed, kwargs, micro_batch=micro_batch, device=self._offloaded.device)

    def _packed(self, hidden: Tensor, key: Hashable, last: LastCall) -> Boundary:
        if self._drops:
            source = last.of(hidden)
            if source is not None:
                return self._recipe(source)
            self._say_kept(
                "its input is not just the output of the layer before, so it is kept in place of being "
                "dropped"
            )
        if self.are_on_host:
            return self._offloaded.save(hidden, key)
        return hidden.detach()

    def _say_kept(self, reason: str) -> None:
        """Warn, once, that a boundary is not where the policy wants it."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s: %s", self._name, reason)

    def _recipe(self, call: Call) -> Recipe:
        if self._round != self._offloaded.num_dropped:
            self._round, self._recipes = self._offloaded.num_dropped, []
        peers = [recipe for ref in self._recipes if (recipe := ref()) is not None and recipe.value is None]
        recipe = Recipe(call, peers)
        for peer in peers:
            peer.share(recipe)
        self._recipes = [weakref.ref(peer) for peer in [*peers, recipe]]
        return recipe

    def _load(self, packed: Tensor | Held) -> Tensor:
        return self._offloaded.load(packed) if isinstance(packed, Held) else packed


def make(recipe: Recipe, load: Callable[[Tensor | Held], Tensor]) -> Tensor:
    """Return a dropped boundary, running the layers before it where that has not been done."""
    chain: list[Recipe] = []
    link: Boundary = recipe
    while isinstance(link, Recipe) and link.value is None:
        chain.append(link)
        link = link.call.boundary
    for step in reversed(chain):
        for peer in step.peers():
            boundary = peer.call.boundary
            if isinstance(boundary, Recipe):
                if boundary.value is None:
                    continue  # its micro-batch has skipped other layers: it is made when it is asked for
                hidden = boundary.value
            else:
                hidden = load(boundary)
            peer.value = peer.call.run_again(hidden)
    assert recipe.value is not None
    return recipe.value


def output_of(result: Any) -> Tensor:
    """Return the hidden states among what a layer returns: the result, or the first of several."""
    hidden = result[0] if isinstance(result, (tuple, list)) else result
    assert isinstance(hidden, Tensor)
    return hidden


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_boundary(value: Any) -> bool:
    return _is_float(value) and bool(value.requires_grad)
