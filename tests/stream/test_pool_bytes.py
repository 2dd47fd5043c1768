"""Every pool's bytes are said once: where its function says more, plan, check and allocation move by it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatrain.config.choice import StepBatch
from megatrain.config.optimizers.registry import find
from megatrain.errors import CapacityError
from megatrain.hardware.memory import MemoryLimit
from megatrain.layout import pools
from megatrain.layout.blocks import BlockLayout
from megatrain.layout.host_buffers import PAGE_BYTES
from megatrain.model.profile.count import count_anatomy
from megatrain.plan.memory import host_pools
from megatrain.plan.memory.device_pools import device_peak_bytes
from megatrain.store import on_drives, placement, read_in
from megatrain.store.drives import scratch
from megatrain.store.drives import system as calls
from megatrain.store.placement import Tiers
from megatrain.stream import engine as engine_module
from megatrain.stream.engine import Engine
from tests.families import FAMILIES
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER

MORE = 4096


@dataclass(frozen=True)
class Case:
    """A run in which some pools are."""

    settings: Mapping[str, Any]
    state: str = "fp32"
    on_drives: bool = False


CASES = {
    "device": Case(
        {"resident_layers": 2, "gradients": "device", "lockstep": 2, "activations": "recompute"}, state="int8"
    ),
    "rounds": Case({"lockstep": 1, "activations": "recompute"}),
    "sums": Case({"lockstep": 1, "activations": "recompute", "sums": "host"}),
    "saved": Case({"boundaries": "host", "lockstep": 2, "activations": ["offload", *["recompute"] * 3]}),
    "drives": Case(
        {
            "boundaries": "nvme",
            "lockstep": 2,
            "activations": ["offload", *["recompute"] * 3],
            "gradients": ["host", "device", "nvme", "nvme"],
        },
        on_drives=True,
    ),
    "sums on drives": Case({"lockstep": 1, "activations": "recompute", "sums": "nvme"}, on_drives=True),
}
"""All of two micro-batches of a model of four layers."""

POOLS = {
    "slot": ("device", "device"),
    "codes": ("device", "device"),
    "resident_weights": ("device", "device"),
    "resident_gradient": ("device", "device"),
    "resident_state": ("device", "device"),
    "gradient_buffer": ("device", "device"),
    "waiting_gradient": ("device", "device"),
    "working_plane": ("device", "ram"),
    "remainder_plane": ("device", "ram"),
    "optimizer_plane": ("device", "ram"),
    "gradient_staging": ("device", "ram"),
    "gradient_plane": ("rounds", "ram"),
    "accumulator_plane": ("rounds", "ram"),
    "saved_visit": ("saved", "saved"),
    "saved_buffer": ("drives", "saved"),
    "state_image": ("drives", "nvme"),
    "weights_image": ("drives", "nvme"),
    "state_buffer": ("drives", "ram"),
    "weights_buffer": ("drives", "ram"),
    "scratch_room": ("drives", "scratch"),
    "parked_gradient": ("drives", "scratch"),
    "parked_sum": ("sums on drives", "scratch"),
    "staging_buffer": ("sums on drives", "ram"),
}
"""By function of `layout.pools`: a run that has the pool, and where the pool is."""

REFUSALS = {
    ("device", "device"): "are needed before activations",
    ("device", "ram"): "but memory.host_limit is",
    ("rounds", "ram"): "but memory.host_limit is",
    ("sums", "ram"): "but memory.host_limit is",
    ("saved", "saved"): "some stay on the device",
    ("drives", "saved"): "saved activations pass 3 buffers",
    ("drives", "ram"): "the part of the state that stays in RAM takes",
    ("sums on drives", "ram"): "the part of the state that stays in RAM takes",
    ("drives", "nvme"): "two copies, so that a crash leaves one whole",
}
"""What the check before allocation says where a pool is too large, by run and place."""

PASSING = {
    "square_sums",
    "gradient_scratch",
    "exchange_room",
    "exchanged_sum",
    "rounded_share",
    "update_scratch",
    "whole_state",
}
"""Functions of what comes and goes: on the device beside what autograd saves, which is all estimated, and in
RAM while a block that is on the device alone is read."""


def test_every_pool_is_in_the_table() -> None:
    functions = {
        name
        for name, function in inspect.getmembers(pools, inspect.isfunction)
        if function.__module__ == pools.__name__
        and not name.startswith("_")
        and inspect.signature(function).return_annotation == "int"
    }
    assert functions == set(POOLS) | PASSING


@dataclass(frozen=True)
class Bytes:
    """Of one run, by place."""

    planned: Mapping[str, int]
    allocated: Mapping[str, int]
    loss: float


def placed(layouts: Sequence[BlockLayout], tiers: Tiers, **kept: Any) -> placement.Placement:
    """Have the weights of four blocks in RAM, and the state of two: what pools take must not change it."""
    return placement.placed(layouts, tiers, 4, 2, **kept)


def train(case: Case, root: Path, limits: Mapping[str, int]) -> tuple[Engine, float]:
    """Attach a model and take one step; `limits` say what there is, by place."""
    model = make_model(FAMILIES["llama"]())
    with pytest.MonkeyPatch.context() as patch:
        settings = dict(case.settings)
        if case.on_drives:
            root.mkdir(exist_ok=True)
            settings["tiers"] = Tiers(nvme=(root / "drive",), ram=1 << 30)
            patch.setattr(on_drives, "place", placed)
            if "ram" in limits:
                memory = MemoryLimit(limits["ram"], "the test")
                patch.setattr(read_in, "host_memory", lambda: memory)
            if "nvme" in limits:
                patch.setattr(calls.system, "free_bytes", lambda path: limits["nvme"] + PAGE_BYTES)
        elif "ram" in limits:
            settings["host_limit"] = limits["ram"]
        if "saved" in limits:
            patch.setattr(engine_module, "room_for_activations", lambda *_: limits["saved"])
        engine = attach_plainly(
            model,
            device="emulated",
            precision="bf16",
            num_micro_batches=2,
            device_limit=limits.get("device"),
            optimizer_state=case.state,
            **settings,
        )
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    loss = engine.forward_backward(make_batches(2, tokens=64), seeds=[0, 1]).item()
    optimizer.step()
    engine.settle()
    return engine, loss


def measure(case: Case, root: Path, limits: Mapping[str, int]) -> Bytes:
    """Plan the run that this engine takes, and look at what it has allocated."""
    engine, loss = train(case, root, limits)
    anatomy = count_anatomy(
        FAMILIES["llama"](), micro_batch_size=2, seq_len=64, precision="bf16", device_type="cpu"
    )
    batch = StepBatch(micro_batch_size=2, seq_len=64, num_micro_batches=2)
    moments = find("adamw", case.state)
    found = [
        *device_peak_bytes(anatomy, engine.choice, batch, optimizer=moments),
        *host_pools.host_pools(anatomy, engine.choice, batch, moments),
        *host_pools.drive_pools(anatomy, engine.choice, batch, moments),
    ]
    planned = dict.fromkeys(("device", "ram", "saved", "nvme", "scratch"), 0)
    passing = {("ram", False): "saved", ("nvme", False): "scratch"}
    for pool in found:
        if pool.is_exact or pool.tier != "device":
            planned[passing.get((pool.tier, pool.is_exact), pool.tier)] += pool.nbytes
    offloaded = engine.arrangement.offloaded
    assert not offloaded.kept_bytes
    allocated = {
        "device": engine.lanes.device_bytes,
        "ram": engine.host_bytes,
        "saved": offloaded.host_bytes,
        "nvme": 0,
        "scratch": 0,
    }
    if engine.host.has_drives:
        allocated["nvme"] = sum(engine.host.on_drives.store.drive_bytes)
        rooms = engine.arrangement.scratch, engine.arrangement.parking
        allocated["scratch"] = sum(room.nbytes for room in rooms if room is not None)
    engine.detach()
    return Bytes(planned, allocated, loss)


def refusal(case: Case, root: Path, limits: Mapping[str, int]) -> str:
    """Say why there is no room for a run; activations that find none in RAM stay on the device."""
    try:
        engine, _ = train(case, root, limits)
    except CapacityError as error:
        return str(error)
    engine.detach()
    return "some stay on the device" if engine.arrangement.offloaded.kept_bytes else "there is room"


@cache
def plain(name: str, root: Path) -> Bytes:
    """Measure a run with every function as it is, once."""
    return measure(CASES[name], root, {})


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scratch room be taken page by page, so that it can grow by one."""
    for module in (scratch, host_pools):
        monkeypatch.setattr(module, "SCRATCH_CHUNK_BYTES", PAGE_BYTES)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("pool", "name", "place"),
    [*((pool, *where) for pool, where in POOLS.items()), ("gradient_staging", "sums", "ram")],
)
def test_what_a_pool_takes_is_said_once(
    pool: str,
    name: str,
    place: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = plain(name, tmp_path_factory.getbasetemp())
    assert before.planned == before.allocated
    original = getattr(pools, pool)
    monkeypatch.setattr(pools, pool, lambda *args, **more: original(*args, **more) + MORE)
    if place != "scratch":  # its drive refuses by itself
        limits = {place: before.allocated[place]}
        assert REFUSALS[name, place] in refusal(CASES[name], tmp_path / "short", limits)
    after = measure(CASES[name], tmp_path, {})
    assert after.planned == after.allocated
    assert after.loss == before.loss
    moved = {key: after.allocated[key] - before.allocated[key] for key in before.allocated}
    assert moved[place] > 0
    assert all(difference % MORE == 0 for difference in moved.values())
    enough = {key: value for key, value in after.allocated.items() if value and key != "scratch"}
    assert measure(CASES[name], tmp_path / "enough", enough) == after
