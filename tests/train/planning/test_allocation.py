"""Memory that is not as planned is told in one sentence, and the run goes on or stops as the user chose."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import CapacityError
from megatrain.train import loop
from megatrain.train.loop import train, train_step
from megatrain.train.planning import allocation
from megatrain.train.run import Run, prepare
from tests.train.project import make_config


def misplanned(root: Path, on_mismatch: str) -> Run:
    """Prepare a run whose plan then says 4,096 bytes for the gradients."""
    run = prepare(make_config(root, memory={"on_mismatch": on_mismatch}))
    assert run.planned is not None
    plan = run.planned.plan
    pools = tuple(replace(pool, nbytes=4096) if pool.name == "gradient" else pool for pool in plan.pools)
    assert pools != plan.pools
    run.planned = replace(run.planned, plan=replace(plan, pools=pools))
    return run


def test_a_run_goes_on_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = misplanned(tmp_path, "warn")
    losses = [train_step(run).loss for _ in range(2)]
    (message,) = [record.message for record in caplog.records if "not as planned" in record.message]
    found = run.engine.host.plane_bytes["gradient"]
    assert message == (
        f"memory is not as planned: the first step has taken, in bytes, gradient {found:,} in place of "
        "4,096; the run goes on, which memory.on_mismatch=stop would not let it"
    )
    run.engine.close()
    plain = prepare(make_config(tmp_path, "plain"))
    assert [train_step(plain).loss for _ in range(2)] == losses
    plain.engine.close()


def test_a_run_stops_if_it_shall(tmp_path: Path) -> None:
    run = misplanned(tmp_path, "stop")
    with pytest.raises(
        CapacityError, match=r"gradient [\d,]+ in place of 4,096; use memory.on_mismatch=warn"
    ):
        train_step(run)
    run.engine.close()


@pytest.mark.parametrize("updates", ["deferred", "immediate"])
def test_what_fits_as_planned_is_not_refused(tmp_path: Path, updates: str) -> None:
    """Where gradients pass through a few buffers, host memory has no room for a plane of them."""
    clips = {"max_grad_norm": None} if updates == "immediate" else {}

    def prepared(out: str, **more: Any) -> Run:
        train = {"precision": "bf16", "device": "emulated", "grad_accumulation": 1}
        memory = {"boundaries": "device", "activations": "recompute", "resident_blocks": 0}
        return prepare(
            make_config(
                tmp_path,
                out,
                train=train,
                memory={**memory, **more.get("memory", {})},
                optim={**clips, **more.get("optim", {})},
            )
        )

    gradients = "host" if updates == "immediate" else "device"
    run = prepared("asked", memory={"gradients": gradients}, optim={"updates": updates})
    assert run.planned is not None
    planes = run.planned.plan.host_planes
    assert planes["staging"]
    assert "gradient" not in planes
    limit = run.planned.plan.tier_bytes("ram")
    run.engine.close()
    given = {} if updates == "deferred" else {"updates": updates}
    run = prepared("planned", memory={"host_limit": limit}, optim=given)
    train_step(run)
    assert (set(run.engine.choice.gradients), run.engine.choice.updates) == ({gradients}, updates)
    run.engine.close()


def test_state_of_a_run_before_is_let_go_of_before_memory_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in cycles: a second run in one process, as in a notebook, would find its memory taken."""
    states: list[weakref.ref[Any]] = []
    lived: list[list[bool]] = []
    prepare, machine_for = loop.prepare, allocation.machine_for

    def prepared(*args: Any, **given: Any) -> Any:
        run = prepare(*args, **given)
        states.append(weakref.ref(run.engine.host))
        return run

    def looked(*args: Any, **given: Any) -> Any:
        lived.append([state() is not None for state in states])
        return machine_for(*args, **given)

    monkeypatch.setattr(loop, "prepare", prepared)
    monkeypatch.setattr(allocation, "machine_for", looked)
    gc.disable()
    try:
        for out in ("first", "second"):
            train(make_config(tmp_path, out, train={"steps": 1}, optim={"warmup_steps": 0}))
    finally:
        gc.enable()
    assert lived == [[], [False]]
