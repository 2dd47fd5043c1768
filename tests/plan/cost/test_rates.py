"""Seconds of work at the rates of a machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.config.optimizers import adamw
from megatrain.config.optimizers.registry import find
from megatrain.config.policies import RECOMPUTE_CHEAP
from megatrain.layout.block_bytes import BlockBytes
from megatrain.model.profile.cost import Cost
from megatrain.plan.cost.rates import Kernels, Rates, other_rates
from tests.plan.anatomies import machine

SPEC = replace(
    machine(flops=1e12),  # attention at half of the rate, 1e10 bytes per second
    attention_flops_per_s={"bf16": 5e11, "fp32": 1e11, "bf16:64": 2.5e11},
    attention_backward_flops_per_s={"bf16": 4e11, "fp32": 1e11},
)
COST = Cost(
    matmul_flops=2e12,
    attention_flops=1e12,
    moved_bytes=3e10,
    num_operations=50,
    fused_bytes=1e10,
    num_kernels=10,
)


def test_passes_cost_products_attention_and_bytes() -> None:
    rates = Rates(SPEC, "bf16")
    assert rates.forward_s(COST) == pytest.approx(2 + 2 + 3)
    assert rates.backward_s(COST) == pytest.approx(2 + 2.5 + 3)
    assert rates.forward_s(COST.again(RECOMPUTE_CHEAP)) == pytest.approx(3), "what it makes again"


def test_fused_kernels_move_what_fusion_leaves() -> None:
    rates = Rates(SPEC, "bf16", kernels=Kernels(fuses_layers=True))
    assert rates.forward_s(COST) == pytest.approx(2 + 2 + 1)
    assert rates.head_s(COST) == pytest.approx(2 + 2 + 3), "head and loss are not compiled"
    assert Rates(SPEC, "bf16", kernels=Kernels(fuses_head=True)).head_s(COST) == pytest.approx(5)


def test_heads_of_another_size_have_their_own_rate() -> None:
    assert Rates(SPEC, "bf16", head_dim=64).forward_s(COST) == pytest.approx(2 + 4 + 3)
    assert Rates(SPEC, "bf16", head_dim=96).forward_s(COST) == pytest.approx(2 + 2 + 3), "not named: as 128"


def test_a_pass_takes_no_less_than_its_launches() -> None:
    spec = replace(SPEC, launches_per_s=5.0)
    assert Rates(spec, "bf16").forward_s(COST) == pytest.approx(50 / 5)
    assert Rates(spec, "bf16", kernels=Kernels(fuses_layers=True)).forward_s(COST) == pytest.approx(5)


@pytest.mark.parametrize(("moments", "nbytes"), [("fp32", 26), ("bf16", 18), ("int8", 14.0625)])
def test_updates_run_at_the_rate_of_their_moments(moments: str, nbytes: float) -> None:
    """A hundred parameters; compressed moments have a rate of their own where one is known."""
    spec = replace(machine(update_rate=100.0), compressed_params_per_s={"bf16": 63.0, "int8": 34.0})
    rates = Rates(spec, "bf16", find("adamw", moments))
    taken_s = {"fp32": 1.0, "bf16": 100 / 63, "int8": 100 / 34}[moments]
    assert rates.update_s(100 * nbytes) == pytest.approx(taken_s)
    unknown = Rates(replace(spec, compressed_params_per_s={}), "bf16", find("adamw", moments))
    share = {"fp32": 1.0, "bf16": 0.63, "int8": 0.34}[moments]
    assert unknown.update_s(100 * nbytes) == pytest.approx(1 / share), "as two cores were measured"
    by_bytes = replace(spec, compressed_params_per_s=other_rates(26 * 100.0))
    rates = Rates(by_bytes, "bf16", find("adamw", moments))
    assert rates.update_s(100 * nbytes) == pytest.approx(nbytes / 26), "as many bytes per second"


def test_an_update_on_the_device_takes_its_memory_s_time_and_a_cpu_s_the_host_s() -> None:
    params = 10**6 * 256
    sizes = BlockBytes(num_split=params, num_state=params, num_scales=10**6)
    a_pass_s = params / SPEC.device_bytes_per_s
    for moments, nbytes in ((adamw.FP32, 28), (adamw.BF16, 20), (adamw.INT8, 16.0625)):
        assert Rates(SPEC, "bf16", moments).device_update_s(sizes) == pytest.approx(nbytes * a_pass_s)
        unfused = Rates(replace(SPEC, fuses_updates=False), "bf16", moments)
        assert unfused.device_update_s(sizes) == pytest.approx(650 * a_pass_s)
    rivals = Rates(SPEC, "bf16", kernels=Kernels(device_update_bytes=30))
    assert rivals.device_update_s(sizes) == pytest.approx(30 * a_pass_s)
    emulated = Rates(replace(SPEC, device="emulated"), "bf16")
    assert emulated.device_update_s(sizes) == pytest.approx(26 * a_pass_s)
    on_cpu = Rates(replace(SPEC, device="cpu"), "bf16")
    assert on_cpu.device_update_s(sizes) == pytest.approx(on_cpu.update_s(26 * params))
    assert on_cpu.update_s(26 * params) != pytest.approx(26 * a_pass_s)
