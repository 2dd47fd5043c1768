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

from megatrain.model.routes import Router, running_routes

_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_NAMES = ("k", "dim", "largest", "sorted")
_DEFAULTS = {"dim": -1, "largest": True, "sorted": True}

Lines: TypeAlias = Mapping[str, frozenset[int]]
"""Lines of source files."""


@torch.library.custom_op("megatrain::choose", mutates_args=())
def choose(scores: Tensor, k: int, dim: int, largest: bool, is_sorted: bool) -> tuple[Tensor, Tensor]:
    """Return what `torch.topk` does in the first run of a visit, and what it chose there in all others."""

    def make() -> tuple[Tensor, Tensor]:
        values, indices = torch.topk(scores, k, dim, largest, is_sorted)
        return values, indices

    routes = running_routes()
    return make() if routes is None else routes.choose(scores, dim, make)  # none runs where it is tried


@choose.register_fake
def _(scores: Tensor, k: int, dim: int, largest: bool, is_sorted: bool) -> tuple[Tensor, Tensor]:
    values, indices = torch.topk(scores, k, dim, largest, is_sorted)
    return values, indices


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    scores, _, ctx.dim, *_ = inputs
    ctx.shape = scores.shape
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    (indices,) = ctx.saved_tensors
    return gradient.new_zeros(ctx.shape).scatter(ctx.dim, indices, gradient), None, None, None, None


choose.register_autograd(_backward, setup_context=_set_up)


def lines_of(routers: Sequence[Router]) -> Lines:
    """Return the lines of the routers' forwards, by which operations of a graph are known for theirs."""
    lines: dict[str, set[int]] = {}
    for router in routers:
        code = type(router.module).forward.__code__
        lines.setdefault(code.co_filename, set()).update(line for *_, line in code.co_lines() if line)
    return {file: frozenset(numbers) for file, numbers in lines.items()}


def ask_visits(graph: Graph, lines: Lines) -> None:
    """Let each `topk` of these lines, or of what they call, be chosen by the visit that runs."""
    for node in list(graph.nodes):
        if not lines or not (node.target is torch.topk or node.target == "topk") or not _is_of(node, lines):
            continue
        scores, *given = node.args
        named = {**_DEFAULTS, **dict(zip(_NAMES, given, strict=False)), **node.kwargs}
        scores = named.pop("input", scores)
        with graph.inserting_before(node):
            chosen = graph.call_function(
                torch.ops.megatrain.choose.default, (scores, *(named[name] for name in _NAMES))
            )
        chosen.meta.update(node.meta)
        # a backward that computes a part of the forward again, within a budget, runs when no visit does
        chosen.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        node.replace_all_uses_with(chosen)
        graph.erase_node(node)


def _is_of(node: Node, lines: Lines) -> bool:
    frames = _FRAME.findall(node.stack_trace or "")
    return any(int(line) in lines.get(file, ()) for file, line in frames)
