"""What a compiled layer keeps between its forward and its backward: torch's partitioner is asked.

`torch.compile` traces forward and backward as one graph, and its partitioner decides which tensors are
handed over (`torch/_functorch/partitioners.py`): it keeps what is dear to compute, and computes the rest
again in the backward's own kernels. The same graph is made here on fake tensors, with the decompositions and
passes of inductor, and given to the same partitioner.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatrain.config.budgets import ALL, BUDGETS
from megatrain.layout import pools
from megatrain.layout.host_buffers import LEAST_OFFLOADED_BYTES
from megatrain.model.caches import with_own_caches
from megatrain.model.profile.anatomy import CompiledKeep
from megatrain.model.profile.cost import Cost
from megatrain.model.profile.metering import work_of
from megatrain.model.profile.rows import Rows
from megatrain.model.profile.tracing import FakeBlock, LayerCall
from megatrain.model.selective import keep_from_budget

MOST_OPERATIONS = 300
"""Operations of a layer's forward, beyond which its graph, an unrolled loop, is not worth a count."""


def count_compiled(call: LayerCall, blocks: Sequence[FakeBlock], rows: Rows) -> tuple[CompiledKeep, ...]:
    """Count what a layer keeps where it is compiled as a whole, for each budget; call this in a fake mode.

    Args:
        call: The layer and its arguments.
        blocks: The layer's blocks.
        rows: The rows that run, and the numbers of rows for which the count is wanted.

    Raises:
        Exception: torch cannot trace the layer as one graph, for any of its reasons.
    """
    leaves, structure = tree_flatten((call.args, dict(call.kwargs)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    hidden = next(number for number, place in enumerate(places) if leaves[place] is call.hidden)
    given = [leaves[place].detach() for place in places]
    given[hidden].requires_grad_(call.hidden.requires_grad)
    weights = [block.weights for block in blocks]

    def run(*tensors: Tensor) -> tuple[Tensor]:
        for place, tensor in zip(places, tensors, strict=False):
            leaves[place] = tensor
        start = len(places)
        for block, own in zip(blocks, weights, strict=True):
            block.put(tensors[start : start + len(own)])
            start += len(own)
        args, kwargs = with_own_caches(*tree_unflatten(leaves, structure))
        result = type(call.module).forward(call.module, *args, **kwargs)
        return (result[0] if isinstance(result, (tuple, list)) else result,)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch's compiler says is for those who write it
        joint = _joint(run, [*given, *chain.from_iterable(weights)])
        parts = [_parts(_copied(joint), budget) for budget in BUDGETS]
    found = []
    least = _work(parts[0][1], rows)
    for budget, (kept, backward) in zip(BUDGETS, parts, strict=True):
        holds_input = any(node.name == f"primals_{hidden + 1}" for node in kept)
        tensors = [node.meta["val"] for node in kept if node.op != "placeholder"]
        tensors += [call.hidden] * holds_input
        each = [_added_up(tensors, size) for size in rows.each()]
        saved, offloaded, copied, left = map(_joined, zip(*each, strict=True))
        found.append(
            CompiledKeep(
                budget=budget,
                holds_input=holds_input,
                saved_bytes=saved,
                offloaded_bytes=offloaded,
                offload_copied_bytes=copied,
                offload_left_bytes=left,
                again=_at_least_none(_work(backward, rows) - least),
            )
        )
    return tuple(found)


def _joint(run: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the graph of forward and backward, as inductor gives it to the partitioner."""
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    table = select_decomp_table()
    graph: Any = aot_export_joint_simple(run, tuple(tensors), trace_joint=True, decompositions=table)
    joint_graph_passes(graph)
    return graph


def _copied(module: GraphModule) -> GraphModule:
    """Copy a graph, which parting it changes; its tensors stay the same."""
    graph, (old,) = Graph(), (node for node in module.graph.nodes if node.op == "output")
    results = graph.graph_copy(module.graph, {})
    graph.output(results).meta.update(old.meta)
    return GraphModule(module, graph)


def _parts(graph: Any, budget: float) -> tuple[list[Node], Any]:
    """Part a graph within a budget.

    Returns:
        The nodes whose memory the forward hands over, each once (a view is of what it views), and the
        backward's graph.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    if budget != ALL:
        keep_from_budget(graph.graph)
    with config.patch(activation_memory_budget=budget):
        forward, backward = min_cut_rematerialization_partition(
            graph, [], num_fwd_outputs=1, compiler="inductor"
        )
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    saved = (node for node in output.args[0][1:] if isinstance(node, Node))
    kept = dict.fromkeys(_base(node) for node in saved if isinstance(node.meta.get("val"), Tensor))
    return list(kept), backward


def _work(graph: GraphModule, rows: Rows) -> Cost:
    """Count the FLOPs of a graph's matrix products and attention, and the bytes that these are given.

    A tensor that the graph is given is read; one that it makes for them is written, and read. Other
    operations are joined with what they lead to.
    """
    total = Cost()
    given: dict[Node, int] = {}
    products: set[Node] = set()
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            given[node] = 1
        if node.op != "call_function" or not hasattr(node.target, "_overloadpacket"):
            continue
        args, kwargs = map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
        work, is_product = work_of(node.target, args, kwargs, node.meta.get("val"), rows)
        total += work
        if is_product:
            products.add(node)
            made = (_base(inner) for inner in node.all_input_nodes)
            given |= {inner: 2 for inner in made if inner.op == "call_function" and inner not in products}
    nbytes = sum(
        times * rows.of(node.meta["val"].nbytes)
        for node, times in given.items()
        if isinstance(node.meta.get("val"), Tensor)
    )
    return total + Cost(moved_bytes=nbytes, fused_bytes=nbytes)


def _base(node: Node) -> Node:
    while node.op == "call_function" and getattr(node.target, "is_view", False):
        node = node.all_input_nodes[0]
    return node


def _added_up(tensors: Sequence[Tensor], rows: Rows) -> tuple[int, int, int, int]:
    """Return the numbers of a `CompiledKeep` for one number of rows."""
    saved = [rows.one(tensor.untyped_storage().nbytes()) for tensor in tensors]
    leaving = [
        nbytes
        for tensor, nbytes in zip(tensors, saved, strict=True)
        if tensor.is_floating_point() and tensor.ndim > 0 and nbytes >= LEAST_OFFLOADED_BYTES
    ]
    return sum(saved), pools.saved_visit(leaving), sum(leaving), sum(saved) - sum(leaving)


def _at_least_none(cost: Cost) -> Cost:
    """Return a cost without bytes that are spared: what is not saved has to be made again first."""
    nbytes: Any = np.maximum(cost.moved_bytes, 0.0)
    nbytes = nbytes if nbytes.ndim else float(nbytes)
    return replace(cost, moved_bytes=nbytes, fused_bytes=nbytes)


def _joined(numbers: Sequence[int]) -> Any:
    """Return one number for each wanted number of rows; a plain one where there is no other."""
    return np.array(numbers) if len(numbers) > 1 else numbers[0]
