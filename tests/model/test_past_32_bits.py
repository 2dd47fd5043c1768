"""Tokens times vocabulary pass 2^31 at 16,000 tokens: nothing numbers elements in 32 bits."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

import megatrain
from megatrain.model.head import linear
from megatrain.model.head.form import Form
from megatrain.model.head.head import LOGITS_BYTES, chunk_tokens_of
from megatrain.model.head.linear import LinearHead
from tests.optim.interpreter import interpreted_on_cpu

PACKAGE = Path(megatrain.__file__).parent


def narrow_programs(source: str) -> list[int]:
    """Return the lines in which a Triton program's number is used before it has 64 bits."""
    tree = ast.parse(source)
    wide = {
        node.func.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to"
        if [ast.unparse(argument) for argument in node.args] == ["tl.int64"]
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.program_id" and node not in wide
    ]


def test_every_triton_program_numbers_its_elements_in_64_bits() -> None:
    """A program's number and a size are 32 bits, and so is their product."""
    assert narrow_programs("row = tl.program_id(0) * size") == [1]
    kernels = [path for path in PACKAGE.rglob("*.py") if "@triton.jit" in path.read_text()]
    assert len(kernels) >= 3
    for path in kernels:
        source = path.read_text()
        assert "tl.program_id" in source
        assert narrow_programs(source) == [], path


def test_the_kernel_finds_a_row_behind_2_to_the_31_elements() -> None:
    """Of memory that nobody else touches: the row's, of 4 GiB that are addresses alone."""
    with interpreted_on_cpu() as _:
        builder = pytest.importorskip("triton.runtime.interpreter").InterpreterBuilder
        from megatrain.model.head import cross_entropy_kernel

        row, size = 1 << 16, 32_784
        assert row * size > 1 << 31
        logits = torch.empty((row + 1, size), dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(0)
        last = torch.randn(size, generator=generator).bfloat16()
        logits[row] = last
        targets, losses = torch.zeros(row + 1, dtype=torch.int64), torch.zeros(row + 1)
        targets[row] = 7
        number = builder.create_get_program_id

        def of_last(self: object, axis: int) -> object:
            found = number(self, axis)
            found.data = found.data + np.int32(row)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(builder, "create_get_program_id", of_last)
            cross_entropy_kernel.cross_entropy[(1,)](
                logits,
                targets,
                losses,
                torch.tensor(0.5),
                size,
                1.0,
                1.0,
                IGNORED=-100,
                HAS_CAP=False,
                BLOCK=1 << 14,
            )
        leaf = last.float().requires_grad_()
        loss = nn.functional.cross_entropy(leaf[None], torch.tensor([7]))
        (gradient,) = torch.autograd.grad(loss, leaf, torch.tensor(0.5))
        assert float(losses[row]) == pytest.approx(loss.item(), rel=1e-5)
        assert (losses[:row] == 0).all()
        torch.testing.assert_close(logits[row], gradient.bfloat16(), rtol=2**-7, atol=1e-9)


class Largest(TorchDispatchMode):
    """Notes the most elements in fp32 of a tensor that an operation has made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 and not func.is_view:
                self.numel = max(self.numel, leaf.numel())
        return made


def test_logits_of_more_than_2_to_the_31_elements_are_taken_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without memory: a chunk of 20,000 tokens, whose logits are held once and never whole in fp32."""
    monkeypatch.setattr(linear, "runs_kernel", lambda _: False)
    monkeypatch.setattr(linear, "_PIECE_NUMEL", 1 << 27)
    tokens, vocab, width = 20_000, 128_256, 64
    assert tokens * vocab > 1 << 31
    with torch.device("meta"), torch.no_grad(), Largest() as largest:
        head = LinearHead(nn.Linear(width, vocab, bias=False, dtype=torch.bfloat16), Form())
        hidden = torch.empty((tokens, width), dtype=torch.bfloat16)
        targets = torch.empty(tokens, dtype=torch.int64)
        sums: list[Tensor | None] = [None]
        loss, gradient = head.gradients(hidden, targets, tokens, None, [head.linear.weight], sums)
    assert (loss.shape, gradient.shape) == ((), (tokens, width))
    assert sums[0] is not None
    assert (sums[0].shape, sums[0].dtype) == ((vocab, width), torch.float32)
    assert vocab * width <= largest.numel <= max(linear._PIECE_NUMEL, vocab * width)


@pytest.mark.parametrize("vocab", [32_000, 128_256, 151_936, 262_144, 1 << 20])
def test_an_automatic_chunk_is_far_below_2_to_the_31_logits(vocab: int) -> None:
    tokens = chunk_tokens_of(LlamaConfig(vocab_size=vocab))
    assert tokens >= 1
    assert tokens * vocab <= max(LOGITS_BYTES // 4, 256 * vocab) < 1 << 31
