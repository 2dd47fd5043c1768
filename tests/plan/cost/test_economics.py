"""Days, money, energy and wear, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.config.choice import StepBatch
from megatrain.config.optimizers import adamw
from megatrain.config.plan import Plan
from megatrain.hardware import Drives
from megatrain.plan.cost.economics import economics, hourly_price, machine_watts
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.request import Request
from tests.plan.anatomies import Shape, llama_like, machine

DRIVES = Drives(nbytes=10**12, read_bytes_per_s=6e9, write_bytes_per_s=2e9, rated_bytes_written=6e14)
SPEC = replace(machine(drives=DRIVES), price_usd=35_000.0)
ANATOMY = llama_like(Shape())


@pytest.fixture(scope="module")
def plan() -> Plan:
    batch = StepBatch(micro_batch_size=1, seq_len=1024, num_micro_batches=2)
    made = make_plan(Request(spec=SPEC, anatomy=ANATOMY, batch=batch), budget=1)
    written = {**made.bytes_per_step, "drive_written": 4 * 10**9}
    return replace(made, step_s=8.0, bytes_per_step=written)


def test_sums_of_a_budget(plan: Plan) -> None:
    money = economics(plan, SPEC, ANATOMY, tokens=2_048_001, price_per_hour_usd=3.6)
    assert money.steps == 1001
    assert money.days == pytest.approx(1001 * 8 / 86400)
    assert money.usd == pytest.approx(1001 * 8 / 1000)
    assert money.usd_per_million_tokens == pytest.approx(8e-3 / 2048 * 1e6)
    assert money.kwh == pytest.approx(0.5 * 1001 * 8 / 3600)
    assert money.checkpoint_bytes == 12 * ANATOMY.num_params
    assert money.checkpoint_s == pytest.approx(money.checkpoint_bytes / 2e9)
    assert money.drive_written == 1001 * 4e9
    assert money.drive_written_per_day == pytest.approx(4e9 * 86400 / 8)
    assert money.drive_days == pytest.approx(6e14 / (4e9 * 10800))


def test_a_checkpoint_takes_what_its_optimizer_keeps(plan: Plan) -> None:
    plain, small = (
        economics(plan, SPEC, ANATOMY, tokens=1, optimizer=each).checkpoint_bytes
        for each in (adamw.FP32, adamw.BF16)
    )
    assert plain - small == 4 * ANATOMY.num_trained


def test_what_is_not_known_is_none(plan: Plan) -> None:
    spec = replace(SPEC, drives=None, price_usd=None, device_watts=None)
    money = economics(plan, spec, ANATOMY, tokens=1)
    assert (money.usd, money.kwh, money.checkpoint_s, money.drive_days) == (None, None, None, None)
    assert money.steps == 1


def test_price_is_given_or_rent_or_amortised() -> None:
    rented = replace(SPEC, price_per_hour_usd=3.5)
    assert hourly_price(rented, 2.0) == (2.0, "as given")
    assert hourly_price(rented, None)[0] == 3.5
    price, source = hourly_price(SPEC, None)
    assert price == pytest.approx(35_000 / (3 * 365 * 24))
    assert "$35,000 over 3 years" in source


def test_a_host_that_computes_draws_what_the_host_draws() -> None:
    assert machine_watts(replace(SPEC, device="cpu", device_watts=None)) == 100.0
    assert machine_watts(SPEC) == 500.0
