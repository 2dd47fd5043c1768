"""Complete gradients that wait in several places at once, drives among them: the same bits everywhere."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.errors import CapacityError, CheckpointError
from megatrain.layout.host_buffers import NUM_GRADIENT_STAGING, padded
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.step import step_program
from megatrain.store.drives import system as calls
from megatrain.store.placement import Tiers
from megatrain.stream.forward.arrangement import places_of
from megatrain.stream.lanes import Cause, OrderingError
from megatrain.train.loop import train
from tests.families import FAMILIES
from tests.reference import Resident, attach_plainly, make_batches, make_model
from tests.stream.execute.test_updates import slow_host
from tests.stream.lanes.test_lanes import ForgetfulLanes
from tests.stream.runs import (
    HYPER,
    assert_backwards_add_up,
    assert_same_steps,
    start,
)
from tests.stream.test_attack import layer_drop
from tests.train.project import make_config
from tests.train.test_loop import assert_same_runs

MIXED = ("device", "host", "nvme", "nvme")
PARKED = ("nvme",) * 4

SETTINGS: list[dict[str, Any]] = [
    {"activations": "keep"},
    {"lockstep": 3, "activations": "recompute", "boundaries": "nvme"},
    {"lockstep": 2, "fragments": True, "activations": "drop_boundary"},
    {"lockstep": 3, "activations": "offload", "num_gradient_buffers": 2, "updates": "serial"},
]


def on_drive(tmp_path: Path) -> Tiers:
    """Name a drive to a run whose state is in RAM."""
    return Tiers(nvme=(tmp_path / "drive",), ram=1 << 30)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("device", "precision", "places", "settings"),
    [
        ("checked", "bf16", MIXED, SETTINGS[0]),
        ("checked", "fp32", PARKED, SETTINGS[1]),
        ("checked", "fp32", MIXED, SETTINGS[2]),
        ("emulated", "fp32", MIXED, SETTINGS[0]),
        ("emulated", "bf16", PARKED, SETTINGS[3]),
        ("cpu", "bf16", ("host", "nvme", "device", "host"), SETTINGS[2]),
        *(
            pytest.param(device, precision, places, settings, marks=pytest.mark.parity)
            for device in ("checked", "emulated", "cpu")
            for precision in ("fp32", "bf16")
            for places in (MIXED, PARKED)
            for settings in SETTINGS
        ),
    ],
)
def test_loss_gradients_and_weights_equal_resident(
    device: str, precision: str, places: tuple[str, ...], settings: dict[str, Any], tmp_path: Path
) -> None:
    """With three micro-batches in one, two or three rounds."""
    lanes = slow_host() if device == "emulated" else device
    _, reference, engine, optimizer = start(
        "llama_tied",
        device=lanes,
        precision=precision,
        gradients=places,
        tiers=on_drive(tmp_path),
        **settings,
    )
    assert_same_steps(engine, optimizer, reference, steps=2, num_micro_batches=3)
    engine.detach()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("reads", [False, True])
def test_backwards_of_the_caller_add_up(precision: str, reads: bool, tmp_path: Path) -> None:
    """Three before a step, each foreseen as the last: what was parked comes back and is added to."""
    _, reference, engine, optimizer = start(
        "llama_tied", precision=precision, gradients=MIXED, tiers=on_drive(tmp_path)
    )
    assert_backwards_add_up(engine, optimizer, reference, precision=precision, reads=reads)


def test_layers_dropped_by_chance_equal_resident(tmp_path: Path) -> None:
    """Micro-batches that take other ways than foreseen: what has added up is parked before its time."""
    model = make_model(layer_drop())
    reference = Resident(model, **HYPER)
    layers = len(attach_plainly(make_model(layer_drop())).choice.activations)
    engine = attach_plainly(model, device="checked", gradients=("nvme",) * layers, tiers=on_drive(tmp_path))
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    assert_same_steps(engine, optimizer, reference, steps=3, num_micro_batches=4)
    engine.detach()


@pytest.mark.parity
def test_a_run_writes_what_a_run_with_the_host_s_plane_writes(tmp_path: Path) -> None:
    """And one that is resumed with its gradients elsewhere."""
    runs = []
    for name, places in {
        "host": ("host", "host"),
        "nvme": ("nvme", "nvme"),
        "both": ("nvme", "device"),
    }.items():
        for steps, place in zip((2, 4), places, strict=True):
            (tmp_path / name).mkdir(exist_ok=True)
            config = make_config(
                tmp_path / name,
                train={"steps": steps, "device": "emulated", "precision": "bf16"},
                optim={"schedule": "constant", "warmup_steps": 0},
                memory={
                    "gradients": place,
                    "lockstep": 2,
                    "fragments": False,
                    "activations": "recompute",
                    "tiers": {"nvme": [str(tmp_path / name / "drive")]},
                    "commit_every": None,
                },
            )
            made = train(config)
        runs.append(made)
    assert_same_runs(runs[1], runs[0])
    assert_same_runs(runs[2], runs[0])


# -- bytes ---------------------------------------------------------------------------------------------------


def test_each_place_takes_what_its_blocks_take(tmp_path: Path) -> None:
    engine = attach_plainly(
        make_model(FAMILIES["llama"]()),
        precision="bf16",
        gradients=MIXED,
        tiers=on_drive(tmp_path),
        num_micro_batches=2,
        lockstep=2,
    )
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    engine.forward_backward(make_batches(2))
    optimizer.step()
    engine.settle()
    sizes = [layout.gradient_bytes for layout in engine.host.layouts]
    outer = engine.executor.spec.outer
    assert engine.host.plane_bytes["gradient"] == sizes[1]
    passing = [padded(size) for block, size in enumerate(sizes) if block != 1]
    assert engine.host.plane_bytes["staging"] == NUM_GRADIENT_STAGING * max(passing)
    places = places_of(engine.choice, engine.arrangement.binding.blocks, engine.host.layouts)
    assert (list(places.on_device), list(places.on_drives)) == ([0], [2, 3])
    assert list(places.staged) == [0, 2, 3, *outer]
    parking = engine.arrangement.parking
    assert parking is not None
    assert parking.nbytes == sum(
        -(-padded(n) // parking.chunk_bytes) * parking.chunk_bytes for n in sizes[2:4]
    )
    parked = padded(sizes[2]) + padded(sizes[3])
    report = engine.last_step
    assert (report.drive_read_bytes, report.drive_write_bytes) == (parked, parked)
    engine.detach()


def test_room_on_drives_is_given_back_when_gradients_wait_elsewhere(tmp_path: Path) -> None:
    _, reference, engine, optimizer = start("llama_tied", gradients=PARKED, tiers=on_drive(tmp_path))
    assert_same_steps(engine, optimizer, reference, steps=1)
    parking = engine.arrangement.parking
    assert parking is not None
    assert parking.nbytes > 0
    engine.reconfigure(replace(engine.choice, gradients=("host",) * 4))
    assert parking.nbytes == 0
    assert_same_steps(engine, optimizer, reference, steps=1, first=1)
    engine.reconfigure(replace(engine.choice, gradients=MIXED))
    assert_same_steps(engine, optimizer, reference, steps=1, first=2)
    engine.detach()


# -- order and failures --------------------------------------------------------------------------------------


MISSING_WAITS = {
    "parked": (Cause(Lane.STOW, Lane.OFFLOAD, "staging"), "staging 0"),
    "passed on": (Cause(Lane.OFFLOAD, Lane.STOW, "staging"), "staging ."),
    "read": (Cause(Lane.RECALL, Lane.STOW, "parked"), "parked ."),
    "used": (Cause(Lane.HOST, Lane.RECALL, "staging"), "staging 0"),
    "used up": (Cause(Lane.RECALL, Lane.HOST, "staging"), "staging ."),
}


@pytest.mark.parametrize("name", MISSING_WAITS)
def test_a_missing_wait_is_found(name: str, tmp_path: Path) -> None:
    cause, buffer = MISSING_WAITS[name]
    lanes = ForgetfulLanes(cause)
    engine = attach_plainly(
        make_model(FAMILIES["llama"]()),
        device=lanes,
        gradients=PARKED,
        num_gradient_buffers=5,
        tiers=on_drive(tmp_path),
    )
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)

    def run() -> None:
        for step in range(2):
            engine.forward_backward(make_batches(2, seed=step))
            optimizer.step()

    with pytest.raises(OrderingError, match=f"lane {cause.waiting.value} uses {buffer} without waiting"):
        run()
    assert lanes.num_forgotten > 0


def test_what_is_complete_first_is_read_last_and_no_read_waits_for_the_norm(tmp_path: Path) -> None:
    engine = attach_plainly(make_model(FAMILIES["llama"]()), gradients=PARKED, tiers=on_drive(tmp_path))
    program = step_program(engine.executor.spec, [[1]]).operations
    assert [op.block for op in program if op.label == "park"] == [3, 2, 1, 0]
    reads = [op for op in program if op.label == "unpark"]
    assert [op.block for op in reads] == [0, 1, 2, 3]
    assert all(op.reads == (("parked", op.block),) for op in reads)
    assert [op.nbytes for op in reads] == [padded(engine.host.layouts[b].gradient_bytes) for b in range(4)]
    engine.detach()


def test_a_damaged_gradient_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, engine, optimizer = start("llama_tied", device="cpu", gradients=PARKED, tiers=on_drive(tmp_path))
    engine.forward_backward(make_batches(1))
    buffers = engine.arrangement.gradients.buffers
    ((_, place),) = buffers.parked.places[2, False]
    place.sums[0] += 1
    with pytest.raises(
        CheckpointError, match=r"is damaged: chunk 0 of the gradient of block 2 .*gradients=host"
    ):
        optimizer.step()


def test_a_full_drive_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, engine, _ = start("llama_tied", device="cpu", gradients=PARKED, tiers=on_drive(tmp_path))

    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(calls.system, "fallocate", full)
    with pytest.raises(CapacityError, match="drive"):
        engine.forward_backward(make_batches(1))
    monkeypatch.undo()
    engine.forward_backward(make_batches(1))
    engine.detach()


def test_what_drives_keep_equals_what_the_host_keeps(tmp_path: Path) -> None:
    """Also of a run whose state is there, and with the host's plane for some."""
    found = []
    for number, places in enumerate((("host",) * 4, PARKED, MIXED)):
        tiers = Tiers(nvme=(tmp_path / str(number),), ram=1 << 20)
        _, _, engine, optimizer = start("llama", precision="bf16", gradients=places, tiers=tiers)
        for step in range(3):
            engine.forward_backward(make_batches(2, seed=step))
            optimizer.step()
        found.append(dict(engine.named_masters()))
    for name, value in found[0].items():
        assert all(torch.equal(value, other[name]) for other in found[1:]), name
