"""Sums of several rounds that wait on drives: the bits of sums in RAM, whose plane is not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.config.choice import Choice, StepBatch, part_of
from megatrain.errors import CheckpointError, ConfigError
from megatrain.layout.host_buffers import NUM_GRADIENT_STAGING, padded
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.step import step_program
from megatrain.store.placement import Tiers
from megatrain.stream.execute.gradient_buffers import Home
from megatrain.stream.lanes import Cause, OrderingError
from tests.families import FAMILIES
from tests.products import every_value
from tests.reference import Resident, attach_plainly, make_batches, make_model
from tests.stream.execute.test_gradient_places import MIXED, PARKED, on_drive
from tests.stream.execute.test_updates import slow_host
from tests.stream.lanes.test_lanes import ForgetfulLanes
from tests.stream.runs import HYPER, assert_backwards_add_up, assert_same_masters, assert_same_steps, start
from tests.stream.test_attack import layer_drop


@pytest.mark.sampled(2)
@every_value(
    family=("llama", "mixtral", "gpt2"),
    rounds=((3, 1), (2, 2), (2, 3)),
    precision=("bf16", "bf16", "fp32"),
    updates=("deferred", "immediate", "serial"),
    gradients=("host", MIXED, PARKED),
    activations=("recompute", "keep", "offload"),
    boundaries=("nvme", "device"),
    state=("drives", "ram"),
    device=("emulated", "checked"),
)
def test_loss_gradients_and_weights_equal_resident(
    family: str,
    rounds: tuple[int, int],
    precision: str,
    updates: str,
    gradients: Any,
    activations: str,
    boundaries: str,
    state: str,
    device: str,
    tmp_path: Path,
) -> None:
    """Rounds are (R, m), of which the last one of (2, 3) is short."""
    num_rounds, lockstep = rounds
    count = 5 if rounds == (2, 3) else num_rounds * lockstep
    there: dict[str, Any] = {"blocks_in_ram": 2, "weights_in_ram": 3} if state == "drives" else {}
    clips = updates != "immediate"
    _, reference, engine, optimizer = start(
        family,
        device=slow_host() if device == "emulated" else device,
        precision=precision,
        updates=updates,
        max_grad_norm=0.5 if clips else None,
        sums="nvme",
        lockstep=lockstep,
        num_gradient_buffers=2,
        gradients=gradients if clips else "host",
        activations=activations,
        boundaries=boundaries,
        outer_streams=family == "mixtral",
        tiers=Tiers(nvme=(tmp_path / "drive",), ram=1 << 30, **there),
    )
    if clips:
        assert_same_steps(engine, optimizer, reference, num_micro_batches=count)
    else:
        for step in range(2):
            batches = make_batches(count, seed=step)
            engine.forward_backward(batches)
            reference.forward_backward(batches)
            reference.step(optimizer.step().grad_norm, None)
            assert_same_masters(engine, reference)
    assert not engine.executor._surprised
    assert engine.host.arena("accumulator") is None
    engine.close(removes=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("precision", "reads", "gradients"),
    [("bf16", True, "host"), ("bf16", False, MIXED), ("bf16", True, PARKED), ("fp32", True, "host")],
)
def test_backwards_of_the_caller_add_up(precision: str, reads: bool, gradients: Any, tmp_path: Path) -> None:
    """Three before a step, each foreseen as the last: what is a sum after all goes to the drives."""
    _, reference, engine, optimizer = start(
        "llama_tied", precision=precision, gradients=gradients, sums="nvme", tiers=on_drive(tmp_path)
    )
    assert_backwards_add_up(engine, optimizer, reference, precision=precision, reads=reads)
    assert engine.host.arena("accumulator") is None
    engine.detach()


def test_layers_dropped_by_chance_equal_resident(tmp_path: Path) -> None:
    """Micro-batches that take other ways than foreseen."""
    model = make_model(layer_drop())
    reference = Resident(model, precision="bf16", **HYPER)
    engine = attach_plainly(model, device="checked", precision="bf16", sums="nvme", tiers=on_drive(tmp_path))
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    assert_same_steps(engine, optimizer, reference, steps=3, num_micro_batches=4)
    engine.detach()


def test_sums_change_places_between_steps(tmp_path: Path) -> None:
    """The plane in RAM comes and goes, and so does the room on drives."""
    _, reference, engine, optimizer = start("llama_tied", precision="bf16", tiers=on_drive(tmp_path))
    parking = engine.arrangement.parking
    assert parking is not None
    for step in range(4):
        is_there = step % 2 == 1
        engine.reconfigure(replace(engine.choice, sums="nvme" if is_there else "device"))
        assert_same_steps(engine, optimizer, reference, steps=1, first=step, num_micro_batches=3)
        assert (parking.nbytes > 0) is is_there
        assert (engine.host.arena("accumulator") is None) is is_there
    engine.detach()


# -- bytes ---------------------------------------------------------------------------------------------------


def test_what_is_written_and_read_is_the_program_s(tmp_path: Path) -> None:
    """4 bytes per parameter of the layers each way, in each round but the last; both ends stay."""
    _, _, engine, optimizer = start(
        "llama", precision="bf16", sums="nvme", num_micro_batches=3, tiers=on_drive(tmp_path)
    )
    for step in range(2):
        engine.forward_backward(make_batches(3, seed=step))
        optimizer.step()
    engine.settle()
    sums = [padded(4 * layout.num_state) for layout in engine.host.layouts[:4]]
    report = engine.last_step
    assert (report.drive_read_bytes, report.drive_write_bytes) == (2 * sum(sums), 2 * sum(sums))
    program = step_program(engine.executor.spec, [[1]] * 3)
    assert program.nbytes("park") == program.nbytes("unpark") == 2 * sum(sums)
    assert engine.host.plane_bytes["staging"] == NUM_GRADIENT_STAGING * max(sums)
    assert "accumulator" not in engine.host.plane_bytes
    assert set(engine.arrangement.gradients.homes[:4]) <= {Home.NONE, Home.GRADIENT}
    engine.detach()


# -- order and failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "buffer"),
    [
        (Cause(Lane.STOW, Lane.OFFLOAD, "staging"), "staging 0"),
        (Cause(Lane.RECALL, Lane.STOW, "parked"), "parked ."),
        (Cause(Lane.FETCH, Lane.RECALL, "staging"), "staging ."),
    ],
)
def test_a_missing_wait_is_found(cause: Cause, buffer: str, tmp_path: Path) -> None:
    lanes = ForgetfulLanes(cause)
    engine = attach_plainly(
        make_model(FAMILIES["llama"]()),
        device=lanes,
        precision="bf16",
        sums="nvme",
        num_gradient_buffers=5,
        tiers=on_drive(tmp_path),
    )
    with pytest.raises(OrderingError, match=f"lane {cause.waiting.value} uses {buffer} without waiting"):
        engine.forward_backward(make_batches(2))
    assert lanes.num_forgotten > 0


def test_a_damaged_sum_is_told(tmp_path: Path) -> None:
    _, _, engine, _ = start(
        "llama_tied", device="cpu", precision="bf16", sums="nvme", tiers=on_drive(tmp_path)
    )
    engine.forward_backward(make_batches(2))
    ((_, place),) = engine.arrangement.gradients.buffers.parked.places[2, True]
    engine.model(**make_batches(1)[0]).loss.backward()  # what was complete is a sum again
    place.sums[0] += 1
    with pytest.raises(
        CheckpointError, match=r"is damaged: chunk 0 of the sum of gradients of block 2 .*memory.sums=device"
    ):
        list(engine.named_gradients())


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sums is nvme, but there are no drives; .*use sums=device"):
        attach_plainly(make_model(FAMILIES["llama"]()), sums="nvme")
    with pytest.raises(ConfigError, match="sums=nvme has room for one sum of a block, but a step has 2 runs"):
        attach_plainly(
            make_model(FAMILIES["llama"]()),
            sums="nvme",
            num_micro_batches=2,
            num_runs=2,
            tiers=on_drive(tmp_path),
        )
    batch = StepBatch(micro_batch_size=1, seq_len=8, num_micro_batches=4)
    with pytest.raises(ConfigError, match=r"sums \(memory.sums\) is nvme, but 2 ranks train together"):
        part_of(2, Choice(sums="nvme"), batch)
