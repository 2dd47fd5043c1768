"""Choices of routers in compiled layers: an operation of its own, which asks the visit that runs.

A graph has no calls that could be watched, so `topk` in a router is replaced before the graph is compiled.
The operation is opaque to compilers, which run `topk` by itself in any case. One graph serves all layers of
a kind, first runs and recomputations alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from megatrain.model.experts.routes import Router, running_routes

_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_NAMES = ("input", "k", "dim", "largest", "sorted")
_DEFAULTS = {"dim": -1, "largest": True, "sorted": True}

Lines: TypeAlias = Mapping[str, frozenset[int]]
"""Lines of source files."""


@torch.library.custom_op("megatrain::choose", mutates_args=())
def choose(
    scores: Tensor, k: int, dim: int, largest: bool, is_sorted: bool, is_of_experts: bool
) -> tuple[Tensor, Tensor]:
    """Return what `torch.topk` does in the first run of a visit, and what it chose there in all others."""

    def make() -> tuple[Tensor, Tensor]:
        values, indices = torch.topk(scores, k, dim, largest, is_sorted)
        return values, indices

    routes = running_routes()
    if routes is None:  # it is tried out
        return make()
    chosen = routes.choose(scores, dim, make)
    if is_of_experts:
        routes.chose_experts(chosen[1], scores.shape[dim])
    return chosen


@choose.register_fake
def _(
    scores: Tensor, k: int, dim: int, largest: bool, is_sorted: bool, is_of_experts: bool
) -> tuple[Tensor, Tensor]:
    values, indices = torch.topk(scores, k, dim, largest, is_sorted)
    return values, indices


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    scores, _, ctx.dim, *_ = inputs
    ctx.shape = scores.shape
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    (indices,) = ctx.saved_tensors
    return gradient.new_zeros(ctx.shape).scatter(ctx.dim, indices, gradient), None, None, None, None, None


choose.register_autograd(_backward, setup_context=_set_up)


def lines_of(routers: Sequence[Router]) -> Lines:
    """Return the lines in which routers choose, by which operations of a graph are known for theirs."""
    lines: dict[str, set[int]] = {}
    for router in routers:
        code = getattr(type(router.module), router.method).__code__
        lines.setdefault(code.co_filename, set()).update(line for *_, line in code.co_lines() if line)
    return {file: frozenset(numbers) for file, numbers in lines.items()}


def ask_visits(graph: Graph, lines: Lines) -> None:
    """Let each `topk` of these lines, or of what they call, be chosen by the visit that runs."""
    calls = [node for node in graph.nodes if node.target in (torch.topk, "topk") and _is_of(node, lines)]
    arguments = [_arguments(node) for node in calls]
    sizes = [scores.meta["example_value"].shape[dim] for scores, _, dim, *_ in arguments]
    for node, given, size in zip(calls, arguments, sizes, strict=True):
        with graph.inserting_before(node):
            # groups of experts, or those of a group, are fewer than the experts
            chosen = graph.call_function(torch.ops.megatrain.choose.default, (*given, size == max(sizes)))
        chosen.meta.update(node.meta)
        # a backward that computes a part of the forward again, within a budget, runs when no visit does
        chosen.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        node.replace_all_uses_with(chosen)
        graph.erase_node(node)


def _arguments(node: Node) -> list[Any]:
    named = {**_DEFAULTS, **dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
    return [named[name] for name in _NAMES]


def _is_of(node: Node, lines: Lines) -> bool:
    frames = _FRAME.findall(node.stack_trace or "")
    return any(int(line) in lines.get(file, ()) for file, line in frames)
