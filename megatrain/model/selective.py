"""Recompute in part: results of products or attention are kept, as a policy says, and all else runs again.

Two dispatch modes for torch's non-reentrant checkpoint. In the forward, `_Keeping` takes note of what the
kept operations return; in the recomputation, `_Returning` hands it out in the same order and runs the rest.

Torch's own `create_selective_checkpoint_contexts` does this too, with two holes that are closed here. An
attention with dropout draws random numbers: where its output is handed out they are not drawn, and every
dropout after it gets another mask than in the forward, in silence. And an output that the model goes on to
change in place (gpt_oss adds its biases to grouped products) is refused, or changed twice: here a copy is
made before the change.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatrain.config.policies import Policy
from megatrain.errors import ModelError

Contexts: TypeAlias = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

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
    )
)


def keeping(policy: Policy) -> Callable[[], Contexts]:
    """Return a `context_fn` for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`.

    Kept outputs are held by the contexts: hooks for saved tensors do not see them. Operations inside code
    that `torch.compile` has made are not seen either.

    Args:
        policy: The activation policy that says which results are kept.
    """

    def make() -> Contexts:
        kept: dict[Any, deque[_Kept]] = {}
        return _Keeping(kept, policy), _Returning(kept)

    return make


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
    if not isinstance(operation, torch._ops.OpOverload) or operation._schema.is_mutable:
        return False
    name = operation._schema.name
    if name in _PRODUCTS:
        return policy.keeps_products
    namespace, _, leaf = name.lower().partition("::")
    is_forward = leaf.endswith("fwd") or "forward" in leaf
    is_of_package = "flash_attn" in namespace and is_forward and "backward" not in leaf
    return policy.keeps_attention and (name in _ATTENTION or is_of_package)


@dataclass(slots=True)
class _Kept:
    """One call of a kept operation."""

    shapes: list[torch.Size]
    """The shapes of its arguments: a recomputation by another path would get another call's output."""
    output: Any = None
    versions: list[int] | None = None
    """The versions of the output's tensors; None: nothing is kept, the operation runs again."""

    def keep(self, output: Any) -> None:
        """Keep an output as it is now."""
        self.output = tree_map_only(Tensor, _alias, output)
        self.versions = [tensor._version for tensor in self.tensors()]

    def tensors(self) -> list[Tensor]:
        """List the tensors of the output."""
        return [leaf for leaf in tree_leaves(self.output) if isinstance(leaf, Tensor)]

    @property
    def is_intact(self) -> bool:
        """Whether the output is kept, and is what the operation returned."""
        return self.versions == [tensor._version for tensor in self.tensors()]


class _Keeping(TorchDispatchMode):
    """The forward."""

    def __init__(self, kept: dict[Any, deque[_Kept]], policy: Policy) -> None:
        super().__init__()
        self._kept = kept
        self._policy = policy
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
        if _written(func):
            self._save_from(func, args, kwargs)
        output = func(*args, **kwargs)
        if is_kept(func, self._policy):
            call = _Kept(_shapes(args, kwargs))
            if not _draws(func, args, kwargs):
                call.keep(output)
                self._storages |= {t.untyped_storage()._cdata: call for t in call.tensors()}
            self._kept.setdefault(func, deque()).append(call)
        return output

    def __exit__(self, *exception: Any) -> None:
        self._storages.clear()
        super().__exit__(*exception)

    def _save_from(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy what is kept before an operation writes into it; the recomputation will write again."""
        for value in tree_leaves([_argument(args, kwargs, *place) for place in _written(func)]):
            if isinstance(value, Tensor) and value.layout is torch.strided:
                call = self._storages.pop(value.untyped_storage()._cdata, None)
                if call is not None and call.is_intact:
                    call.keep(tree_map_only(Tensor, torch.clone, call.output))


class _Returning(TorchDispatchMode):
    """The recomputation. A second one, of a graph that was retained, finds nothing and runs everything."""

    def __init__(self, kept: dict[Any, deque[_Kept]]) -> None:
        super().__init__()
        self._kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        calls = self._kept.get(func)
        if not calls:
            return func(*args, **kwargs)
        call = calls.popleft()
        if call.shapes != _shapes(args, kwargs):
            raise ModelError(
                f"{func} gets arguments of shapes {[tuple(s) for s in _shapes(args, kwargs)]} where it had "
                f"{[tuple(s) for s in call.shapes]} in the forward: the block does not do the same "
                "twice; use activations=keep"
            )
        return call.output if call.is_intact else func(*args, **kwargs)

    def __exit__(self, *exception: Any) -> None:
        self._kept.clear()  # torch ends a recomputation as soon as nothing more of it is needed
        super().__exit__(*exception)


def _alias(tensor: Tensor) -> Tensor:
    """Return the tensor's memory without its node, and with its version counter: it tells of changes."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers: attention with dropout."""
    return any(_argument(args, kwargs, *place) for place in _dropouts(func))


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
    return tuple(
        (index, argument.name, argument.default_value)
        for index, argument in enumerate(func._schema.arguments)
        if argument.name in ("dropout_p", "p_dropout")
    )
