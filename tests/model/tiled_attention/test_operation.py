"""Attention by tiles against eager attention, and what nobody but it sees: its tiles."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatrain.model.profile.metering import Meter
from megatrain.model.selective import is_attention
from megatrain.model.tiled_attention import arithmetic, tiles
from megatrain.model.tiled_attention.arithmetic import Scores
from megatrain.model.tiled_attention.operation import Work, attend
from megatrain.model.tiled_attention.tiles import View, documents
from tests.reference import assert_same_bits

TOKENS = 300


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call of attention, of two rows."""

    heads: int = 4
    of_keys: int = 2
    size: int = 16
    value_size: int = 16
    queries: int = TOKENS
    keys: int = TOKENS
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    is_packed: bool = False
    is_padded: bool = False
    is_causal: bool = True

    @property
    def lengths(self) -> list[list[int]]:
        """Return the lengths of each row's documents."""
        return [[100, 1, 192, 7], [150, 150]] if self.is_packed else [[self.keys], [self.keys]]

    @cached_property
    def starts(self) -> Tensor | None:
        lengths = [length for row in self.lengths for length in row]
        return torch.tensor([0, *lengths]).cumsum(0) if self.is_packed else None

    @property
    def present(self) -> Tensor | None:
        present = torch.ones(2, self.keys, dtype=torch.bool)
        present[1, -37:] = False
        present[0, :5] = False
        return present if self.is_padded else None

    def inputs(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
        """Draw queries, keys, values, and sinks."""
        torch.manual_seed(seed)
        shapes = (
            (self.heads, self.queries, self.size),
            (self.of_keys, self.keys, self.size),
            (self.of_keys, self.keys, self.value_size),
        )
        drawn = [torch.randn(2, tokens, heads, size).transpose(1, 2) for heads, tokens, size in shapes]
        drawn += [torch.randn(self.heads)] * self.has_sinks
        return [each.to(dtype).requires_grad_() for each in drawn]

    def ours(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        output, _ = attend(
            query,
            key,
            value,
            sinks,
            self.starts,
            self.present,
            self.size**-0.5,
            self.softcap,
            self.window,
            self.is_causal,
        )
        return output

    def eager(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend as the models of transformers do in eager mode."""
        key, value = (each.repeat_interleave(self.heads // self.of_keys, dim=1) for each in (key, value))
        scores = query @ key.transpose(-1, -2) * self.size**-0.5
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(~self.seen(), torch.finfo(scores.dtype).min)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
        weights = torch.softmax(scores.to(torch.promote_types(scores.dtype, torch.float32)), dim=-1)
        weights = weights[..., : self.keys].to(value.dtype)
        return (weights @ value).transpose(1, 2)

    def seen(self) -> Tensor:
        """Return which keys each query sees, (B, 1, T, S)."""
        places = torch.arange(self.keys)
        behind = places[-self.queries :, None] - places
        seen = torch.ones(2, 1, self.queries, self.keys, dtype=torch.bool)
        if self.is_causal:
            seen &= behind >= 0
        if self.window is not None:
            seen &= behind < self.window
        if self.is_packed:
            numbers = torch.stack(
                [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in self.lengths]
            )
            seen &= numbers[:, None, :, None] == numbers[:, None, None, :]
        if self.present is not None:
            seen &= self.present[:, None, None, :]
        return seen


def results(attention: Any, inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    """Return what an attention gives where it counts, and the gradients of what it is given."""
    output = attention(*inputs)
    return [output.detach() * (weights != 0), *torch.autograd.grad(output, inputs, weights.to(output.dtype))]


def differences(case: Case, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Return how far ours and eager attention are from eager attention in fp64, relatively."""
    inputs = case.inputs(dtype)
    weights = torch.randn(2, case.queries, case.heads, case.value_size)
    if case.present is not None:  # what a token gives that sees nothing counts for nobody
        weights *= case.seen().any(-1)[:, 0, :, None, None]
    exact = results(case.eager, [each.detach().double().requires_grad_() for each in inputs], weights)
    found = [results(attention, inputs, weights) for attention in (case.ours, case.eager)]
    return [
        (float((ours - e).norm() / e.norm()), float((eager - e).norm() / e.norm()))
        for ours, eager, e in zip(*found, exact, strict=True)
    ]


CASES = [
    *(
        Case(window=window, softcap=softcap, has_sinks=has_sinks, is_packed=is_packed)
        for window in (None, 20)
        for softcap in (None, 5.0)
        for has_sinks in (False, True)
        for is_packed in (False, True)
    ),
    Case(size=24, value_size=16, of_keys=4),
    Case(of_keys=1, window=400),
    Case(queries=7, window=50, softcap=2.0),
    Case(queries=1, has_sinks=True),
    Case(is_causal=False),
    Case(is_padded=True),
    Case(is_padded=True, window=33, has_sinks=True),
]


@pytest.fixture(params=[512, 64])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let tiles have so many tokens, and few heads be there at once."""
    monkeypatch.setattr(tiles, "_TILE", request.param)
    monkeypatch.setattr(tiles, "_LEAST_TILE", 16)
    monkeypatch.setattr(tiles, "_SCORES", 2 * request.param**2)
    return int(request.param)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_gives_what_eager_attention_gives(case: Case, small: int) -> None:
    """The worst in fp32 is 7e-7, where eager attention has 9e-7; in bf16 it has half of that one's error.

    The gradient of sinks is a sum of terms that nearly cancel, and of few numbers.
    """
    for ours, _ in differences(case, torch.float32):
        assert ours < 2e-6
    *found, last = differences(case, torch.bfloat16)
    for ours, eager in found if case.has_sinks else [*found, last]:
        assert ours <= 1.05 * eager
        assert ours < 3e-3
    assert last[0] < 1e-2


def rounded_product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply as on CUDA: weights and their gradients are rounded to bf16 too, and sums are in fp32."""
    assert torch.bfloat16 in (left.dtype, right.dtype)
    return left.bfloat16().float() @ right.bfloat16().float()


@pytest.mark.parametrize("case", [Case(), Case(has_sinks=True, softcap=4.0, window=50, is_packed=True)])
def test_products_of_an_accelerator_are_near_enough(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """They round weights to bf16, as flash attention does. Products themselves have never run there."""
    with FakeTensorMode(), DispatchedTo() as operations:
        narrow, wide = (torch.empty(2, 8, 8, device="cuda", dtype=d) for d in (torch.bfloat16, torch.float32))
        made = [arithmetic.product(*pair) for pair in ((narrow, narrow), (wide, narrow), (wide, wide))]
    assert {each.dtype for each in made} == {torch.float32}
    assert operations.products == ["bmm.dtype", "bmm.dtype", "bmm.default"]
    monkeypatch.setattr(arithmetic, "product", rounded_product)
    found = differences(case, torch.bfloat16)
    for ours, eager in found[:4]:
        assert ours <= 1.05 * eager
        assert ours < 4e-3


class DispatchedTo(TorchDispatchMode):
    """Notes the products that run."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.bmm:
            assert len({each.dtype for each in args[:2]}) == 1
            self.products.append(f"bmm.{func._overloadname}")
        return func(*args, **(kwargs or {}))


def test_gradients_are_those_of_the_function_itself() -> None:
    case = Case(heads=2, of_keys=1, size=3, value_size=2, queries=20, keys=20, window=7, softcap=1.5)
    inputs = [each.detach().double().requires_grad_() for each in (*case.inputs(), torch.randn(2))]
    assert torch.autograd.gradcheck(case.ours, inputs, atol=1e-7)


@pytest.mark.parametrize("case", [Case(), Case(has_sinks=True, softcap=3.0), Case(is_packed=True, window=9)])
def test_torch_finds_it_to_be_a_whole_operation(case: Case) -> None:
    """Its schema, its fake form, its autograd and their form under a compiler."""
    query, key, value, *sinks = case.inputs()
    settings = (case.size**-0.5, case.softcap, case.window, True)
    given = (query, key, value, sinks[0] if sinks else None, case.starts, None, *settings)
    torch.library.opcheck(attend, given)
    assert is_attention(torch.ops.megatrain.tiled_attention.default)
    assert not is_attention(torch.ops.megatrain.tiled_attention_backward.default)


def by_groups(case: Case, inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    """Return the results of each head of keys by itself, in one."""
    number = case.heads // case.of_keys
    found: list[list[Tensor]] = []
    for head in range(case.of_keys):
        own, of_keys = slice(head * number, (head + 1) * number), slice(head, head + 1)
        cut = [each[own] if n == 3 else each[:, own if n == 0 else of_keys] for n, each in enumerate(inputs)]
        leaves = [each.detach().requires_grad_() for each in cut]
        found.append(results(case.ours, leaves, weights[:, :, own]))
    dims = (2, 1, 1, 1, 0)
    return [torch.cat(each, dim=dim) for each, dim in zip(zip(*found, strict=True), dims, strict=False)]


@pytest.mark.parametrize(
    "case",
    [Case(heads=8, of_keys=4, has_sinks=True), Case(heads=6, of_keys=1), Case(is_packed=True, window=40)],
)
def test_heads_have_the_same_bits_together_and_in_groups(case: Case, small: int) -> None:
    inputs, weights = case.inputs(), torch.randn(2, TOKENS, case.heads, case.value_size)
    names = ("output", "queries", "keys", "values", "sinks")
    together, apart = results(case.ours, inputs, weights), by_groups(case, inputs, weights)
    for name, one, other in zip(names, together, apart, strict=False):
        assert_same_bits(one, other, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 40])
def test_a_document_has_the_bits_that_it_has_alone(
    dtype: torch.dtype, window: int | None, small: int
) -> None:
    case, alone = Case(is_packed=True, window=window), Case(window=window)
    inputs, weights = case.inputs(dtype), torch.randn(2, TOKENS, case.heads, case.value_size)
    output, *gradients = results(case.ours, inputs, weights)
    for row, lengths in enumerate(case.lengths):
        for end, length in zip(itertools.accumulate(lengths), lengths, strict=True):
            place = slice(row, row + 1), slice(end - length, end)
            own = [each[place[0], :, place[1]].detach().requires_grad_() for each in inputs]
            found, *others = results(alone.ours, own, weights[place])
            assert_same_bits(found, output[place], "output")
            for one, other in zip(others, gradients, strict=True):
                assert_same_bits(one, other[place[0], :, place[1]], "gradient")


# -- tiles --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 16, 100, 4000])
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (1, 300), (77, 300), (1000, 1000)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_tiles_are_all_that_is_seen_and_no_tile_is_seen_by_none(
    queries: int, keys: int, window: int | None, is_causal: bool, small: int
) -> None:
    if not is_causal and window is not None:
        return
    view = View(queries, keys, is_causal=is_causal, window=window)
    behind = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    seen = (behind >= 0) | (not is_causal)
    if window is not None:
        seen &= behind < window
    passed = torch.zeros_like(seen)
    for one in view.queries():
        for other in view.keys(one):
            part = seen[one, other]
            assert part.shape[0] <= small
            assert part.shape[1] <= small
            assert part.any()
            assert not passed[one, other].any()
            assert view.is_whole(one, other) == bool(part.all())
            passed[one, other] = True
    assert not (seen & ~passed).any()
    assert view.num_scores == int(passed.sum())


def test_work_is_linear_in_the_length_of_rows_with_a_window() -> None:
    numbers = [View(n, n, is_causal=True, window=128).num_scores for n in (1 << 14, 1 << 15, 1 << 20)]
    assert [number / numbers[0] for number in numbers] == pytest.approx([1, 2, 64], rel=0.02)
    assert numbers[0] == 128 * (128 + (2**14 // 128 - 1) * 255)
    whole = View(1 << 14, 1 << 14, is_causal=True).num_scores
    assert whole == (1 << 14) * (1 << 14) // 2 + (1 << 14) * 512 // 2


def test_documents_of_rows() -> None:
    found = [(each.row, each.begin, each.end) for each in documents(2, 10, [0, 4, 10, 10, 13, 20, 20])]
    assert found == [(0, 0, 4), (0, 4, 10), (1, 0, 3), (1, 3, 10)]
    assert [(each.row, each.end) for each in documents(2, 10, None)] == [(0, 10), (1, 10)]


class Inside(TorchDispatchMode):
    """Sees the operations inside of attention, and how many elements its tensors have at most."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self.most = max([self.most, *(leaf.untyped_storage().nbytes() // leaf.itemsize for leaf in made)])
        return output


def test_no_tensor_is_of_pairs_of_tokens() -> None:
    """Seen where the arithmetic runs bare, since nobody sees into the operation."""
    tokens = 4096
    query, key, value = (torch.randn(1, 2, tokens, 4) for _ in range(3))
    scores = Scores(0.5, 2.0, is_causal=True, window=None)
    with Inside() as inside, torch.no_grad():
        output, sums = arithmetic.forward(query, key, value, None, None, None, scores)
        given = torch.ones_like(output)
        arithmetic.backward(query, key, value, None, None, None, output, sums, given, scores)
    assert inside.most == 2 * 512 * 512 < tokens * tokens / 16


# -- what it costs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [Case(), Case(window=20, softcap=2.0), Case(is_packed=True), Case(value_size=8)]
)
def test_its_work_is_counted_over_its_tiles(case: Case) -> None:
    scores, starts = 0, case.starts
    for row in case.lengths:
        for length in row:
            scores += case.heads * View(length, length, is_causal=True, window=case.window).num_scores
    assert (starts is not None) == case.is_packed, "which is real where others are fake"
    with FakeTensorMode(allow_non_fake_inputs=True), Meter() as meter:
        query, key, value = (
            torch.empty(2, heads, TOKENS, size, requires_grad=True)
            for heads, size in ((case.heads, 16), (case.of_keys, 16), (case.of_keys, case.value_size))
        )
        before = meter.settle()
        output = case.ours(query, key, value)
        forward = meter.cost
        kept = meter.live_bytes - before
        most = meter.peak_bytes - before
        output.sum().backward()
        backward = meter.cost - forward
    sizes = 16, case.value_size
    assert forward.attention_flops == 2 * scores * sum(sizes)
    assert backward.attention_flops == 2 * scores * (3 * sizes[0] + 2 * sizes[1])
    passes = (10, 19) if case.softcap is None else (16, 28)
    assert (forward.attention_bytes, backward.attention_bytes) == tuple(4 * scores * n for n in passes)
    assert kept == 4 * 2 * TOKENS * case.heads * (case.value_size + 1), "its output and its log-sum-exp"
    given = {"query": query, "key": key, "value": value, "is_causal": True}
    work = Work({**given, "window": case.window, "softcap": case.softcap}, starts, is_backward=False)
    assert most - kept == work.scratch_bytes


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(heads=8, queries=1200, keys=1200), torch.float32),
        (Case(heads=8, queries=1200, keys=1200, has_sinks=True, softcap=2.0), torch.bfloat16),
        (Case(heads=8, of_keys=8, value_size=8, queries=1200, keys=1200, window=100), torch.float32),
        (Case(heads=64, of_keys=8, size=8, value_size=8, queries=600, keys=600), torch.bfloat16),
        (Case(is_packed=True), torch.float32),
    ],
    ids=str,
)
def test_the_memory_that_it_says_is_what_it_takes(case: Case, dtype: torch.dtype, is_backward: bool) -> None:
    query, key, value, *rest = (each.detach() for each in case.inputs(dtype))
    sinks, starts = rest[0] if rest else None, case.starts
    places = None if starts is None else starts.tolist()
    scores = Scores(case.size**-0.5, case.softcap, is_causal=True, window=case.window)
    given = query, key, value, sinks, places, None
    output, sums = arithmetic.forward(*given, scores)
    gradient = torch.ones_like(output)
    with Meter() as meter, torch.no_grad():
        before = meter.settle()
        found: Sequence[Tensor] = (
            arithmetic.backward(*given, output, sums, gradient, scores)
            if is_backward
            else arithmetic.forward(*given, scores)
        )
        taken = meter.peak_bytes - before - meter.bytes_of(found)
    named = {"query": query, "key": key, "value": value, "is_causal": True}
    named |= {"window": case.window, "softcap": case.softcap}
    said = Work(named, starts, is_backward=is_backward).scratch_bytes
    assert taken <= said < 1.6 * taken
