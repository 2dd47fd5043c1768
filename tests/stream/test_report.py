"""`engine.last_step`: what moved, how long each lane worked, who waited for whom, what bounds the step."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatrain.errors import ConfigError
from megatrain.hardware import matmul, measure_matmul_peak
from megatrain.model.profile.flops import count_flops
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.step import step_program
from megatrain.stream.engine import Engine
from megatrain.stream.lanes import Cause, Span, Wait
from megatrain.stream.report import StepReport, Work, length, union
from tests.clocks import OwnClocks, TimetableLanes
from tests.families import FAMILIES
from tests.products import every_pair
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER


def start(
    family: str = "llama",
    *,
    device: Any = "checked",
    updates: str = "deferred",
    max_grad_norm: float | None = 0.5,
    **settings: Any,
) -> tuple[Engine, Any]:
    engine = attach_plainly(make_model(FAMILIES[family]()), device=device, **settings)
    return engine, engine.adamw(**HYPER, max_grad_norm=max_grad_norm, updates=updates)


def run_steps(engine: Engine, optimizer: Any, steps: int = 2, num_micro_batches: int = 2) -> list[StepReport]:
    reports = []
    for step in range(steps):
        engine.forward_backward(make_batches(num_micro_batches, seed=step))
        stats = optimizer.step()
        assert stats.grad_norm > 0
        reports.append(engine.last_step)
    return reports


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> OwnClocks:
    """Let only sleeping take time, once the speed of products is known."""
    measure_matmul_peak(torch.device("cpu"), torch.float32)
    return OwnClocks(monkeypatch)


# -- what moved ----------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@every_pair(lockstep=[1, 4], fragments=[False, True], resident_layers=[0, 2])
def test_counts_and_bytes_are_the_program_s(lockstep: int, fragments: bool, resident_layers: int) -> None:
    engine, optimizer = start(lockstep=lockstep, fragments=fragments, resident_layers=resident_layers)
    spec = engine.executor.spec
    sizes = spec.sizes
    num_rounds = 4 // lockstep
    program = step_program(spec, [[1] * lockstep] * num_rounds)
    num_at_home = sum(not size.is_streamed and not size.updates_on_device for size in sizes)
    num_fetches = program.count("fetch") - num_at_home
    num_offloads = program.count("offload") - num_at_home
    streamed = [size for size in sizes if size.is_streamed]
    for report in run_steps(engine, optimizer, 3, num_micro_batches=4):
        assert report.fetches == num_fetches <= 2 * len(streamed) * num_rounds
        assert report.offloads == num_offloads == len(streamed) * num_rounds
        assert report.fetch_bytes == program.nbytes("fetch") + program.nbytes("load")
        assert report.offload_bytes == program.nbytes("offload")
        assert report.update_bytes == sum(size.update_bytes for size in sizes if not size.updates_on_device)
        assert report.tokens == 4 * 2 * 15


def test_offloads_are_once_per_block_in_one_round() -> None:
    engine, optimizer = start(lockstep=4)
    assert [report.offloads for report in run_steps(engine, optimizer, num_micro_batches=4)] == [4, 4]


def test_saved_and_restored_bytes_are_the_stash_s() -> None:
    engine, optimizer = start(activations="offload", num_slots=2)
    engine.arrangement.offloaded._min_bytes = 1
    first, second = run_steps(engine, optimizer)
    assert first.saved_bytes == second.saved_bytes > 0
    assert first.restored_bytes == second.restored_bytes > 0
    assert first.saved_bytes + second.saved_bytes == engine.arrangement.offloaded.saved_bytes


def test_step_by_hand_reports_the_same() -> None:
    engine, optimizer = start()
    (expected,) = run_steps(engine, optimizer, 1, num_micro_batches=1)
    for batch in make_batches(2):
        loss = engine.model(**batch).loss
        optimizer.zero_grad()  # where many loops have it: nothing is lost
        loss.backward()
        optimizer.step()
        report = engine.last_step
        for name in ("fetches", "offloads", "fetch_bytes", "offload_bytes", "update_bytes", "tokens"):
            assert getattr(report, name) == getattr(expected, name), name
        assert report.model_flops == expected.model_flops
        assert report.hardware_flops == expected.hardware_flops
        assert report.lane_seconds["compute"] > 0


@pytest.mark.usefixtures("clocks")
def test_evaluation_and_dropped_steps_are_no_part_of_a_step() -> None:
    engine, optimizer = start()
    (expected,) = run_steps(engine, optimizer, 1, num_micro_batches=1)
    (batch,) = make_batches(1)
    engine.forward_backward([batch])
    optimizer.step()
    with torch.no_grad():
        engine.model(**batch)
    time.sleep(0.3)
    report = engine.last_step
    assert (report.fetches, report.fetch_bytes) == (expected.fetches, expected.fetch_bytes)
    assert report.seconds == 0.0  # by a clock that only the sleep has moved
    engine.forward_backward([batch, batch])
    engine.zero_grad()  # these gradients are not wanted
    assert engine.last_step is report
    engine.forward_backward([batch])
    optimizer.step()
    assert engine.last_step.tokens == expected.tokens
    assert engine.last_step.model_flops == expected.model_flops


def test_report_needs_a_step_and_stays_until_the_next() -> None:
    engine, optimizer = start()
    with pytest.raises(ConfigError, match=r"engine\.last_step: no step is complete; call opt\.step"):
        _ = engine.last_step
    (report,) = run_steps(engine, optimizer, 1)
    assert engine.last_step is report
    engine.forward_backward(make_batches(1))
    assert engine.last_step is report
    optimizer.step()
    assert engine.last_step is not report


@pytest.mark.usefixtures("clocks")
def test_step_lasts_until_the_next_one_or_until_it_is_read() -> None:
    engine, optimizer = start()
    engine.forward_backward(make_batches(1))
    optimizer.step()
    time.sleep(0.3)
    engine.forward_backward(make_batches(1))
    assert engine.last_step.seconds == pytest.approx(0.3)
    optimizer.step()
    time.sleep(0.2)
    assert engine.last_step.seconds == pytest.approx(0.2)
    time.sleep(0.3)
    assert engine.last_step.seconds == pytest.approx(0.2)


# -- lanes and waits -----------------------------------------------------------------------------------------


def test_lanes_work_as_long_as_their_bytes_take(clocks: OwnClocks) -> None:
    rates = {"h2d_bytes_per_s": 20e6, "d2h_bytes_per_s": 20e6, "host_bytes_per_s": 40e6}
    lanes = TimetableLanes(clocks, **rates, compute_flops_per_s=1e9)
    engine, optimizer = start(device=lanes, updates="serial")
    for report in run_steps(engine, optimizer, 3):
        for lane, nbytes, rate in (
            ("fetch", report.fetch_bytes, 20e6),
            ("offload", report.offload_bytes, 20e6),
            ("host", report.update_bytes, 40e6),
        ):
            assert report.lane_seconds[lane] == pytest.approx(nbytes / rate)
            assert report.lane_seconds[lane] <= report.seconds
        assert report.lane_seconds["compute"] == pytest.approx(report.hardware_flops / 1e9)
        assert report.lane_seconds["compute"] <= report.seconds
        assert set(report.lane_seconds) <= {lane.value for lane in Lane}
    engine.detach()


def test_deferred_updates_count_in_the_step_in_which_they_end(clocks: OwnClocks) -> None:
    lanes = TimetableLanes(clocks, host_bytes_per_s=20e6)
    gate = threading.Event()
    submit = lanes._submit

    def held_back(lane: Lane, function: Any, work: float, label: object) -> None:
        def update() -> None:
            gate.wait()
            function()

        submit(lane, update if str(label).startswith("update") else function, work, label)

    lanes._submit = held_back  # type: ignore[method-assign]
    engine, optimizer = start(device=lanes)
    (first,) = run_steps(engine, optimizer, 1)
    assert first.lane_seconds["host"] < 0.01 * first.update_bytes / 20e6  # its own updates come after it
    gate.set()
    reports = run_steps(engine, optimizer, 3)
    assert sum(report.lane_seconds["host"] for report in reports) >= 3 * first.update_bytes / 20e6 * 0.999
    engine.detach()


def test_waits_have_their_cause(clocks: OwnClocks) -> None:
    lanes = TimetableLanes(clocks, h2d_bytes_per_s=5e6, compute_flops_per_s=1e9)
    engine, optimizer = start(device=lanes)
    report = run_steps(engine, optimizer, 2)[-1]
    assert report.waits["compute<-fetch slot"] > 0
    assert list(report.waits.values()) == sorted(report.waits.values(), reverse=True)
    assert sum(value for name, value in report.waits.items() if name.startswith("compute<-")) + (
        report.lane_seconds["compute"]
    ) == pytest.approx(report.seconds)
    engine.detach()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("activations", ["recompute", "keep", "offload"])
def test_launching_thread_waits_for_nothing_inside_a_step_but_what_compute_needs(
    activations: str, clocks: OwnClocks
) -> None:
    """Slow copies and a slow host: all that compute may wait for are lanes, and the caller for nobody."""
    lanes = TimetableLanes(clocks, h2d_bytes_per_s=10e6, d2h_bytes_per_s=10e6, host_bytes_per_s=20e6)
    engine, optimizer = start(device=lanes, activations=activations)
    engine.arrangement.offloaded._min_bytes = 1
    for step in range(4):
        engine.forward_backward(make_batches(2, seed=step))
        stats = optimizer.step()
        waits = lanes.take_record().waits
        assert stats.grad_norm > 0
        if step == 0:
            continue  # it allocates
        assert not [wait.cause for wait in waits if wait.cause.waiting is Lane.CALLER]
        owners = {wait.cause.owner for wait in waits if wait.cause.waiting is Lane.COMPUTE}
        assert Lane.FETCH in owners
        assert owners <= {Lane.FETCH, Lane.OFFLOAD, Lane.SAVE, Lane.RESTORE, Lane.HOST}
    engine.detach()


# -- the bound -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rates", "bound"),
    [
        ({"h2d_bytes_per_s": 1e6}, "copies"),
        ({"d2h_bytes_per_s": 1e6}, "copies"),
        ({"host_bytes_per_s": 2e6}, "optimizer"),
        ({}, "compute"),
    ],
)
def test_bound_is_what_is_slow(rates: dict[str, float], bound: str, clocks: OwnClocks) -> None:
    engine, optimizer = start(device=TimetableLanes(clocks, **rates))
    if bound == "compute":
        for layer in engine.arrangement.layer_modules:
            layer.get_submodule("mlp").register_forward_pre_hook(lambda *_: time.sleep(0.1))
    reports = run_steps(engine, optimizer, 3, num_micro_batches=1)[1:]
    # the updates of a step are in its own record, or in the next one's
    report = max(reports, key=lambda each: each.bound_s)
    assert report.bound == bound
    assert report.bound_s > 0
    assert report.over_bound == report.seconds / report.bound_s
    engine.detach()


def test_updates_overlap_as_their_schedule_lets_them() -> None:
    spans = [
        Span(Lane.COMPUTE, "forward   b0 s0", 0.0, 2.0),
        Span(Lane.COMPUTE, "outer", 2.0, 3.0),
        Span(Lane.COMPUTE, "backward  b0 s0", 3.0, 6.0),
        Span(Lane.HOST, "update    b0", 0.0, 4.0),
        Span(Lane.FETCH, "fetch     b0 s0", 0.0, 1.0),
    ]
    work = Work(spans, [])
    assert work.bound("deferred") == ("optimizer", 4.0 + 3.0)
    assert work.bound("serial") == ("optimizer", 4.0 + 6.0)
    assert work.bound("immediate") == ("compute", 6.0)
    assert Work([], []).bound("deferred") == ("compute", 0.0)


def test_copies_of_one_direction_share_a_link() -> None:
    spans = [
        Span(Lane.FETCH, "fetch", 0.0, 2.0),
        Span(Lane.RESTORE, "restore", 1.0, 4.0),
        Span(Lane.OFFLOAD, "offload", 0.0, 1.0),
        Span(Lane.SAVE, "save", 5.0, 6.0),
    ]
    assert Work(spans, []).bound("deferred") == ("copies", 4.0)


def test_wait_inside_a_visit_is_no_work() -> None:
    spans = [Span(Lane.COMPUTE, "backward  b0", 0.0, 10.0), Span(Lane.FETCH, "fetch", 0.0, 10.0)]
    waits = [
        Wait(Cause(Lane.COMPUTE, Lane.RESTORE, "restored"), 2.0, 3.0),
        Wait(Cause(Lane.COMPUTE, Lane.RESTORE, "restored"), 9.0, 4.0),
        Wait(Cause(Lane.FETCH, Lane.HOST, "working"), 0.0, 5.0),
    ]
    work = Work(spans, waits)
    assert work.busy_s(Lane.COMPUTE) == 6.0
    assert work.busy_s(Lane.COMPUTE, start_s=4.0) == 4.0
    assert work.busy_s(Lane.FETCH) == 10.0


def test_union_of_intervals() -> None:
    assert union([(3, 4), (0, 2), (1, 2.5), (4, 5), (7, 7)]) == [(0, 2.5), (3, 5)]
    assert length(union([(3, 4), (0, 2), (1, 2.5), (4, 5)])) == 4.5


# -- FLOPs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activations", "forwards"),
    [
        ("keep", [0, 0, 0, 0]),
        ("recompute_cheap", [0, 0, 0, 0]),
        ("recompute", [1, 1, 1, 1]),
        # layer 0 keeps its boundary, and the other three boundaries are made again by the layers before
        ("drop_boundary", [2, 2, 2, 1]),
        (["recompute", "keep", "recompute", "drop_boundary"], [1, 0, 2, 1]),
    ],
)
@pytest.mark.parametrize("lockstep", [1, 2])
def test_hardware_flops_are_what_the_policy_computes_again(
    activations: Any, forwards: list[int], lockstep: int
) -> None:
    engine, optimizer = start(activations=activations, lockstep=lockstep)
    assert engine.arrangement.rounds.forwards_again == forwards
    calls = dict.fromkeys(range(4), 0)
    for number, layer in enumerate(engine.arrangement.layer_modules):

        def count(*_: Any, number: int = number) -> None:
            calls[number] += 1

        layer.get_submodule("mlp.gate_proj").register_forward_hook(count)
    run_steps(engine, optimizer, 1)
    report = engine.last_step
    if activations != "recompute_cheap":  # which enters modules again, and computes no product in them
        assert [calls[n] for n in range(4)] == [2 * (1 + number) for number in forwards]
    flops = count_flops(engine.model, engine.arrangement.layer_modules)
    assert report.model_flops == 64 * flops.model_flops(16)
    again = flops.recomputed_flops(16, forwards)
    assert report.hardware_flops == pytest.approx(64 * (flops.model_flops(16) + again))


def test_hardware_flops_hold_no_attention_that_was_kept() -> None:
    engine, optimizer = start(activations=["keep_attention", "recompute", "keep_attention", "keep"])
    run_steps(engine, optimizer, 1)
    flops = count_flops(engine.model, engine.arrangement.layer_modules)
    kept, whole, *_ = flops.layers
    again = 2 * 2 * kept.active + whole.forward_flops(16)
    report = engine.last_step
    assert report.hardware_flops == pytest.approx(64 * (flops.model_flops(16) + again))
    engine.reconfigure(replace(engine.choice, activations=("keep",) * 4))
    assert engine.last_step.hardware_flops == report.hardware_flops


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_flops_are_torch_s_own_count(family: str) -> None:
    """torch counts products only, causal attention whole, and does not see what its checkpoint leaves out."""
    config = FAMILIES[family]()
    config._attn_implementation = "eager"
    counted = {}
    for activations in ("keep", "recompute"):
        engine = attach_plainly(make_model(config), activations=activations)
        optimizer = engine.adamw(**HYPER)
        with FlopCounterMode(display=False) as counter:
            engine.forward_backward(make_batches(1))
        optimizer.step()
        counted[activations] = counter.get_total_flops(), engine.last_step
    flops = count_flops(engine.model, engine.arrangement.layer_modules)
    norms = sum(p.numel() for p in engine.model.parameters() if p.ndim == 1)
    attention = sum(12 * part.attention.key_width * 16 for part in flops.layers if part.attention is not None)
    products = sum(part.active for part in (*flops.layers, flops.rest)) - norms
    kept, report = counted["keep"]
    assert kept == 32 * (6 * products + attention)
    assert report.model_flops == report.hardware_flops == 32 * flops.model_flops(16)
    # a layer's last product is not computed again if nobody wants its result; gemma2 has a norm behind it
    left_out = 32 * 4 * 2 * 32 * 48 if family == "llama" else 0
    head = 2 * 128 * 32
    assert counted["recompute"][0] - kept == 32 * (2 * products - head + attention / 3) - left_out


def test_head_in_chunks_is_computed_twice_where_the_caller_runs_the_backward() -> None:
    engine, optimizer = start(activations="keep", head_chunk_tokens=8)
    (report,) = run_steps(engine, optimizer, 1, num_micro_batches=1)
    assert report.hardware_flops == report.model_flops
    engine.model(**make_batches(1)[0]).loss.backward()
    optimizer.step()
    assert engine.last_step.hardware_flops == report.model_flops + 32 * 2 * 128 * 32


def test_padding_is_hardware_s_work_and_not_the_model_s() -> None:
    engine, optimizer = start(activations="keep")
    engine.forward_backward(make_batches(1, padded=True))
    optimizer.step()
    report = engine.last_step
    assert report.tokens == 12 + 10
    assert report.model_flops / report.hardware_flops == pytest.approx((13 + 11) / 32)


def test_mfu_is_a_share_of_the_measured_peak() -> None:
    engine, optimizer = start()
    (report,) = run_steps(engine, optimizer, 1)
    assert (
        report.matmul_peak
        == engine.meter.matmul_peak
        == measure_matmul_peak(torch.device("cpu"), torch.float32)
    )
    assert report.mfu == report.model_flops / report.seconds / report.matmul_peak
    assert report.hardware_flops_per_s > report.model_flops_per_s
    assert report.mfu > 0


def test_peak_is_measured_once_and_draws_from_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with 1 GFLOP/s: by a clock that only its products move."""
    now_s = [0.0]
    multiply = torch.Tensor.mm

    def slowly(left: Tensor, right: Tensor) -> Tensor:
        now_s[0] += 2 * left.shape[0] ** 3 / 1e9
        return multiply(left, right)

    monkeypatch.setattr(matmul, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    monkeypatch.setattr(torch.Tensor, "mm", slowly)
    matmul._matmul_peak.cache_clear()
    state = torch.get_rng_state()
    first = measure_matmul_peak(torch.device("cpu"), torch.bfloat16)
    assert first == pytest.approx(1e9)
    took_s = now_s[0]
    assert 0.1 < took_s < 0.1 + 4 * 2 * 512**3 / 1e9  # its budget, and the products that pass it
    assert measure_matmul_peak(torch.device("cpu"), torch.bfloat16) == first
    assert now_s[0] == took_s
    assert torch.equal(torch.get_rng_state(), state)
    matmul._matmul_peak.cache_clear()  # it was another machine's
