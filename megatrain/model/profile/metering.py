"""Measures what runs: FLOPs, bytes moved, and the memory that is alive, on fake tensors or real ones.

A fake tensor has a shape, a dtype and a storage that is freed like any other, and no memory: so autograd,
checkpoint and the model's own modules run as they are, and what they hold at a time is read off the storages.
What an operation takes for itself inside its kernel is not seen, but for attention by tiles, which says it.

Control flow that reads integers (positions, packed rows) goes on as in a real run: integers that depend on
shapes alone are computed beside the fake ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from megatrain.model.masks import check_pairs
from megatrain.model.profile.cost import Cost
from megatrain.model.profile.fusion import Fusion, touched_bytes
from megatrain.model.profile.pairs import TokenPairs
from megatrain.model.profile.rows import Rows, is_more, most
from megatrain.model.tiled_attention.operation import NAMESPACE, Work

_SHADOW = "_megatrain_value"
_SHADOW_ELEMENTS = 1 << 21
"""Integers of larger tensors are not computed: positions of 2 M tokens fit, masks of long rows do not."""

_aten = torch.ops.aten
_device_of = torch.ops.prim.device.default


class Meter(TorchDispatchMode):
    """Counts work, and follows storages from the operation that makes them until nobody holds them.

    Numbers of bytes and FLOPs are one for each size of micro-batches that is wanted, if there are several.
    """

    def __init__(self, rows: Rows | None = None, pairs: TokenPairs | None = None) -> None:
        """Count nothing yet.

        Args:
            rows: What of the numbers grows with a micro-batch; None: nothing does.
            pairs: What refuses tensors of pairs of tokens; None: masks of attention and scores alone are
                refused.
        """
        super().__init__()
        self.rows = rows or Rows(1)
        self._pairs = pairs
        self._live: dict[int, tuple[StorageWeakRef, int, Any]] = {}
        """The storages by address: each with its bytes as it runs, and those that are counted."""
        self.live_bytes: Any = 0
        """Bytes that are alive, or have gone since `settle` last looked."""
        self.peak_bytes: Any = 0
        self.young_peak_bytes: Any = 0
        """Most bytes at a time of what was made since `settle`."""
        self._old: set[int] = set()
        self._young_bytes: Any = 0
        self.cost = Cost()
        """The cost of everything so far."""
        self.head_dim = 0
        """The largest width of a head among the queries of all attention so far."""
        self.num_heads = 0
        """The most heads of these queries."""
        self.is_paused = False
        self._fusion = Fusion(self.rows)

    def write(self, tensors: Iterable[Tensor]) -> None:
        """Note that something outside reads these: a compiled kernel has to write them."""
        if not self.is_paused:
            self.cost += Cost(fused_bytes=self._fusion.write_all(tensors))

    def swapped(self, nbytes: int) -> None:
        """Take note of bytes that go to other ranks."""
        if not self.is_paused:
            self.cost += Cost(swapped_bytes=self.rows.of(nbytes))

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Count what runs inside so many times; the memory that it takes is there once."""
        before = self.cost
        yield
        self.cost = before + (self.cost - before).scaled(times)

    def settle(self, *, ages: bool = True) -> Any:
        """Return the bytes that are alive now, and let the peaks begin anew from there.

        Args:
            ages: All that is alive counts as old from now on.
        """
        self._sweep()
        self.peak_bytes = self.live_bytes
        if ages:
            self._old, self._young_bytes = set(self._live), 0
        self.young_peak_bytes = self._young_bytes
        return self.live_bytes

    def storages(self) -> set[int]:
        """Name the storages that are alive now."""
        self._sweep()
        return set(self._live)

    def storage_bytes(self, tensor: Tensor) -> Any:
        """Return the bytes of a tensor's storage."""
        return self.rows.of(tensor.untyped_storage().nbytes())

    def bytes_of(self, tensors: Iterable[Tensor]) -> Any:
        """Return the bytes of these tensors' storages, as far as they were made under the meter."""
        keys = {tensor.untyped_storage()._cdata for tensor in tensors}
        return sum(self._live[key][2] for key in keys if key in self._live)

    def pausing(self) -> AbstractContextManager[object]:
        """Neither count nor follow what runs inside."""
        return mock.patch.object(self, "is_paused", True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _device_of and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for at every operation: half of the time would go there
        if func.namespace == "prim":
            return func(*args, **kwargs)
        given = _tensors(args, kwargs)
        if func is _aten._local_scalar_dense.default:
            known = _known_value(func, args, kwargs, given)
            if known is not None:
                return known
        output = _grouped_output(func, args)
        if output is None:
            output = func(*args, **kwargs)
        if _is_short(output):  # of positions a model may make pairs, which are not computed to be dropped
            known = _known_value(func, args, kwargs, given)
            if known is not None:
                _remember(output, known)
        if not self.is_paused:
            made = _tensors(output)
            if made and not (func.is_view or func in _FREE):
                self._count(func, args, kwargs, given, made, output)
                if self._pairs is not None:
                    self._pairs.check(made)
            self._follow(given, made)
            tiled = _tiled_work(func, args, kwargs)
            if tiled is not None:
                self._take(tiled.scratch_bytes)
        return output

    def _take(self, nbytes: int) -> None:
        """Take note of memory that an operation has taken for itself while it ran."""
        self._sweep()
        self.peak_bytes = most(self.peak_bytes, self.live_bytes + nbytes)
        self.young_peak_bytes = most(self.young_peak_bytes, self._young_bytes + nbytes)

    def _follow(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        before = {tensor.untyped_storage()._cdata for tensor in given}
        for leaf in made:
            storage = leaf.untyped_storage()
            key = storage._cdata
            if key not in before or (key in self._live and self._live[key][1] != storage.nbytes()):
                self._forget(key)  # one that was freed at the same address, or another size of the same
                nbytes = self.storage_bytes(leaf)
                self._live[key] = (StorageWeakRef(storage), storage.nbytes(), nbytes)
                self._old.discard(key)
                self.live_bytes = self.live_bytes + nbytes
                self._young_bytes = self._young_bytes + nbytes
        if is_more(self.live_bytes, self.peak_bytes) or is_more(self._young_bytes, self.young_peak_bytes):
            self._sweep()  # of what is gone, some was still counted
            self.peak_bytes = most(self.peak_bytes, self.live_bytes)
            self.young_peak_bytes = most(self.young_peak_bytes, self._young_bytes)

    def _forget(self, key: int) -> None:
        held = self._live.pop(key, None)
        if held is not None:
            self.live_bytes = self.live_bytes - held[2]
            self._young_bytes = self._young_bytes - (0 if key in self._old else held[2])

    def _sweep(self) -> None:
        for key in [key for key, (reference, *_) in self._live.items() if reference.expired()]:
            self._forget(key)

    def _count(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[Tensor],
        made: list[Tensor],
        output: Any,
    ) -> None:
        moved: Any = 0.0
        work, is_own = work_of(func, args, kwargs, output, self.rows)
        if _is_attention(func) is not None:
            self.head_dim = max(self.head_dim, given[0].shape[-1])
            self.num_heads = max(self.num_heads, given[0].shape[1])
        if not is_own:
            if func._overloadpacket in _SOFTMAX:
                check_pairs(given)
            moved = 1.0 * sum(self.rows.of(touched_bytes(tensor)) for tensor in (*given, *made))
        kernels = self._fusion.num_kernels
        fused = self._fusion.add(func, given, made, is_own=is_own)
        self.cost = self.cost + replace(
            work,
            moved_bytes=moved,
            num_operations=1,
            fused_bytes=fused,
            num_kernels=self._fusion.num_kernels - kernels,
        )


_SOFTMAX = frozenset((_aten._softmax, _aten._safe_softmax))

_FREE = frozenset(
    (
        _aten.detach.default,
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
        _aten._reshape_alias.default,
        _aten._unsafe_view.default,
    )
)
"""Operations that neither read nor write."""


def _tensors(*values: Any) -> list[Tensor]:
    """List the strided tensors in arguments of an operation, which are nested in lists at most."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(*value)
        elif isinstance(value, dict):
            found += _tensors(*value.values())
    return found


_MASKS = ("attn_mask", "attn_bias", "bias")
"""Arguments of attention kernels."""


_OF_ATTENTION = ("scaled_dot_product", "_attention_", "flash_attn", "varlen_attn", "tiled_attention")
"""Parts of names of operations."""


@functools.cache
def _is_attention(func: Any) -> bool | None:
    """Whether an operation is an attention's backward (True) or forward (False); None: it is none."""
    name = func._schema.name.lower()
    if not any(part in name for part in _OF_ATTENTION):
        return None
    if "fused_sdp_choice" in name:
        return None
    return "backward" in name


def work_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, rows: Rows
) -> tuple[Cost, bool]:
    """Return the work of an operation in matrix products and in attention, and whether it is one of these.

    Raises:
        LongAttentionError: The mask of attention is of a long row's length squared.
    """
    tiled = _tiled_work(func, args, kwargs)
    if tiled is not None:
        flops, nbytes = (1.0 * rows.of(number) for number in (tiled.flops, tiled.moved_bytes))
        return Cost(attention_flops=flops, attention_bytes=nbytes), True
    counted = _attention_flops(func, args, kwargs)
    if counted is not None:
        number, share = counted
        return Cost(attention_flops=share * rows.of(number)), True
    if func._overloadpacket is _aten._grouped_mm:
        return Cost(matmul_flops=1.0 * rows.of(_grouped_flops(args[0], args[1], output))), True
    if func._overloadpacket in flop_registry:
        number = flop_registry[func._overloadpacket](*args, **kwargs, out_val=output)
        return Cost(matmul_flops=1.0 * rows.of(number)), True
    return Cost(), False


def _tiled_work(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work | None:
    """Return the work of attention by tiles; None: an operation is another one."""
    if func.namespace != NAMESPACE or _is_attention(func) is None:
        return None
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    given |= kwargs
    starts = given["starts"]
    known = None if starts is None else known_value(starts)
    assert starts is None or known is not None, "where documents begin is a real tensor"
    with torch._C._DisableTorchDispatch():  # places are read where other tensors are fake
        return Work(given, known, is_backward=bool(_is_attention(func)))


def _attention_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, float] | None:
    """Count an attention kernel's FLOPs without a mask, and the share of them that counts: causal half.

    None: the operation is none.

    With a mask, a kernel computes what it masks too.

    Raises:
        LongAttentionError: The mask is of a long row's length squared.
    """
    is_backward = _is_attention(func)
    if is_backward is None:
        return None
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    given |= kwargs
    if "cu_seq_q" in given:
        return _varlen_flops(given, is_backward=is_backward), 0.5
    check_pairs((given.get(name) for name in _MASKS), dims=2)
    shapes = [given[name].shape for name in ("query", "key", "value")]
    heads, groups = shapes[0][1], shapes[1][1]
    shapes[1:] = [torch.Size((s[0], heads, *s[2:])) if groups != heads else s for s in shapes[1:]]
    share = 0.5 if given.get("is_causal", False) else 1.0
    if is_backward:
        gradient = given.get("grad_out", given.get("grad_out_"))
        assert gradient is not None
        return int(sdpa_backward_flop_count(gradient.shape, *shapes)), share
    return int(sdpa_flop_count(*shapes)), share


def _varlen_flops(given: dict[str, Any], *, is_backward: bool) -> int:
    """Count attention within documents, all as long as the longest one; half of it is then left out."""
    (num_tokens, num_heads, head_dim), length = given["query"].shape, given["max_q"]
    left = (given.get("window_size") or [-1])[0]
    seen = length if left < 0 else min(length, 2 * (left + 1))
    num_products = 5 if is_backward else 2
    return int(2 * num_products * num_tokens * num_heads * head_dim * seen)


def _grouped_flops(left: Tensor, right: Tensor, output: Tensor) -> int:
    """Count the FLOPs of grouped products: of rows with a matrix each, or of two matrices' columns."""
    if left.ndim == right.ndim == 2:
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return 2 * output.numel() * left.shape[-1]


def _grouped_output(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """Make the output of a grouped product in fp32, of which torch has a kernel and no fake one."""
    if func is not _aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
        return None
    left, right, offsets = args[:3]
    if left.ndim == right.ndim == 2:
        return left.new_empty((len(offsets), left.shape[0], right.shape[1]))
    return left.new_empty((*left.shape[:-1], right.shape[-1]))


# -- integers beside fake ones ------------------------------------------------------------------------------


def _known_value(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    """Compute an operation on integers that are known; None: something that it reads is not."""
    if not all(known_value(tensor) is not None for tensor in tensors):
        return None
    if not tensors and not _makes_few_integers(func, args, kwargs):
        return None
    real_args, real_kwargs = tree_map_only(Tensor, known_value, (args, kwargs))
    with torch._C._DisableTorchDispatch():
        value = func(*real_args, **real_kwargs)
    return None if isinstance(value, Tensor) and value.is_floating_point() else value


def _is_short(output: Any) -> bool:
    """Whether an operation has made no tensor that is too large to compute it."""
    return all(tensor.numel() <= _SHADOW_ELEMENTS for tensor in _tensors(output))


def known_value(tensor: Tensor) -> Tensor | None:
    """Return the real tensor beside a fake one, if it is known."""
    value: Tensor | None = vars(tensor).get(_SHADOW)
    if value is None:  # a number or a list in the model's code
        value = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if value is None or value.is_floating_point() or value.device.type != "cpu":
        return None
    return value if value.numel() <= _SHADOW_ELEMENTS else None


def _makes_few_integers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func._overloadpacket is _aten.arange:
        bounds = [value for value in args if isinstance(value, (int, float))]
        is_short = all(isinstance(value, int) for value in bounds) and max(bounds) <= _SHADOW_ELEMENTS
        return is_short and kwargs.get("dtype") in (None, torch.int64, torch.int32)
    if func._overloadpacket in (_aten.zeros, _aten.ones, _aten.full):
        sizes = args[0]
        dtype = kwargs.get("dtype")
        is_short = torch.Size(sizes).numel() <= _SHADOW_ELEMENTS
        return is_short and dtype in (torch.int64, torch.int32, torch.bool)
    return False


def _remember(output: Any, value: Any) -> None:
    pairs = zip(tree_leaves(output), tree_leaves(value), strict=True)
    for leaf, known in pairs:
        if isinstance(leaf, Tensor):
            setattr(leaf, _SHADOW, known)
