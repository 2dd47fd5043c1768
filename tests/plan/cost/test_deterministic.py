"""What attention costs in a deterministic run: as FlashAttention-2 cuts it, where that is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.config.choice import StepBatch
from megatrain.hardware import load_machine
from megatrain.plan.cost.deterministic import copies_of_gradient, deterministic_spec, filled_share
from megatrain.plan.search.request import Request
from tests.plan.anatomies import Shape, llama_like


@pytest.mark.parametrize(
    ("multiprocessors", "heads", "copies", "share"),
    [
        (108, 32, 4, 128 / 216),  # 128 blocks in two waves of 108
        (132, 32, 5, 160 / 264),
        (132, 132, 1, 1.0),
        (82, 41, 2, 1.0),
        (132, 264, 1, 1.0),
        (132, 265, 1, 265 / 396),
    ],
)
def test_blocks_fill_the_device_once_for_each_head(
    multiprocessors: int, heads: int, copies: int, share: float
) -> None:
    assert copies_of_gradient(multiprocessors, heads) == copies
    assert filled_share(multiprocessors, heads) == pytest.approx(share)


def test_attention_slows_down_in_bf16_and_where_its_cost_is_known() -> None:
    h100, a100 = load_machine("h100"), load_machine("a100")
    slow = deterministic_spec(h100, 32)
    assert slow.attention_flops_per_s["bf16"] == pytest.approx(0.62 * 580e12)
    assert slow.attention_backward_flops_per_s["bf16"] == pytest.approx(0.62 * 520e12 * 160 / 264)
    assert slow.attention_backward_flops_per_s["bf16:64"] == pytest.approx(0.62 * 420e12 * 160 / 264)
    assert slow.attention_backward_flops_per_s["fp32"] == h100.attention_backward_flops_per_s["fp32"]
    assert deterministic_spec(a100, 32).attention_flops_per_s == a100.attention_flops_per_s
    backward = a100.attention_backward_flops_per_s["bf16"]
    assert deterministic_spec(a100, 32).attention_backward_flops_per_s["bf16"] == pytest.approx(
        backward * 128 / 216
    )
    unknown = load_machine("mi300x")
    assert deterministic_spec(unknown, 32) is unknown
    assert deterministic_spec(h100, 0) is h100


def test_a_request_prices_it_if_asked() -> None:
    anatomy = replace(
        llama_like(Shape(num_layers=2), micro_batch_size=2, seq_len=4096), num_heads=16, head_dim=128
    )
    request = Request(
        spec=replace(load_machine("h100"), launches_per_s=None),
        anatomy=anatomy,
        batch=StepBatch(micro_batch_size=2, seq_len=4096, num_micro_batches=1),
    )
    cost = anatomy.layers[0].backward
    plain, repeated = request.rates, replace(request, deterministic=True).rates
    attention_s = cost.attention_flops / 520e12
    slower_s = repeated.backward_s(cost) - plain.backward_s(cost)
    assert slower_s == pytest.approx(attention_s * (264 / 160 / 0.62 - 1), rel=1e-6)
