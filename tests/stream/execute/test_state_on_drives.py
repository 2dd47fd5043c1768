"""State on drives changes no bit of a step, is never read as if it were in RAM, and survives a crash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import megatrain
from megatrain.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    ModelError,
    OutputError,
    TornStateError,
)
from megatrain.layout.blocks import BlockLayout
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.step import step_program
from megatrain.store import on_drives as away
from megatrain.store import placement
from megatrain.store.drives import system as calls
from megatrain.store.placement import Tiers
from megatrain.store.state import HostState
from megatrain.stream.engine import Engine
from megatrain.stream.lanes import Cause, CheckedLanes, OrderingError
from tests.clocks import OwnClocks, TimetableLanes
from tests.families import FAMILIES
from tests.products import every_pair
from tests.reference import assert_same_bits, attach_plainly, make_batches, make_model
from tests.store.disks import Counted
from tests.stream.lanes.test_lanes import CountingLanes, ForgetfulLanes
from tests.stream.runs import HYPER, assert_same_masters, check_parity, start


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "system", Counted())


@pytest.fixture
def make_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tiers]:
    """Make tiers, and have them hold just these shares of the blocks' weights and of their other state."""

    def make(
        *, working: float = 0.0, state: float = 0.0, num_drives: int = 1, ram: int = 1 << 30, **settings: Any
    ) -> Tiers:
        def forced(layouts: Sequence[BlockLayout], tiers: Tiers, **kept: Any) -> placement.Placement:
            counts = (round(working * len(layouts)), round(state * len(layouts)))
            return placement.placed(layouts, tiers, *counts, **kept)

        monkeypatch.setattr(away, "place", forced)
        return Tiers(nvme=tuple(tmp_path / f"drive{n}" for n in range(num_drives)), ram=ram, **settings)

    return make


def tiered(engine: Engine) -> HostState:
    assert engine.host.has_drives
    return engine.host


PLACES: dict[str, dict[str, Any]] = {
    "all away": {},
    "half the weights": {"working": 0.5},
    "half the state": {"working": 1.0, "state": 0.5},
}


@every_pair(place=list(PLACES), device=["cpu", "checked", "emulated"], updates=["deferred", "immediate"])
def test_state_on_drives_changes_no_bit(
    updates: str, device: str, place: str, make_tiers: Callable[..., Tiers]
) -> None:
    immediate = updates == "immediate"
    tiers = make_tiers(**PLACES[place], num_drives=2 if device == "checked" else 1)
    check_parity(
        "llama_tied",
        device=device,
        tiers=tiers,
        updates=updates,
        max_grad_norm=None if immediate else 0.5,
        steps=3,
    )


def planes_of(engine: Engine) -> dict[str, Tensor]:
    """Copy every plane of the whole state, wherever it lives."""
    engine.settle()
    found = {}
    for number in range(len(engine.host.layouts)):
        with engine.host.borrow(number) as block:
            for plane in ("working", "remainder", "exp_avg", "exp_avg_sq"):
                if (tensor := block.find_plane(plane)) is not None:
                    found[f"{plane} of block {number}"] = tensor.clone()
    return found


def assert_same_planes(engine: Engine, expected: dict[str, Tensor]) -> None:
    found = planes_of(engine)
    assert found.keys() == expected.keys()
    for name, plane in found.items():
        assert torch.equal(plane.view(torch.uint8), expected[name].view(torch.uint8)), name


def freeze(model: PreTrainedModel) -> None:
    """Leave two layers to train, and one matrix of another."""
    model.requires_grad_(False)
    for part in (model.model.layers[1], model.model.layers[3], model.model.layers[2].mlp.down_proj):
        part.requires_grad_(True)


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "accumulation": ({"num_micro_batches": 3, "precision": "bf16"}, {"working": 1.0, "state": 0.4}),
    "lockstep": ({"num_micro_batches": 3, "lockstep": 3}, {}),
    "fragments": ({"fragments": True, "num_slots": 3, "precision": "bf16"}, {}),
    "host boundaries": ({"boundaries": "host", "num_slots": 1, "precision": "bf16"}, {"working": 0.6}),
    "frozen": ({"prepare": freeze, "precision": "bf16"}, {"working": 0.6, "state": 0.4}),
    "frozen, all away": ({"prepare": freeze}, {}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_plane_is_that_of_a_run_in_ram(name: str, make_tiers: Callable[..., Tiers]) -> None:
    settings, places = SETTINGS[name]
    tiers = make_tiers(num_drives=2, **places)
    planes, losses = [], []
    extras: tuple[dict[str, Any], ...] = ({}, {"tiers": tiers})
    for extra in extras:
        _, _, engine, optimizer = start(**settings, **extra)
        for step in range(3):
            batches = make_batches(settings.get("num_micro_batches", 1), seed=step)
            losses.append(float(engine.forward_backward(batches, seeds=list(range(len(batches))))))
            optimizer.step()
            if extra and step == 1:
                engine.commit(step, {})
            if extra and step == 2:
                counts, away_from = engine.executor.counts, tiered(engine).on_drives
                reads, writes, committed = away_from.bytes_per_step()
                assert counts.drive_write_bytes == 3 * writes + committed
                assert counts.drive_read_bytes >= 3 * reads
                again = committed if not name.startswith("frozen") else 0  # the first one writes those too
                for every, written in {None: writes, 1: writes + again, 2: writes + again / 2}.items():
                    program = step_program(engine.executor.spec, [[1]], commit_every=every).operations
                    planned = sum(one.nbytes for one in program if one.label == "write")
                    assert planned >= written - len(program), every
                    assert planned <= written + len(program) or name.startswith("frozen"), every
        planes.append(planes_of(engine))
        if extra:
            assert engine.executor.counts.drive_read_bytes > 0
            pools = dict(tiered(engine).on_drives.placement.ram_bytes)
            assert engine.host_bytes == sum(pools.values()), "the placement has foretold other bytes"
        engine.detach()
    assert losses[:3] == losses[3:]
    assert planes[0].keys() == planes[1].keys()
    for key, plane in planes[0].items():
        assert torch.equal(plane.view(torch.uint8), planes[1][key].view(torch.uint8)), key


def test_a_model_whose_state_is_four_times_its_ram_trains(tmp_path: Path) -> None:
    config = FAMILIES["llama_tied"]()
    config.num_hidden_layers = 24
    _, _, plain, _ = start(config=config, precision="bf16", updates="immediate", max_grad_norm=None)
    state = sum(plane.nbytes for plane in planes_of(plain).values())
    plain.detach()
    tiers = Tiers(nvme=(tmp_path / "drive",), keeps_gradients=False, ram=state // 4)
    _, reference, engine, optimizer = start(
        config=config, precision="bf16", updates="immediate", max_grad_norm=None, tiers=tiers
    )
    assert_same_steps_of_immediate(engine, optimizer, reference)
    arenas = tiered(engine).planes.arenas
    assert 4 * sum(arena.nbytes for arena in arenas.values()) <= state
    assert set(arenas) == {
        "working",
        "remainder",
        "exp_avg",
        "exp_avg_sq",
        "staging of state",
        "staging of weights",
        "staging",
    }
    engine.detach()


def assert_same_steps_of_immediate(engine: Engine, optimizer: Any, reference: Any) -> None:
    for step in range(2):
        batches = make_batches(1, seed=step)
        assert_same_bits(engine.forward_backward(batches), reference.forward_backward(batches), "loss")
        optimizer.step()
        reference.step(1.0, None)
        assert_same_masters(engine, reference)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("updates", "every"), [("deferred", 1), ("deferred", 2), ("immediate", 1)])
def test_a_committed_step_is_found_again(updates: str, every: int, make_tiers: Callable[..., Tiers]) -> None:
    """Whatever was written after it: updates of later steps, in part, in both places of each extent."""
    clip = None if updates == "immediate" else 0.5
    tiers = make_tiers(working=0.4, state=0.2, num_drives=2)
    settings: dict[str, Any] = {"device": "emulated", "precision": "bf16", "tiers": tiers}
    config = FAMILIES["llama"]()
    model = megatrain.load(config=config, precision="bf16", tiers=tiers)
    engine = attach_plainly(model.train(), **settings)
    optimizer = engine.adamw(**HYPER, max_grad_norm=clip, updates=updates)
    committed: dict[str, Tensor] = {}
    for step in range(1, 6):
        engine.forward_backward(make_batches(1, seed=step), seeds=[step])
        optimizer.step()
        if step % every == 0 and step < 5:
            engine.commit(step, {"step": step}, finish=lambda: {"steps": dict(optimizer.steps)})
            if step == 4:
                committed = planes_of(engine)
    engine.close()
    again = replace(make_tiers(working=1.0, state=0.6, num_drives=2), resumes=True)  # more is in RAM now
    model = megatrain.load(config=config, precision="bf16", tiers=again)
    resumed = attach_plainly(model.train(), **{**settings, "tiers": again})
    other = resumed.adamw(**HYPER, max_grad_norm=clip, updates=updates)
    record = tiered(resumed).record
    assert record is not None
    assert record.meta == {"step": 4, "steps": dict.fromkeys(optimizer.steps, 4)}
    assert_same_planes(resumed, committed)
    other.steps = dict(record.meta["steps"])
    resumed.forward_backward(make_batches(1, seed=5), seeds=[5])
    other.step()
    whole = planes_of(resumed)
    resumed.detach()
    model = megatrain.load(config=config, precision="bf16")
    plain = attach_plainly(model.train(), precision="bf16")
    last = plain.adamw(**HYPER, max_grad_norm=clip, updates=updates)
    for step in range(1, 6):
        plain.forward_backward(make_batches(1, seed=step), seeds=[step])
        last.step()
    assert_same_planes(plain, whole)


def test_weights_on_drives_are_read_where_they_are_asked_for(
    tmp_path: Path, make_tiers: Callable[..., Tiers]
) -> None:
    """In an evaluation, in `state_dict`, in a region that is written, and after `detach`."""
    tiers = make_tiers()
    model, reference, engine, optimizer = start("llama", precision="bf16", tiers=tiers)
    batches = make_batches(1, seed=0)
    assert_same_bits(engine.forward_backward(batches), reference.forward_backward(batches), "loss")
    reference.step(optimizer.step().grad_norm, 0.5)
    assert not tiered(engine).weights.are_whole
    before = engine.host_bytes
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert engine.host_bytes == before + sum(layout.working_bytes for layout in engine.host.layouts)
    for name, master in engine.named_masters():
        assert_same_bits(master, reference.master(name), name)
        assert_same_bits(weights[name], tiered(engine).weight(name), name)
    with torch.no_grad():
        first = model.eval()(**batches[0]).logits
    name = "model.layers.1.mlp.up_proj.weight"
    engine.host.put(name, torch.ones(3), (slice(0, 3), 0))
    engine.weights_changed()
    with torch.no_grad():
        second = model(**batches[0]).logits
    assert not torch.equal(first, second)
    engine.forward_backward(batches)
    optimizer.step()
    assert engine.host_bytes == before, "the weights that were read whole are still in RAM"
    masters = dict(engine.named_masters())
    engine.detach()
    assert list((tmp_path / "drive0").iterdir()) == []
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.float(), masters[name], rtol=8e-3, atol=1e-30)


def test_an_engine_that_is_reconfigured_goes_on_to_the_same_bits(make_tiers: Callable[..., Tiers]) -> None:
    """With updates and a commit still running; weights on drives are not read into RAM for it."""
    found = []
    for changes in (False, True):
        tiers = make_tiers(working=0.5, state=0.2)
        _, _, engine, optimizer = start(tiers=tiers, device="emulated", precision="bf16")
        before = 0
        for step in range(4):
            engine.forward_backward(make_batches(1, seed=step), seeds=[step])
            optimizer.step()
            engine.commit(step, {})
            before = before or engine.host_bytes
            if changes:
                updates = "serial" if step % 2 else "deferred"
                engine.reconfigure(replace(engine.choice, num_slots=1 + step % 3, updates=updates))
                assert engine.host_bytes == before
        found.append(planes_of(engine))
        engine.close(removes=True)
    assert found[0].keys() == found[1].keys()
    for name, plane in found[0].items():
        assert torch.equal(plane.view(torch.uint8), found[1][name].view(torch.uint8)), name


def test_a_step_that_is_skipped_writes_nothing(make_tiers: Callable[..., Tiers]) -> None:
    tiers = make_tiers()
    model, _, engine, optimizer = start(tiers=tiers)
    engine.forward_backward(make_batches(1, seed=0))
    optimizer.step()
    expected = planes_of(engine)
    written = tiered(engine).on_drives.store.written_bytes
    hook = model.lm_head.register_forward_hook(lambda _, __, logits: logits * torch.inf)
    engine.forward_backward(make_batches(1, seed=1))
    assert optimizer.step().skipped
    hook.remove()
    assert_same_planes(engine, expected)
    assert tiered(engine).on_drives.store.written_bytes == written
    engine.detach()


# -- order ---------------------------------------------------------------------------------------------------

MISSING_WAITS = {
    "read": Cause(Lane.HOST, Lane.READ, "drive_staging"),
    "updated": Cause(Lane.WRITE, Lane.HOST, "drive_staging"),
    "written": Cause(Lane.READ, Lane.WRITE, "drive_staging"),
    "paged": Cause(Lane.FETCH, Lane.PAGE, "page"),
    "fetched": Cause(Lane.PAGE, Lane.FETCH, "page"),
    "on the drive": Cause(Lane.PAGE, Lane.WRITE, "drive"),
    "sealed": Cause(Lane.WRITE, Lane.HOST, "meta"),
}


def train_in(lanes: CheckedLanes, tiers: Tiers) -> None:
    """Run a real training whose state passes all buffers, with a commit after each step."""
    engine = attach_plainly(make_model(FAMILIES["llama_tied"]()), device=lanes, tiers=tiers)
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    try:
        for step in range(2):
            engine.forward_backward(make_batches(1, seed=step))
            optimizer.step()
            engine.commit(step, {})
    finally:
        engine.close()


@pytest.mark.parametrize("name", MISSING_WAITS)
def test_a_missing_wait_is_found(name: str, make_tiers: Callable[..., Tiers]) -> None:
    cause = MISSING_WAITS[name]
    lanes = ForgetfulLanes(cause)
    with pytest.raises(OrderingError, match=f"lane {cause.waiting.value} uses {cause.buffer} "):
        train_in(lanes, make_tiers(working=0.2))
    assert lanes.num_forgotten > 0


def test_the_drives_own_order_is_sound(make_tiers: Callable[..., Tiers]) -> None:
    lanes = CountingLanes()
    train_in(lanes, make_tiers(working=0.2))
    assert set(MISSING_WAITS.values()) <= lanes.causes


def test_reads_writes_and_updates_overlap_on_slow_drives(
    make_tiers: Callable[..., Tiers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the time in which a block is updated, a later one is read and an earlier one is written."""
    rates: dict[str, Any] = {
        "nvme_read_bytes_per_s": 2e7,
        "nvme_write_bytes_per_s": 2e7,
        "host_bytes_per_s": 4e7,
    }
    lanes = TimetableLanes(OwnClocks(monkeypatch), **rates)
    _, _, engine, optimizer = start(device=lanes, tiers=make_tiers(working=1.0))
    engine.forward_backward(make_batches(1, seed=0))
    optimizer.step()
    engine.settle()
    spans = lanes.take_record().spans
    times = {lane: [s for s in spans if s.lane is lane] for lane in (Lane.READ, Lane.HOST, Lane.WRITE)}
    updates = [span for span in times[Lane.HOST] if span.label.startswith("update")]
    assert len(updates) == len(times[Lane.READ]) == len(times[Lane.WRITE]) >= 5
    middle = updates[2]
    for other in (times[Lane.READ][3], times[Lane.WRITE][0]):
        assert other.start_s < middle.end_s, f"{other.label} has not begun when {middle.label} ends"
    engine.detach()


# -- what goes wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_flipped_bit_stops_the_step_and_is_named(
    device: str, tmp_path: Path, make_tiers: Callable[..., Tiers]
) -> None:
    tiers = make_tiers()
    _, _, engine, optimizer = start(tiers=tiers, device=device)
    engine.forward_backward(make_batches(1, seed=0))
    optimizer.step()
    engine.settle()
    store = tiered(engine).on_drives.store
    piece = tiered(engine).on_drives.images[2].pieces[0]
    chunk = store._chunks[piece.extent][0]
    with (tmp_path / "drive0" / "state.bin").open("r+b") as file:
        file.seek(chunk.offsets[store._tables.current(piece.extent)] + 100)
        value = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([value ^ 4]))
    engine.forward_backward(make_batches(1, seed=1))
    with pytest.raises(CheckpointError, match=r"state\.bin is damaged: chunk 0 of the state of block 2 "):  # noqa: PT012
        optimizer.step()
        engine.settle()
    engine.close()


def test_what_cannot_be_placed_is_refused_before_anything_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = Tiers(nvme=(tmp_path / "drive",), ram=1 << 30)
    too_small = replace(tiers, ram=100_000)
    with pytest.raises(
        CapacityError, match=r"with all that can be on the drives, .* raise memory\.tiers\.ram"
    ):
        start(tiers=too_small)
    no_directory = Tiers(nvme=(Path("/dev/null"),), ram=tiers.ram)
    with pytest.raises(OutputError, match=r"cannot use /dev/null: Not a directory"):
        start(tiers=no_directory)
    with pytest.raises(ConfigError, match=r"resident_layers .* is 1 .* but the state is on drives"):
        start(tiers=tiers, resident_layers=1)
    with pytest.raises(ConfigError, match=r"blocks_in_ram is 3 and weights_in_ram is 2, but .* only where"):
        replace(tiers, blocks_in_ram=3, weights_in_ram=2)
    with pytest.raises(ConfigError, match="weights_in_ram is -1; use 0 or more"):
        replace(tiers, weights_in_ram=-1)
    monkeypatch.setattr(Counted, "free_bytes", lambda *_: 1000)
    with pytest.raises(CapacityError, match="has 1,000 bytes free, but the state needs"):
        start(tiers=tiers)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"blocks_in_ram": 1}, (1, 7)), ({"weights_in_ram": 2}, (2, 2)), ({}, (7, 7))],
)
def test_a_number_of_blocks_that_is_given_is_obeyed(
    given: dict[str, Any], expected: tuple[int, int], tmp_path: Path
) -> None:
    """Of 7 blocks, all of which fit; the other number is as large as it can be."""
    _, _, engine, _ = start("llama", tiers=Tiers(nvme=(tmp_path / "drive",), ram=1 << 30, **given))
    placement, num_blocks = tiered(engine).on_drives.placement, len(engine.host.blocks)
    kept = num_blocks - len(placement.state_on_drives), num_blocks - len(placement.working_on_drives)
    assert kept == expected
    engine.detach()


def test_settings_that_do_not_belong_together_are_refused(make_tiers: Callable[..., Tiers]) -> None:
    tiers = make_tiers(keeps_gradients=False)
    model = megatrain.load(config=FAMILIES["llama"](), tiers=tiers)
    with pytest.raises(ConfigError, match=r"give megatrain\.load and attach the same tiers"):
        attach_plainly(model, tiers=Tiers(nvme=tiers.nvme, ram=tiers.ram_bytes + 1))
    with pytest.raises(ConfigError, match=r"give megatrain\.load and attach the same tiers"):
        attach_plainly(model)
    engine = attach_plainly(model, tiers=tiers)
    with pytest.raises(CapacityError, match=r"counts on optim\.updates=immediate"):
        engine.adamw(**HYPER, max_grad_norm=0.5)
    engine.close()
    plain = attach_plainly(make_model(FAMILIES["llama"]()))
    with pytest.raises(ConfigError, match=r"engine\.commit needs state on drives"):
        plain.commit(1, {})


def test_a_plane_on_the_drives_is_never_taken_for_one_in_ram(make_tiers: Callable[..., Tiers]) -> None:
    _, _, engine, _ = start(tiers=make_tiers())
    for plane in ("remainder", "exp_avg", "exp_avg_sq", "exp_avg_scale"):
        with pytest.raises(AssertionError, match="planes of the block are on the drives"):
            engine.host.blocks[0].planes[plane]
    engine.detach()


def test_weights_on_the_drives_are_read_in_no_call_beside_the_model_s(
    make_tiers: Callable[..., Tiers],
) -> None:
    """A head that is called alone would compute with zeros."""
    model, reference, engine, _ = start("llama", tiers=make_tiers())
    hidden = torch.randn(1, 2, 32)
    with pytest.raises(ModelError, match=r"lm_head was called outside .* weights are not in RAM; call the"):
        model.lm_head(hidden)
    engine.sync()
    assert_same_bits(model.lm_head(hidden), reference.model.lm_head(hidden), "logits")
    engine.detach()


def test_moments_in_fewer_bytes_are_refused(make_tiers: Callable[..., Tiers]) -> None:
    engine = attach_plainly(make_model(FAMILIES["llama"]()), tiers=make_tiers())
    with pytest.raises(ConfigError, match=r"to be int8, but state on drives .* is kept in fp32"):
        engine.adamw(**HYPER, state="int8")
    engine.close()


def test_after_a_write_that_failed_nothing_is_committed(
    monkeypatch: pytest.MonkeyPatch, make_tiers: Callable[..., Tiers]
) -> None:
    _, _, engine, optimizer = start(tiers=make_tiers(), device="emulated")
    for step in range(2):
        engine.forward_backward(make_batches(1, seed=step))
        optimizer.step()
        engine.commit(step, {})
    engine.settle()
    engine.lanes.drain()
    broken = Counted()

    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(broken, "pwritev", fail)
    monkeypatch.setattr(calls, "system", broken)
    engine.forward_backward(make_batches(1, seed=2))
    with pytest.raises(CapacityError, match=r"cannot write .*No space left on device"):  # noqa: PT012
        optimizer.step()
        engine.settle()
    monkeypatch.setattr(calls, "system", Counted())
    with pytest.raises(TornStateError, match=r"No space left on device.*torn") as caught:
        engine.commit(2, {})
    assert caught.value.exit_code == CapacityError.exit_code
    store = tiered(engine).on_drives.store
    engine.close()
    assert store.resume().step == 1
    store.close()
