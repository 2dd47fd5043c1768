"""Where bytes wait and when they move changes no bit: schedules, policies, fragments, rounds, residency.

The families are those with something special: tied weights, several kinds of layers, experts, dropout in
every place, a layer that enters its parts in turns.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megatrain.config.policies import POLICIES
from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine
from tests.families import FAMILIES
from tests.products import pairwise_rows
from tests.reference import Resident, assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import (
    HYPER,
    assert_same_gradients,
    assert_same_masters,
    check_parity,
    recorded,
)

REDUCED = ("llama_tied", "gemma2", "mixtral", "gpt2", "falcon", "deepseek_v3", "jamba")
MIX = ("drop_boundary", "recompute_cheap", "offload", "keep")
AXES: dict[str, tuple[Any, ...]] = {
    "activations": (
        *(name for name, policy in POLICIES.items() if policy.keeps_boundary),
        ("recompute", "drop_boundary") * 2,
        MIX,
    ),
    "updates": ("deferred", "immediate", "serial"),
    "fragments": (False, True),
    "rounds": ((1, 1), (1, 4), (2, 2), (3, 1), (2, 3)),
    "resident_layers": (0, 2, 4),
    "boundaries": ("device", "host"),
    "dropout": (False, True),
    "sums": ("device", "host"),
    "device": ("checked", "emulated"),
}
"""Rounds are (R, m): a step of R rounds of m micro-batches; (2, 3) has 5, so that the last one is short."""

FEWER = {
    **AXES,
    "activations": tuple(value for value in AXES["activations"] if value != "recompute"),
    "rounds": tuple(value for value in AXES["rounds"] if value != (2, 2)),
}
"""Without what others hold: mixtures have layers that are recomputed, (2, 3) several rounds in lockstep."""


def settings_of(row: dict[str, Any]) -> dict[str, Any]:
    """Turn a row into the arguments of `check_parity`."""
    num_rounds, lockstep = row["rounds"]
    settings = {key: value for key, value in row.items() if key != "rounds"}
    settings["num_micro_batches"] = 5 if row["rounds"] == (2, 3) else num_rounds * lockstep
    settings["lockstep"] = lockstep
    if row["updates"] == "immediate":
        settings["max_grad_norm"] = None
    return settings


def row_name(value: Any) -> str | None:
    """Name a row shortly."""
    if not isinstance(value, dict):
        return None
    policy = value["activations"] if isinstance(value["activations"], str) else "mix"
    parts = [policy, value["updates"], "R{}m{}".format(*value["rounds"]), f"r{value['resident_layers']}"]
    flags = ["fragments"] * value["fragments"] + ["dropout"] * value["dropout"] + [f"sums_{value['sums']}"]
    return "-".join([*parts, value["boundaries"], *flags, value["device"]])


ROWS = pairwise_rows(AXES)
ALWAYS = pairwise_rows(FEWER)


@pytest.mark.parametrize(("axes", "rows", "most"), [(AXES, ROWS, 40), (FEWER, ALWAYS, 24)])
def test_rows_hold_every_pair(
    axes: dict[str, tuple[Any, ...]], rows: list[dict[str, Any]], most: int
) -> None:
    for (one, ones), (other, others) in itertools.combinations(axes.items(), 2):
        for a, b in itertools.product(ones, others):
            assert any(row[one] == a and row[other] == b for row in rows), (one, a, other, b)
    assert len(rows) <= 1.2 * len(axes["activations"]) * len(axes["rounds"])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("family", "row"),
    [(REDUCED[number % len(REDUCED)], row) for number, row in enumerate(ALWAYS)],
    ids=row_name,
)
def test_every_pair_of_settings_equals_resident(family: str, row: dict[str, Any]) -> None:
    check_parity(family, **settings_of(row))


@pytest.mark.parity
@pytest.mark.parametrize("row", ROWS, ids=row_name)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_row_equals_resident(family: str, row: dict[str, Any]) -> None:
    check_parity(family, **settings_of(row))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.parity] if number % 4 else [])
        for number, family in enumerate(FAMILIES)
    ],
)
def test_lockstep_and_fragments_of_every_family_equal_resident(family: str) -> None:
    check_parity(family, num_micro_batches=3, lockstep=3, fragments=True, dropout=True, padded=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_seeds", [3, pytest.param(100, marks=pytest.mark.parity)])
@pytest.mark.parametrize("family", ["llama_tied", "mixtral"])
def test_jitter_seeds_give_the_same_bits(family: str, num_seeds: int) -> None:
    """Copies, saves, and updates in threads of their own, each delayed at random: never another number."""
    run = recorded(family, False, False, 4, 0.5)
    for seed in range(num_seeds):
        row = ROWS[seed % len(ROWS)]
        machine = EmulatedMachine(seed=seed, jitter_s=2e-4)
        engine = attach_plainly(
            make_model(FAMILIES[family]()),
            device=EmulatedLanes(machine),
            activations=row["activations"],
            boundaries=row["boundaries"],
            fragments=row["fragments"],
            resident_layers=row["resident_layers"],
            sums=row["sums"],
            lockstep=1 + seed % 4,
        )
        engine.arrangement.offloaded._min_bytes = 1
        optimizer = engine.adamw(**HYPER, max_grad_norm=0.5, updates=("deferred", "serial")[seed % 2])
        norms = []
        for step in range(2):
            batches, seeds = run.batches(step)
            expected, _, _ = run.round(step)
            assert_same_bits(engine.forward_backward(batches, seeds=seeds), expected, f"seed {seed}")
            norms.append(optimizer.step().grad_norm)
            masters = run.masters(step, norms[-1])
        for name, master in engine.named_masters():
            assert_same_bits(master, masters[name], f"{name}, seed {seed}")
        engine.lanes.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("settings", [{}, {"fragments": True, "resident_layers": 2, "activations": MIX}])
def test_bf16_and_fp32_in_lockstep_equal_the_reference_loop(precision: str, settings: dict[str, Any]) -> None:
    """Gradients of a round add up in fp32 and are rounded once; on the device as on the host."""
    model = make_model(FAMILIES["llama_tied"]())
    reference = Resident(model, precision=precision, **HYPER)
    engine = attach_plainly(model, device="checked", precision=precision, lockstep=2, **settings)
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    for step in range(4):
        batches = make_batches(1 + step, seed=step)
        seeds = list(range(len(batches)))
        expected = reference.forward_backward(batches, seeds)
        assert_same_bits(engine.forward_backward(batches, seeds=seeds), expected, f"loss of step {step}")
        assert_same_gradients(engine, reference.sums)
        stats = optimizer.step()
        reference.step(stats.grad_norm, 0.5)
    assert_same_masters(engine, reference)
