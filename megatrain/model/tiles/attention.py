"""Attention in tiles and groups: what is before and behind it passes a tile at a time, heads in groups.

The module's own forward runs on tiles of tokens. Where it asks transformers' registry for its attention
function, it is stopped, with the queries, keys and values of the tile; another run gives it what attention
returned, and goes on to the module's output. So no model is rewritten, and queries, keys and values are there
as wholes for one group of heads alone.

The output of attention and its log-sum-exp are kept, so that attention runs no second time; they may wait
elsewhere (`kept`), and are read by groups. In the backward, gradients of a group's queries take the place of
its output's. The products before attention run again for each group, whole, so that every number is that of
the product in the forward.

Source: the memory-efficient order of StreamBP (Luo et al., 2025) and Untied Ulysses (2026), for one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatrain.errors import ModelError
from megatrain.model.selective import kept_by_none
from megatrain.model.sequence.attention import are_rows_shared
from megatrain.model.tiles.asked import Asked, Given, Stopped, attended_by, stop, without_caches
from megatrain.model.tiles.calls import TiledCall, Uses, called
from megatrain.model.tiles.kept import Store, Stored, Whole, store_in_use
from megatrain.model.tiles.outputs import Giving, Noting, Recipe
from megatrain.model.tiles.unread import Unread
from megatrain.model.torch_state import saving_nothing
from megatrain.model.watched import is_watched

_SINKS = "s_aux"
"""The argument of attention functions that has a sink for each head."""

GROUPS = 4
"""Most groups of heads: products run again for each, and what a group needs is as much smaller."""

LEAST_IN_GROUPS = 16_384
"""Rows of fewer tokens pass attention in one group: there the products would take more time than is worth
what they spare. Groups change no bit."""


class GroupedAttention:
    """Stands for the forward of an attention module."""

    def __init__(
        self,
        module: nn.Module,
        tokens: int,
        inner: Callable[..., Any],
        *,
        uses: int = 1,
        before: nn.Module | None = None,
    ) -> None:
        """Prepare; the module is not changed.

        Args:
            module: A module that calls one attention function (`groupable`).
            tokens: The tokens of a tile.
            inner: The module's own forward.
            uses: As of `Tiled`.
            before: The norm that a tile passes first; None: none does.
        """
        self.module, self.tokens, self.inner, self.uses, self.before = module, tokens, inner, uses, before
        self._norm = before.forward if before is not None else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module of (rows, tokens, width)."""
        given, hidden = Given.of(*map(without_caches, (args, kwargs)))
        if given is None or given.length <= self.tokens:
            return self.whole(args, kwargs)
        run = _Run(self, given)
        store = store_in_use()
        if store is not None and not store.keeps_attention:
            store = None
        attended: _Attended | None = None
        if store is not None and store.is_again:
            attended = store.again(self)
            core = None if attended is None else attended.core
        else:
            core = run.core(hidden)
            if core is None and store is not None:
                store.keep(self, None)
        if core is None:
            return self.whole(args, kwargs)
        modules = [self.module] if self.before is None else [self.before, self.module]
        call = _Call(modules, self.tokens, self.uses, hidden, run, core)
        call.store, call.attended = store, attended
        output = called(call, hidden)
        return output, *[None] * call.num_others

    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module on whole rows."""
        if self._norm is None:
            return self.inner(*args, **kwargs)
        given, hidden = Given.of(args, kwargs, with_cache=True)
        if given is None:
            raise ModelError(f"{type(self.module).__name__} was called without a hidden state")
        return given.run(self.inner, self._norm(hidden))

    @property
    def is_watched_inside(self) -> bool:
        """Whether somebody has hooked a module inside, and sees all that it computes."""
        inside = [each for each in self.module.modules() if each is not self.module]
        return any(map(is_watched, inside))

    def tile(self, given: Given, part: Tensor) -> Any:
        """Run the module on a tile."""
        return given.run(self.inner, part if self._norm is None else self._norm(part))


@dataclass(frozen=True, slots=True)
class _Core:
    """The attention of whole rows."""

    function: Callable[..., Any]
    mask: Any
    more: Mapping[str, Any]
    groups: int
    """The number of groups of heads."""
    first: list[tuple[Tensor, Tensor, Tensor]]
    """Queries, keys and values of the first tile, until they are asked for."""
    sinks: str | None = None
    """The name of the module's parameter that has a sink for each head; None: it has none."""


@dataclass(slots=True)
class _Attended:
    """What attention has returned, by group, until the backward."""

    core: _Core
    recipes: list[Recipe]
    outputs: list[Stored]
    """(rows, tokens, heads, size) of each group."""
    results: list[list[Stored]]
    """The other tensors that its operations returned."""

    def tensors(self) -> list[Tensor]:
        """List all of them, as they are on the device."""
        pairs = zip(self.outputs, self.results, strict=True)
        return [each.load() for output, results in pairs for each in (output, *results)]

    def part(self, tile: slice) -> Tensor:
        """Return some tokens of all groups: (rows, tokens, heads, size)."""
        return torch.cat([each.rows(tile) for each in self.outputs], dim=2)

    def found(self, kept: list[Tensor]) -> _Attended:
        """Return the same of other tensors, in the order of `tensors`."""
        outputs: list[Stored] = []
        results: list[list[Stored]] = []
        for recipe in self.recipes:
            outputs.append(Whole(kept.pop(0)))
            results.append([Whole(kept.pop(0)) for _ in range(recipe.number)])
        return _Attended(self.core, self.recipes, outputs, results)


class _Run:
    """Runs one module with what it was called with."""

    def __init__(self, attention: GroupedAttention, given: Given) -> None:
        self.module, self.attention, self._given = attention.module, attention, given

    def asked(self, part: Tensor, tile: slice) -> Asked:
        """Return what a tile asks attention for."""
        given, _ = self._given.tile(tile)
        try:
            with attended_by(stop):
                self.attention.tile(given, part)
        except Stopped as stopped:
            return stopped.asked
        raise AssertionError("a module that asks for attention in trials does not ask for it")

    def behind(self, hidden: Stored, attended: Tensor, tile: slice) -> Any:
        """Return the module's output for a tile, given what attention returned for it.

        The hidden state is not read, unless somebody sees what the module computes of it.
        """
        if self.attention.is_watched_inside:
            given, _ = self._given.tile(tile)
            with attended_by(lambda _: (attended, None)):
                return self.attention.tile(given, hidden.rows(tile).detach().contiguous())
        shape = (*attended.shape[:2], *hidden.shape[2:])
        return self.output(attended.new_empty(shape, dtype=hidden.dtype), attended, tile)

    def output(self, part: Tensor, attended: Tensor, tile: slice) -> Any:
        """Return the module's output for a tile, given what attention returned for it; `part` is not read."""
        given, _ = self._given.tile(tile)
        unread = Unread()

        def attend(_: Asked) -> Any:
            unread.end()
            return attended, None

        with attended_by(attend), unread:
            return self.attention.tile(given, part)

    def core(self, hidden: Tensor) -> _Core | None:
        """Find the attention of whole rows, from what the first tile asks for; None: it cannot be known."""
        if are_rows_shared(getattr(self.module, "config", None)):
            return None
        tile = slice(0, self.attention.tokens)
        given, wholes = self._given.tile(tile)
        part = hidden[:, tile].detach().contiguous()
        try:
            with attended_by(stop), kept_by_none(), torch.no_grad():
                self.attention.tile(given, part)
        except Stopped as stopped:
            asked = stopped.asked
        else:
            return None
        if asked.more.get("dropout"):
            return None
        more = dict(asked.more)
        sinks = more.pop(_SINKS, None)
        of_sinks = next((leaf for leaf, own in self.module._parameters.items() if own is sinks), None)
        if sinks is not None and (of_sinks is None or sinks.shape != asked.heads[0].shape[1:2]):
            return None
        flat, tree = tree_flatten((asked.mask, more))
        for n, leaf in enumerate(flat):
            if isinstance(leaf, Tensor):
                if id(leaf) not in wholes or wholes[id(leaf)].requires_grad:
                    return None
                flat[n] = wholes[id(leaf)]
        mask, more = tree_unflatten(flat, tree)
        if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] != 1:
            return None
        query, key, value = asked.heads
        of_keys = key.shape[1]
        if query.shape[1] % of_keys or value.shape[1] != of_keys:
            return None
        most = GROUPS if self._given.length >= LEAST_IN_GROUPS else 1
        groups = next(n for n in range(most, 0, -1) if of_keys % n == 0)
        return _Core(asked.function, mask, more, groups, [asked.heads], None if sinks is None else of_sinks)


class _Call(TiledCall):
    """One call."""

    def __init__(
        self, modules: Sequence[nn.Module], tokens: int, uses: int, hidden: Tensor, run: _Run, core: _Core
    ) -> None:
        super().__init__(modules, tokens, uses, hidden)
        self._run, self._core = run, core
        self.num_others = 0
        """The values that the module returns beside its output: none of them is a tensor."""
        self.store: Store | None = None
        """What keeps what attention returns; None: autograd saves it."""
        self.attended: _Attended | None = None
        """What attention has returned."""

    def compute(self, hidden: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the module's output, and what attention has returned if that is not kept elsewhere."""
        with torch.no_grad():
            if self.attended is None:
                self.attended = self._attended(hidden)
            attended = self.attended
            output: Tensor | None = None
            with kept_by_none():
                for tile in self.tiles(hidden):
                    whole = self._run.behind(Whole(hidden), attended.part(tile), tile)
                    if output is None:
                        self.num_others = len(whole) - 1
                        output = whole[0].new_empty((*hidden.shape[:2], *whole[0].shape[2:]))
                    output[:, tile] = whole[0]
        assert output is not None
        if self.store is not None or not self.has_backward:
            return output, []
        self.attended = _Attended(self._core, attended.recipes, [], [])
        return output, attended.tensors()

    def _attended(self, hidden: Tensor) -> _Attended:
        """Compute attention, by groups."""
        save = Whole if self.store is None else self.store.save
        attended = _Attended(self._core, [], [], [])
        waiting = self._heads(hidden, range(self._core.groups))
        for group in range(self._core.groups):
            heads = waiting.pop(0)
            noting = Noting()
            aside = nullcontext() if self.store is None else kept_by_none()
            # kernels return a log-sum-exp only where a gradient is wanted
            with aside, noting, saving_nothing(), torch.set_grad_enabled(self.has_backward):
                for each in heads:
                    each.requires_grad_(self.has_backward)
                found = self._attend(heads, self._sinks(group)).detach()
            del heads, each
            recipe, tensors = Recipe.of(found, noting.outputs)
            attended.recipes.append(recipe)
            attended.outputs.append(save(found))
            attended.results.append([save(tensor) for tensor in tensors])
            del noting, found, tensors
        if self.store is not None:
            self.store.keep(self._run.attention, attended)
        return attended

    def go_back(self, hidden: Stored, gradient: Tensor, leaves: list[Tensor], kept: list[Tensor]) -> None:
        """Go back through what is behind attention, attention by groups, and what is before it."""
        attended, self.attended = self.attended, None
        assert attended is not None
        if self.store is None:
            attended = attended.found(kept)
        of_attended = self._behind(hidden, gradient, leaves, attended)
        del gradient
        of_heads: list[Sequence[Tensor]] = []
        for group, recipe in enumerate(attended.recipes):
            (heads,) = self._heads(hidden, range(group, group + 1))
            for each in heads:
                each.requires_grad_()
            sinks = self._sinks(group)
            results = [each.load() for each in attended.results.pop(0)]
            with Giving(recipe.outputs(attended.outputs.pop(0).load(), results)):
                found = self._attend(heads, sinks)
            wanted = [*heads] if sinks is None or not sinks.requires_grad else [*heads, sinks]
            gradients = torch.autograd.grad(found, wanted, of_attended.pop(0))
            of_heads.append(gradients[: len(heads)])
            self._add_sinks(leaves, group, gradients[len(heads) :])
            del found, heads, each, results, gradients, wanted
        for tile in self.tiles(hidden):
            part = hidden.rows(tile).detach().contiguous().requires_grad_(self.wants_input)
            apart = Uses(part) if self.wants_input and self.uses > 1 else None
            with apart or nullcontext():
                asked = self._run.asked(part, tile).heads
            places = [n for n, each in enumerate(asked) if each.requires_grad]
            of_tile = [torch.cat([each[n][:, :, tile] for each in of_heads], dim=1) for n in places]
            if places:
                self.take([asked[n] for n in places], of_tile, part, apart, leaves, tile)
            del part, apart, asked, of_tile

    def _behind(
        self, hidden: Stored, gradient: Tensor, leaves: list[Tensor], attended: _Attended
    ) -> list[Tensor]:
        """Return the gradients of what attention returned, by group, and take those of weights behind it."""
        found = [gradient.new_empty(each.shape, dtype=each.dtype) for each in attended.outputs]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        for tile in self.tiles(hidden):
            part = attended.part(tile).requires_grad_()
            whole = self._run.behind(hidden, part, tile)
            of_part, *of_weights = torch.autograd.grad(
                whole[0],
                [part, *trained],
                gradient[:, tile].contiguous(),
                allow_unused=True,
            )
            self.add(of_weights)
            for room, own in zip(found, of_part.split([each.shape[2] for each in found], 2), strict=True):
                room[:, tile] = own
            del part, whole, of_part, of_weights, own, room
        return found

    def _attend(self, heads: Sequence[Tensor], sinks: Tensor | None) -> Tensor:
        """Return what attention returns for a group: (rows, tokens, heads, size)."""
        core = self._core
        more = core.more if sinks is None else {**core.more, _SINKS: sinks}
        found: Tensor = core.function(self._run.module, *heads, core.mask, **more)[0]
        return found

    def _sinks(self, group: int) -> Tensor | None:
        """Return the sinks of a group's heads, apart from all others."""
        if self._core.sinks is None:
            return None
        whole: Tensor = getattr(self._run.module, self._core.sinks)
        return whole.detach().chunk(self._core.groups)[group].requires_grad_(whole.requires_grad)

    def _add_sinks(self, leaves: list[Tensor], group: int, gradients: Sequence[Tensor]) -> None:
        """Add the gradient of a group's sinks, if there is one, to that of all."""
        for gradient in gradients:
            assert self._core.sinks is not None
            whole = getattr(self._run.module, self._core.sinks)
            places = torch.zeros_like(whole)
            places.chunk(self._core.groups)[group].copy_(gradient)
            self.add([places if leaf is whole else None for leaf in leaves if leaf.requires_grad])

    def _heads(self, hidden: Tensor | Stored, groups: range) -> list[Sequence[Tensor]]:
        """Return queries, keys and values of whole rows, by group: (rows, heads, tokens, size)."""
        found: list[list[Tensor]] = []
        stored = Whole(hidden) if isinstance(hidden, Tensor) else hidden
        first = self._core.first
        with kept_by_none(), torch.no_grad():
            for tile in self.tiles(hidden):
                wholes = first.pop() if first else self._run.asked(stored.rows(tile).contiguous(), tile).heads
                if not found:
                    found = [[self._room(each, hidden.shape[1]) for each in wholes] for _ in groups]
                for group, rooms in zip(groups, found, strict=True):
                    for room, whole in zip(rooms, wholes, strict=True):
                        number = room.shape[1]
                        room[:, :, tile] = whole[:, group * number : (group + 1) * number]
        return [*found]

    def _room(self, part: Tensor, tokens: int) -> Tensor:
        rows, heads, _, size = part.shape
        return part.new_empty(rows, tokens, heads // self._core.groups, size).transpose(1, 2)


def groupable(attention: GroupedAttention, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an attention module gives in tiles and groups what it gives as a whole.

    Args:
        attention: What would stand for it, without a norm before it.
        args: What the module is called with.
        kwargs: The same by name; no mask is given.
    """
    attended: list[Tensor] = []

    def attend(asked: Asked) -> Any:
        output = asked.function(attention.module, *asked.heads, asked.mask, **asked.more)
        attended.append(output[0])
        return output

    given, state = Given.of(args, kwargs)
    if given is None:
        return False
    with attended_by(attend):
        expected = given.run(attention.inner, state)
    if (
        len(attended) != 1
        or not isinstance(expected, tuple)
        or any(each is not None for each in expected[1:])
    ):
        return False
    run = _Run(attention, given)
    if run.core(state) is None:
        return False
    tile = slice(0, given.length)
    hidden = state.detach().requires_grad_()
    with torch.enable_grad():
        part = attended[0].detach().requires_grad_()
        output = run.output(hidden, part, tile)[0]
        beside = torch.autograd.grad(output.sum(), hidden, allow_unused=True)[0]
    if beside is not None:  # a gate: what is behind attention reads the hidden state again
        return False
    with torch.no_grad():
        found = attention(*args, **kwargs)
    return torch.allclose(found[0], expected[0], rtol=1e-4, atol=1e-5)
