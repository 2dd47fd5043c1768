"""Attention on the test device: torch's math by default, and a fused kernel with a backward of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatrain.config.policies import POLICIES
from tests.host_device.device import TYPE, register
from tests.stream.runs import check_parity, recorded

host = register()


@pytest.fixture
def fused() -> Iterator[None]:
    """Let torch choose the fused kernel, for the resident runs too."""
    recorded.cache_clear()
    host.native.fuse_attention(True)
    yield
    host.native.fuse_attention(False)
    recorded.cache_clear()


def attend(device: str, *, bias: torch.Tensor | None, **settings: Any) -> list[torch.Tensor]:
    """Return the output of attention with grouped heads, and the gradients of what goes in."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))
    inputs: list[Any] = [
        torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes
    ]
    if bias is not None:
        inputs.append(bias.to(device).detach().requires_grad_(bias.is_floating_point()))
    query, key, value, mask = [*inputs, None][:4]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=True, **settings
    )
    out.backward(torch.randn(out.shape, generator=generator).to(device))
    gradients = [tensor.grad for tensor in inputs if tensor.requires_grad]
    return [tensor.cpu() for tensor in (out.detach(), *gradients) if tensor is not None]


BIASES = {
    "no mask": None,
    "bias": torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(2)),
    "a row in which all is masked": torch.ones(6, 6, dtype=torch.bool).tril(-1),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", BIASES)
def test_fused_attention_computes_what_math_does(fused: None, name: str, is_causal: bool) -> None:
    if is_causal and BIASES[name] is not None:
        return
    expected = attend("cpu", bias=BIASES[name], is_causal=is_causal)
    assert "fused attention" not in host.native.take_counts()
    actual = attend(TYPE, bias=BIASES[name], is_causal=is_causal)
    counts = host.native.take_counts()
    assert (counts["fused attention"], counts["fused attention backward"]) == (1, 1)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_the_fused_backward_drops_what_its_forward_dropped(fused: None) -> None:
    """With equal weights and every value 1, a row's output counts what was kept, and so does the gradient."""
    query = torch.zeros(1, 1, 64, 8, device=TYPE)
    value = torch.ones(1, 1, 64, 8, device=TYPE, requires_grad=True)
    torch.manual_seed(3)
    out = torch.nn.functional.scaled_dot_product_attention(query, query, value, dropout_p=0.5)
    torch.rand(3, device=TYPE)
    out.sum().backward()
    assert value.grad is not None
    kept = out.detach().cpu()[..., 0] * 32  # of 64 weights in each row, all equal
    torch.testing.assert_close(kept, kept.round())
    assert len(kept.unique()) > 5
    torch.testing.assert_close(value.grad[..., 0].sum().cpu() * 32, kept.sum())


def test_math_is_the_default() -> None:
    attend(TYPE, bias=None, is_causal=True)
    assert "fused attention" not in host.native.take_counts()


@pytest.mark.parametrize(
    ("family", "activations"),
    [
        pytest.param(
            family,
            policy,
            marks=[] if family == "gpt2" and POLICIES[policy].keeps_results else pytest.mark.parity,
        )
        for family in ("gpt2", "llama_tied", "gemma3_text", "mixtral")
        for policy in POLICIES
    ],
)
def test_fused_attention_equals_resident(fused: None, family: str, activations: str) -> None:
    host.native.delay(6, 0.1, 3e-4, 1e-4)
    check_parity(
        family,
        device=TYPE,
        activations=activations,
        num_micro_batches=2,
        lockstep=2,
        dropout=True,
        padded=True,
    )
    assert host.native.take_counts()["fused attention backward"] > 0
