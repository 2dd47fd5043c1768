"""Recompute in part: results of products or attention are kept, as a policy says, and all else runs again.

Dispatch modes around the runs of a call. In the first run, `_Keeping` takes note of what the kept operations
return; in a later one, `_Returning` hands it out in the same order and runs the rest. Operations that
compiled code calls, as it does for attention, are seen too: only what a compiler has made a kernel of its own
is not.

Torch's own `create_selective_checkpoint_contexts` does this too, with two holes that are closed here. An
attention with dropout draws random numbers: where its output is handed out they are not drawn, and every
dropout after it gets another mask than in the forward, in silence. And an output that the model goes on to
change in place (gpt_oss adds its biases to grouped products) is refused, or changed twice: here a copy is
made before the change. What compiled code writes is not seen: there a result is kept only if autograd saves
it too, for then no buffer is made of it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from megatrain.config.policies import Policy
from megatrain.errors import ModelError

Contexts: TypeAlias = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class Saved(Protocol):
    """A tensor that is kept for a later run."""

    @property
    def is_intact(self) -> bool:
        """Whether it is what the operation returned: nobody has written into it."""

    def load(self) -> Tensor:
        """Return it on the device."""


_PRODUCTS = frozenset(
    f"aten::{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm")
)
_ATTENTION = frozenset(
    (
        *(
            f"aten::{name}"
            for name in (
                "_scaled_dot_product_flash_attention",
                "_scaled_dot_product_flash_attention_for_cpu",
                "_scaled_dot_product_efficient_attention",
                "_scaled_dot_product_cudnn_attention",
                "_scaled_dot_product_fused_attention_overrideable",
                "_flash_attention_forward",
                "_efficient_attention_forward",
            )
        ),
        "torch_attn::_varlen_attn",
        "megatrain::tiled_attention",
    )
)
_HIGHER_ORDER = frozenset(("flex_attention",))


def keeping(policy: Policy, save: Callable[[Tensor], Saved] | None = None) -> Callable[[], Contexts]:
    """Return a `context_fn` for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`.

    Kept outputs are held by the contexts: hooks for saved tensors do not see them.

    Args:
        policy: The activation policy that says which results are kept.
        save: The function that keeps a tensor; None: it stays where it is.
    """

    def make() -> Contexts:
        results = KeptResults(policy, save)
        return results.first_run(), results.second_run()

    return make


class KeptResults:
    """The results of one call's operations, from its first run to its second one."""

    def __init__(self, policy: Policy, save: Callable[[Tensor], Saved] | None = None) -> None:
        """Keep nothing yet.

        Args:
            policy: The activation policy that says which results are kept.
            save: The function that keeps a tensor; None: it stays where it is.
        """
        self.policy = policy
        self.kept: _Calls = {}
        """The calls of kept operations that no second run has asked for yet, in order."""
        self._save = save or Here.of
        self._saved_by_autograd: set[int] | None = None
        self.num_attention = 0
        """The calls of attention in the first run whose results are kept."""

    def first_run(self) -> AbstractContextManager[object]:
        """Return the context of the first run."""
        return _Keeping(self)

    def second_run(self) -> AbstractContextManager[object]:
        """Return the context of the run before the backward, after which nothing is kept."""
        return _Returning(self)

    def run_between(self) -> AbstractContextManager[object]:
        """Return the context of a run between these two, after which all is kept as before."""
        return _Returning(self, leaves=True)

    def note_saved(self, tensor: Tensor) -> None:
        """Take note that autograd saves a tensor in the first run."""
        if _inside_compiled:
            if self._saved_by_autograd is None:
                self._saved_by_autograd = set()
            self._saved_by_autograd.add(_storage(tensor))

    def note(self, func: Any, call: _Kept, output: Any) -> None:
        """Take note of a call in the first run; None in place of an output: it runs again."""
        call.is_of_compiler = bool(_inside_compiled)
        if output is not None:
            call.keep(output, self._save)
        self.kept.setdefault(func, deque()).append(call)

    def keep_again(self, call: _Kept, output: Any) -> None:
        """Keep another output in a call's place."""
        call.keep(output, self._save)

    def end_first_run(self) -> None:
        """Forget what compiled code may have written over since."""
        found = self._saved_by_autograd or set()
        for func, calls in self.kept.items():
            for call in calls:
                if call.is_of_compiler and not call.storages <= found:
                    call.forget()
                self.num_attention += call.is_kept and is_attention(func)
        self._saved_by_autograd = None


_inside_compiled: list[object] = []
"""Not empty while code that a compiler has made runs."""


@contextmanager
def inside_compiled() -> Iterator[None]:
    """Say that what runs within this context is code that a compiler has made."""
    _inside_compiled.append(None)
    try:
        yield
    finally:
        _inside_compiled.pop()


_aside: list[object] = []
"""Not empty while what runs is run again by itself, whatever a policy keeps."""


@contextmanager
def kept_by_none() -> Iterator[None]:
    """Let no policy keep what runs within this context: it is run again by itself."""
    _aside.append(None)
    try:
        yield
    finally:
        _aside.pop()


@functools.cache  # a schema takes longer to read than a small operation to launch
def is_kept(operation: Any, policy: Policy) -> bool:
    """Whether a policy keeps an operation's output: of a matrix product, or of attention of any package."""
    if is_attention(operation):
        return policy.keeps_attention
    is_product = isinstance(operation, torch._ops.OpOverload) and operation._schema.name in _PRODUCTS
    return policy.keeps_products and is_product and not operation._schema.is_mutable


@functools.cache
def is_attention(operation: Any) -> bool:
    """Whether an operation is a forward of attention that returns a log-sum-exp beside its output.

    Those of packages for flash attention are known by the names under which versions 2 and 3 register them,
    such as `flash_attn::_flash_attn_varlen_forward` and `flash_attn_3::fwd`; the last can write into an
    output that it is given, and is kept where it is given none. **These have never run here.**
    """
    if isinstance(operation, torch._ops.HigherOrderOperator):
        return operation.name() in _HIGHER_ORDER
    if not isinstance(operation, torch._ops.OpOverload):
        return False
    name = operation._schema.name
    namespace, _, leaf = name.lower().partition("::")
    is_forward = leaf.endswith("fwd") or ("forward" in leaf and "backward" not in leaf)
    if "flash_attn" in namespace and is_forward:
        return True
    return name in _ATTENTION and not operation._schema.is_mutable


def keep_from_budget(graph: Graph) -> None:
    """Let no compiled backward run a forward of attention again, whatever its budget.

    It is what takes most time in long rows, and a budget would let it run a third time where its layer runs
    again, for a policy cannot keep what the compiled forward does not hand over.

    Args:
        graph: The graph of a layer's forward and backward, before it is parted.
    """
    for node in graph.nodes:
        if node.op == "call_function" and is_attention(node.target):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


@dataclass(slots=True)
class Here:
    """A tensor that stays where it is."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor, detach: Callable[[Tensor], Tensor] = Tensor.detach) -> Here:
        """Keep a tensor's memory without its node, and with its version counter: it tells of changes."""
        tensor = detach(tensor)
        return cls(tensor, tensor._version)

    @property
    def is_intact(self) -> bool:
        """Whether nobody has written into it."""
        return self.tensor._version == self.version

    def load(self) -> Tensor:
        """Return it."""
        return self.tensor


@dataclass(slots=True)
class _Kept:
    """One call of a kept operation."""

    shapes: list[torch.Size]
    """The shapes of its arguments: a recomputation by another path would get another call's output."""
    is_of_compiler: bool = False
    """Whether compiled code has called it, which may write without a trace."""
    storages: set[int] = field(default_factory=set)
    """The memory of the floating-point tensors that it has returned."""
    _leaves: list[Any] | None = None
    """Its output, with a `Saved` in place of each tensor; None: nothing is kept, it runs again."""
    _places: list[int] = field(default_factory=list)
    """The leaves that are tensors."""
    _tree: Any = None

    def keep(self, output: Any, save: Callable[[Tensor], Saved]) -> None:
        """Keep an output as it is now."""
        self._leaves, self._tree = tree_flatten(output)
        self._places = [n for n, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        floats = (self._leaves[n] for n in self._places if self._leaves[n].is_floating_point())
        self.storages = {_storage(tensor) for tensor in floats if tensor.numel()}
        # a change in place is counted where the tensor is kept too
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            for n in self._places:
                self._leaves[n] = save(self._leaves[n])

    def forget(self) -> None:
        """Keep nothing: the operation runs again."""
        self._leaves = None

    @property
    def is_kept(self) -> bool:
        """Whether anything is kept."""
        return self._leaves is not None

    @property
    def is_intact(self) -> bool:
        """Whether the output is kept, and is what the operation returned."""
        return self._leaves is not None and all(self._leaves[n].is_intact for n in self._places)

    def load(self) -> Any:
        """Return the output, on the device."""
        assert self._leaves is not None
        leaves = list(self._leaves)
        for n in self._places:
            leaves[n] = leaves[n].load()
        return tree_unflatten(leaves, self._tree)


_Calls: TypeAlias = dict[Any, deque[_Kept]]
"""Calls by their operation, in order."""


class _Keeping(TorchDispatchMode):
    """The first run."""

    supports_higher_order_operators = True

    def __init__(self, results: KeptResults) -> None:
        super().__init__()
        self._results = results
        self._storages: dict[int, _Kept] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _aside:
            return func(*args, **kwargs)
        written = _written_by(func, args, kwargs)
        if written:
            self._save_from(written)
        output = func(*args, **kwargs)
        if is_kept(func, self._results.policy):
            call = _Kept(_shapes(args, kwargs))
            is_own = not written and not _draws(func, args, kwargs)
            self._results.note(func, call, output if is_own else None)
            if is_own:
                tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
                self._storages |= {_storage(tensor): call for tensor in tensors}
        return output

    def __exit__(self, *exception: Any) -> None:
        self._storages.clear()
        self._results.end_first_run()
        super().__exit__(*exception)

    def _save_from(self, written: Iterable[Tensor]) -> None:
        """Copy what is kept before an operation writes into it; the recomputation will write again."""
        for value in written:
            if value.layout is torch.strided:
                call = self._storages.pop(_storage(value), None)
                if call is not None and call.is_intact:
                    leaves, tree = tree_flatten(call.load())
                    copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                    self._results.keep_again(call, tree_unflatten(copies, tree))


class _Returning(TorchDispatchMode):
    """A later run. After a second one, of a graph that was retained, nothing is found and everything runs."""

    supports_higher_order_operators = True

    def __init__(self, results: KeptResults, *, leaves: bool = False) -> None:
        super().__init__()
        self._results = results
        self._leaves = leaves
        self._kept: _Calls = {}
        self._lent: dict[int, _Kept] = {}
        """The calls whose results a later run will ask for, by the memory that this one has been given."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> _Returning:
        kept = self._results.kept
        self._kept = {func: deque(calls) for func, calls in kept.items()} if self._leaves else kept
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._lent:
            for value in _written_by(func, args, kwargs):
                if (lent := self._lent.pop(_storage(value), None)) is not None:
                    lent.forget()
        calls = None if _aside else self._kept.get(func)
        if not calls:
            return func(*args, **kwargs)
        call = calls.popleft()
        if call.shapes != _shapes(args, kwargs):
            raise ModelError(
                f"{func} gets arguments of shapes {[tuple(s) for s in _shapes(args, kwargs)]} where it had "
                f"{[tuple(s) for s in call.shapes]} in the forward: the block does not do the same "
                "twice; use activations=keep"
            )
        if not call.is_intact:
            return func(*args, **kwargs)
        output = call.load()
        if self._leaves:
            tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
            self._lent |= {_storage(tensor): call for tensor in tensors}
        return output

    def __exit__(self, *exception: Any) -> None:
        self._lent.clear()
        self._kept.clear()  # torch ends a recomputation as soon as nothing more of it is needed
        super().__exit__(*exception)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers: attention with dropout."""
    return any(_argument(args, kwargs, *place) for place in _dropouts(func))


def _written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """List the tensors that a call writes into."""
    values = tree_leaves([_argument(args, kwargs, *place) for place in _written(func)])
    return [value for value in values if isinstance(value, Tensor)]


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, default: Any) -> Any:
    return args[index] if index < len(args) else kwargs.get(name, default)


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str, Any], ...]:
    """Find the arguments that an operation writes into."""
    if not isinstance(func, torch._ops.OpOverload):
        return ()
    return tuple(
        (index, argument.name, None)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.cache
def _dropouts(func: Any) -> tuple[tuple[int, str, Any], ...]:
    """Find the argument that is an attention's dropout, and its default."""
    if not isinstance(func, torch._ops.OpOverload):
        return ()
    return tuple(
        (index, argument.name, argument.default_value)
        for index, argument in enumerate(func._schema.arguments)
        if argument.name in ("dropout_p", "p_dropout")
    )
