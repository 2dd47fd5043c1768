"""Compute at another machine's rate: what visits compute is counted, and takes as long as it would there."""

from __future__ import annotations

import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.config.policies import POLICY_NAMES
from megatrain.errors import ConfigError
from megatrain.model.profile.flops import count_flops
from megatrain.plan.program.kinds import Lane
from megatrain.stream.engine import Engine
from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine, Span
from megatrain.stream.lanes.devices import compute_device, make_lanes
from megatrain.train.loop import train
from tests.clocks import OwnClocks, TimetableLanes
from tests.families import FAMILIES
from tests.reference import assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER, check_parity, start
from tests.train.project import make_config
from tests.train.test_loop import rows_of

POLICIES: list[Any] = [*POLICY_NAMES, ["recompute", "keep", "recompute_cheap", "drop_boundary"]]


def paced(rate: float = 1e9, **fields: Any) -> EmulatedLanes:
    """Make lanes whose COMPUTE does `rate` FLOPs per second."""
    return EmulatedLanes(EmulatedMachine(compute_flops_per_s=rate, **{"jitter_s": 0.0, **fields}))


def compute_spans(engine: Engine) -> list[Span]:
    """Take the record, and return the spans of COMPUTE that have work."""
    spans = engine.lanes.take_record().spans
    return [span for span in spans if span.lane is Lane.COMPUTE and span.work]


# -- what is counted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", POLICIES)
@pytest.mark.parametrize(
    ("fragments", "lockstep"),
    [(False, 1), (True, 2), *(pytest.param(*p, marks=pytest.mark.parity) for p in ((False, 2), (True, 1)))],
)
def test_work_of_all_spans_is_the_hardware_flops_of_the_step(
    activations: Any, fragments: bool, lockstep: int
) -> None:
    _, _, engine, optimizer = start(
        "llama", activations=activations, fragments=fragments, lockstep=lockstep, head_chunk_tokens=None
    )
    for step in range(2):
        engine.lanes.take_record()
        engine.forward_backward(make_batches(2, seed=step))
        spans = compute_spans(engine)
        optimizer.step()
        assert sum(span.work for span in spans) == pytest.approx(engine.last_step.hardware_flops)
        assert sum(span.label == "outer" for span in spans) == 4  # the head of each, forward and backward


def test_each_visit_has_the_flops_of_its_layer() -> None:
    """Counted by hand: 32 positions in rows of 16 tokens."""
    _, _, engine, _ = start("llama", activations=["keep", "recompute", "recompute_cheap", "recompute"])
    engine.forward_backward(make_batches(1))
    flops = count_flops(engine.model, engine.arrangement.layer_modules)
    forward = 32 * flops.layers[0].forward_flops(16)
    head = 32 * flops.rest.forward_flops(16)
    expected = [
        *(("forward", n, forward) for n in range(4)),
        ("outer", -1, head),
        ("outer", -1, 2 * head),
        ("backward", 3, 3 * forward),
        ("backward", 2, 2 * forward),
        ("backward", 1, 3 * forward),
        ("backward", 0, 2 * forward),
    ]
    found = []
    for span in compute_spans(engine):
        kind, *rest = span.label.split()
        found.append((kind, int(rest[0][1:]) if rest else -1, span.work))
    assert found == expected


def test_kept_attention_is_no_work_again() -> None:
    _, _, engine, _ = start("llama", activations="keep_attention")
    engine.forward_backward(make_batches(1))
    layer = count_flops(engine.model, engine.arrangement.layer_modules).layers[0]
    found = {span.work for span in compute_spans(engine) if span.label.startswith("backward")}
    assert found == {32 * (2 * layer.forward_flops(16) + 2 * layer.active)}, "products run again"


def test_fragments_share_their_layer_by_parameters() -> None:
    _, _, engine, _ = start("llama", activations="recompute", fragments=True)
    engine.forward_backward(make_batches(1))
    (layer, *_) = count_flops(engine.model, engine.arrangement.layer_modules).layers
    sizes = [sum(entry.numel for entry in layout.entries) for layout in engine.host.layouts]
    shares = [size / sum(sizes[:2]) for size in sizes[:2]]
    forward = 32 * layer.forward_flops(16)
    found = [(span.label.split()[:2], span.work) for span in compute_spans(engine)]
    # the last fragment's recomputation is in its backward's visit, the others have a visit of their own
    for kind, block, factors in (
        ("forward", 0, [1, 1]),
        ("forward", 1, [1]),
        ("backward", 1, [3]),
        ("backward", 0, [2]),
    ):
        works = [work for label, work in found if label == [kind, f"b{block}"]]
        assert works == pytest.approx([factor * shares[block] * forward for factor in factors])


def test_an_evaluation_counts_its_forward() -> None:
    _, _, engine, _ = start("llama")
    (batch,) = make_batches(1)
    with torch.no_grad():
        engine.model(**batch)
    flops = count_flops(engine.model, engine.arrangement.layer_modules)
    forward = sum(part.forward_flops(16) for part in (*flops.layers, flops.rest))
    assert sum(span.work for span in compute_spans(engine)) == pytest.approx(32 * forward)


def test_a_dropped_step_leaves_no_work_behind() -> None:
    _, _, engine, _ = start("llama")
    loss = engine.model(**make_batches(1)[0]).loss
    loss.register_hook(lambda _: (_ for _ in ()).throw(KeyError("stop")))  # after ours: the head has begun
    with pytest.raises(KeyError):
        loss.backward()
    engine.lanes.take_record()
    engine.forward_backward(make_batches(1))
    outer = [span.work for span in compute_spans(engine) if span.label == "outer"]
    head = 32 * count_flops(engine.model, engine.arrangement.layer_modules).rest.forward_flops(16)
    assert outer == [head, 2 * head]


# -- the timetable -------------------------------------------------------------------------------------------


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> OwnClocks:
    """Let only sleeping take time."""
    return OwnClocks(monkeypatch)


def test_computing_takes_its_work_over_the_rate(clocks: OwnClocks) -> None:
    lanes = paced(1e6)
    start_s = clocks.now()
    for _ in range(5):
        lanes.begin(Lane.COMPUTE, label="visit")
        lanes.end(Lane.COMPUTE, work=2e3)
        lanes.begin_span(Lane.COMPUTE, "outer")
        lanes.end_span(Lane.COMPUTE, work=2e3)
    assert clocks.now() - start_s == pytest.approx(0.020 - 0.005)  # catch_up_s: the first may begin before
    spans = lanes.take_record().spans
    assert [span.label for span in spans] == ["visit", "outer"] * 5
    assert all(span.end_s - span.start_s == pytest.approx(0.002) for span in spans)
    assert [b.start_s - a.end_s for a, b in pairwise(spans)] == pytest.approx([0.0] * 9)
    lanes.close()


@pytest.mark.usefixtures("clocks")
def test_what_is_computed_late_does_not_add_up() -> None:
    """Work that takes no time by the timetable is between the visits, and none of it shows."""
    lanes = paced(1e6)
    for _ in range(10):
        lanes.begin(Lane.COMPUTE, label="visit")
        time.sleep(0.001)
        lanes.end(Lane.COMPUTE, work=4e3)
        time.sleep(0.001)
    spans = lanes.take_record().spans
    assert [b.start_s - a.end_s for a, b in pairwise(spans)] == pytest.approx([0.0] * 9)
    lanes.close()


@pytest.mark.usefixtures("clocks")
def test_lanes_and_the_launching_thread_keep_one_timetable() -> None:
    """A copy begins when the visit that frees its buffer ends, and the next visit when the copy does."""
    lanes = paced(1e6, h2d_bytes_per_s=1e6)
    for _ in range(6):
        lanes.enqueue(Lane.FETCH, lambda: None, writes=[("slot", 0)], work=3e3, label="fetch")
        lanes.begin(Lane.COMPUTE, reads=[("slot", 0)], label="visit")
        lanes.end(Lane.COMPUTE, reads=[("slot", 0)], work=2e3)
    lanes.drain()
    spans = lanes.take_record().spans
    assert [span.label for span in spans] == ["fetch", "visit"] * 6
    assert [b.start_s - a.end_s for a, b in pairwise(spans)] == pytest.approx([0.0] * 11)
    lanes.close()


@pytest.mark.usefixtures("clocks")
def test_a_caller_that_waits_begins_after_what_it_has_waited_for() -> None:
    lanes = paced(1e6, host_bytes_per_s=1e6)
    lanes.begin(Lane.COMPUTE)
    lanes.end(Lane.COMPUTE, work=1e3)
    lanes.enqueue(Lane.HOST, lambda: None, writes=[("norm", 0)], work=20e3)
    lanes.begin(Lane.CALLER, reads=[("norm", 0)])
    lanes.end(Lane.CALLER, reads=[("norm", 0)])
    lanes.begin(Lane.COMPUTE)
    lanes.end(Lane.COMPUTE, work=1e3)
    lanes.drain()
    spans = [span for span in lanes.take_record().spans if span.work]
    host = next(span for span in spans if span.lane is Lane.HOST)
    assert spans[-1].lane is Lane.COMPUTE
    assert spans[-1].start_s == pytest.approx(host.end_s)
    lanes.close()


@pytest.mark.parametrize("activations", ["recompute", "keep", "offload", "drop_boundary"])
def test_a_rate_changes_no_bit(activations: str) -> None:
    check_parity("llama_tied", device=paced(2e9, jitter_s=1e-4), num_micro_batches=2, activations=activations)


def test_mfu_is_a_share_of_the_emulated_rate(clocks: OwnClocks) -> None:
    lanes = TimetableLanes(clocks, compute_flops_per_s=1e9)
    engine = attach_plainly(make_model(FAMILIES["llama"]()), device=lanes)
    optimizer = engine.adamw(**HYPER)
    engine.forward_backward(make_batches(1))
    optimizer.step()
    report = engine.last_step
    assert report.matmul_peak == engine.meter.matmul_peak == 1e9
    assert report.lane_seconds["compute"] == pytest.approx(report.hardware_flops / 1e9)
    assert report.seconds == pytest.approx(report.lane_seconds["compute"], abs=0.006)  # catch_up_s, once
    assert report.mfu == report.model_flops / report.seconds / 1e9
    assert 0 < report.mfu < 1
    engine.detach()


# -- rates that change ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("clocks")
def test_a_new_rate_holds_from_the_next_operation_on() -> None:
    lanes = paced(1e6, h2d_bytes_per_s=1e6)
    began, gate = threading.Event(), threading.Event()

    def first() -> None:
        began.set()
        gate.wait()

    lanes.enqueue(Lane.FETCH, first, work=1e3)
    lanes.enqueue(Lane.FETCH, lambda: None, work=1e3)
    lanes.begin(Lane.COMPUTE)
    lanes.end(Lane.COMPUTE, work=1e3)
    began.wait()
    rates = {"h2d_bytes_per_s": 2e5, "compute_flops_per_s": 5e5}
    thread = threading.Thread(target=lanes.set_rates, kwargs=rates)
    thread.start()
    thread.join()
    gate.set()
    lanes.enqueue(Lane.RESTORE, lambda: None, work=1e3)  # the same link
    lanes.begin(Lane.COMPUTE)
    lanes.end(Lane.COMPUTE, work=1e3)
    lanes.drain()
    spans = lanes.take_record().spans
    seconds = {
        lane: [round(span.end_s - span.start_s, 6) for span in spans if span.lane is lane]
        for lane in (Lane.FETCH, Lane.RESTORE, Lane.COMPUTE)
    }
    assert seconds[Lane.FETCH][1] == 0.005
    assert seconds[Lane.RESTORE] == [0.005]
    assert seconds[Lane.COMPUTE] == [0.001, 0.002]
    assert lanes.machine.h2d_bytes_per_s == 2e5
    lanes.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", ["emulated", "paced"])
def test_rates_that_change_in_a_run_change_no_bit(device: str) -> None:
    lanes = paced(2e9) if device == "paced" else EmulatedLanes()
    _, reference, engine, optimizer = start("llama_tied", device=lanes)
    for step in range(4):
        batches = make_batches(2, seed=step)
        assert_same_bits(engine.forward_backward(batches), reference.forward_backward(batches), "loss")
        lanes.set_rates(h2d_bytes_per_s=2e7 * (1 + step), compute_flops_per_s=1e9 * (1 + step))
        reference.step(optimizer.step().grad_norm, 0.5)
    engine.detach()


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        (
            {"nvlink_bytes_per_s": 1.0},
            "an emulated machine has no nvlink_bytes_per_s; use one of compute_flops",
        ),
        ({"seed": 1.0}, "an emulated machine has no seed"),
        ({"h2d_bytes_per_s": 0.0}, "h2d_bytes_per_s of the emulated machine is 0.0; use a positive number"),
        ({"h2d_bytes_per_s": -1.0}, "h2d_bytes_per_s of the emulated machine is -1.0"),
        ({"h2d_bytes_per_s": float("nan")}, "h2d_bytes_per_s of the emulated machine is nan"),
    ],
)
def test_a_wrong_rate_is_refused(rates: dict[str, float], message: str) -> None:
    lanes = EmulatedLanes()
    with pytest.raises(ConfigError, match=message):
        lanes.set_rates(**rates)
    assert lanes.machine == EmulatedMachine()


# -- machines in files ---------------------------------------------------------------------------------------

RATES: dict[str, Any] = {
    "compute_flops_per_s": 1e9,
    "h2d_bytes_per_s": 1e8,
    "d2h_bytes_per_s": 2e8,
    "host_bytes_per_s": 4e8,
    "device_bytes": 10_000_000,
    "_note": "other keys are ignored",
}


def test_a_machine_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(RATES))
    lanes = make_lanes(f"emulated:{path}")
    assert isinstance(lanes, EmulatedLanes)
    assert lanes.machine == EmulatedMachine.from_rates(RATES)
    assert lanes.available_bytes() == 10_000_000
    assert make_lanes(f"emulated:{path}", 1000).available_bytes() == 1000
    assert compute_device(f"emulated:{path}") == torch.device("cpu")


def test_a_run_trains_on_a_machine_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(RATES))
    config = make_config(tmp_path, train={"device": f"emulated:{path}", "steps": 3})
    rows = rows_of(train(config))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["device_bytes"] <= 10_000_000 for row in rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"cannot read the emulated machine \(No such file"),
        ("{", "the emulated machine is no JSON"),
        ("[1]", r"must be a JSON object of rates, not \[1\]"),
        (json.dumps({k: v for k, v in RATES.items() if k != "h2d_bytes_per_s"}), "lack h2d_bytes_per_s"),
        (json.dumps({**RATES, "h2d_bytes_per_s": -1}), "h2d_bytes_per_s of the emulated machine is -1"),
        (json.dumps({**RATES, "device_bytes": "much"}), "device_bytes of the emulated machine is 'much'"),
        (json.dumps({**RATES, "host_bytes_per_s": None}), "host_bytes_per_s of the emulated machine is None"),
    ],
)
def test_a_file_that_is_no_machine_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        compute_device(f"emulated:{path}")
