"""Plans for several GPUs and nodes: what a rank is asked for, what is refused, and the table of sizes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatrain.config import build_config
from megatrain.config.choice import Choice, StepBatch
from megatrain.errors import ConfigError
from megatrain.hardware import HardwareSpec, load_machine
from megatrain.plan.cost.economics import economics
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.request import Request
from megatrain.train.planning.asking import Asked
from megatrain.train.planning.gpus import of_ranks, with_gpus
from megatrain.train.planning.scale import Scaling, scale, scale_json, scale_report, sizes
from tests.plan.anatomies import Shape, llama_like, machine

ANATOMY = llama_like(Shape(num_layers=6, hidden=512, inner=2048, vocab=4096))
NODE = replace(
    machine(device_bytes=2 << 30, host_bytes=16 << 30, update_rate=1e8, flops=2e13, link=1e10),
    num_gpus=4,
    peer_bytes_per_s=1e11,
    network_bytes_per_s=1e10,
    price_per_hour_usd=2.0,
)
CHOICE = Choice(
    activations=("recompute",) * 6,
    boundaries="device",
    fragments=False,
    lockstep=8,
    num_slots=2,
    num_gradient_buffers=2,
    outer_resident=False,
    outer_streams=False,
)
"""Little is left to choose, so that a plan takes no time."""
BATCH = StepBatch(micro_batch_size=1, seq_len=1024, num_micro_batches=8)


def request(spec: HardwareSpec = NODE, count: int = 1) -> Request:
    batch = replace(BATCH, num_micro_batches=8 * count, num_runs=count)
    return Request(spec=spec, anatomy=ANATOMY, batch=batch, choice=CHOICE)


def test_a_rank_is_asked_for_its_part_and_knows_the_others() -> None:
    found = of_ranks(request(NODE.with_ranks(4, 2), 8), 8, 2)
    batch = found.batch
    assert (batch.num_micro_batches, batch.num_runs, batch.num_ranks, batch.num_nodes) == (8, 1, 8, 2)
    assert batch.gathers
    assert batch.step_tokens == 8 * 8 * 1024
    assert found.rates.update_bytes_per_s == request(NODE.with_ranks(1)).rates.update_bytes_per_s / 4
    assert not of_ranks(request(replace(NODE, peer_bytes_per_s=None), 4), 4).batch.gathers
    plan = make_plan(found)
    assert plan.fits
    assert plan.tokens_per_s == pytest.approx(batch.step_tokens / plan.step_s)
    moved = plan.bytes_per_step
    assert moved["exchanged"] > 0
    assert moved["spread"] > 0
    # each of four ranks fetches a quarter of what it uses, but for what is left over
    assert moved["gathered"] == pytest.approx(3 * moved["fetched"], rel=0.01)


def test_money_is_of_all_nodes_and_steps_of_all_ranks() -> None:
    asked = of_ranks(request(NODE.with_ranks(4, 2), 8), 8, 2)
    plan = make_plan(asked)
    found = economics(plan, asked.spec, ANATOMY, tokens=10 * plan.batch.step_tokens)
    assert (found.steps, found.usd_per_hour) == (10, 4.0)
    watts = 2 * (4 * 400.0 + 100.0)
    assert found.kwh == pytest.approx(watts * 10 * plan.step_s / 3.6e6)


@pytest.mark.parametrize(
    ("name", "gpus", "nodes", "part"),
    [
        ("8xh100", 16, None, "--gpus is 16, but 8xh100 has 8; use at most that"),
        ("h100", None, 2, "--nodes is 2, but nothing is known of a network of h100"),
        ("8xh100", 3, None, "--gpus is 3; use a power of two, such as 2 or 4"),
        ("cpu-laptop", 2, None, "on cpu-laptop the host computes"),
    ],
)
def test_what_a_machine_does_not_have_is_refused(
    name: str, gpus: int | None, nodes: int | None, part: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        with_gpus(load_machine(name), gpus, nodes)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_given_is_what_the_machine_has() -> None:
    assert with_gpus(load_machine("8xh100"), None, 4).num_ranks == 32
    assert with_gpus(load_machine("2xdgx-spark"), None, None).num_nodes == 2
    assert with_gpus(load_machine("cpu-laptop"), 1, 1).num_ranks == 1


def test_a_table_goes_to_1024_gpus_where_there_is_a_network() -> None:
    assert list(sizes(load_machine("8xh100"))) == [(1, 1), (2, 1), (4, 1), *((8, 2**n) for n in range(8))]
    alone = replace(NODE, network_bytes_per_s=None)
    assert list(sizes(alone)) == [(1, 1), (2, 1), (4, 1)]


def test_efficiency_is_against_one_gpu_and_falls_where_the_host_or_the_network_bounds() -> None:
    found = scale(request(), [(1, 1), (2, 1), (4, 1), (4, 64)])
    assert [row.num_ranks for row in found] == [1, 2, 4, 256]
    first = found[0].plan.tokens_per_s
    for row in found:
        assert row.plan.batch.tokens == BATCH.tokens, "each GPU takes the same"
        assert row.efficiency == pytest.approx(row.plan.tokens_per_s / row.num_ranks / first)
    assert found[0].efficiency == 1.0
    slow = scale(request(replace(NODE, network_bytes_per_s=1e7)), [(1, 1), (4, 64)])[-1]
    assert slow.plan.bound == "network"
    assert slow.efficiency is not None
    assert found[-1].efficiency is not None
    assert slow.efficiency < 0.5 * found[-1].efficiency
    assert found[1].plan.bound != "network"


@pytest.mark.parametrize(("setting", "gathers"), [("auto", True), ("on", True), ("off", False)])
def test_a_plan_gathers_as_the_settings_say(setting: str, gathers: bool) -> None:
    raw = {"model": {"path": "m"}, "data": {"path": "d"}, "parallel": {"gather": setting}}
    wish = build_config(raw, source="test").parallel.gathers
    (row,) = scale(request(), [(4, 1)], gathers=wish)
    assert row.plan.batch.gathers == gathers
    assert bool(row.plan.bytes_per_step["gathered"]) == gathers


def test_the_table_says_each_row_as_text_and_as_json() -> None:
    config = build_config({"model": {"path": "m"}, "data": {"path": "d"}}, source="test")
    asked = Asked(
        request=request(),
        given=config,
        config=config,
        model="m",
        recount=lambda: ANATOMY,
        count_s=0.0,
        notes=(),
    )
    rows = scale(request(), [(1, 1), (4, 1)])
    found = Scaling(asked=asked, spec=NODE, rows=rows)
    plain = scale_json(found)
    assert [row["num_gpus"] for row in plain["rows"]] == [1, 4]
    assert plain["rows"][1]["efficiency"] == rows[1].efficiency
    assert json.loads(scale_report(found, as_json=True)) == json.loads(json.dumps(plain))
    last = scale_report(found).splitlines()[-1].split()
    assert last[:2] == ["4", "1"]
    assert last[2] == f"{rows[1].plan.tokens_per_s:,.0f}"
    assert last[4] == f"{rows[1].efficiency:.3f}"


def test_a_size_that_does_not_fit_says_why_and_counts_for_nothing() -> None:
    small = replace(NODE, memory=(replace(NODE.memory[0], nbytes=1 << 29),))
    found = scale(request(small), [(1, 1), (4, 1)])
    assert [row.efficiency for row in found] == [None, None]
    assert "host memory: at least" in found[0].plan.problem
