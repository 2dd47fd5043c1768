"""Streamed == resident, bit for bit, in fp32 on the CPU: loss, every gradient, every weight."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine
from tests.families import FAMILIES
from tests.reference import Resident, assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER, assert_same_gradients, check_parity, family_config, has_dropout

MIX = ("keep", "recompute", "recompute", "keep")
POLICIES: tuple[Any, ...] = ("recompute", "keep", MIX)
AXES: dict[str, tuple[Any, ...]] = {
    "num_slots": (1, 2, 3),
    "activations": POLICIES,
    "dropout": (False, True),
    "padded": (False, True),
    "num_micro_batches": (1, 4),
}


def pairwise_rows() -> list[tuple[str, dict[str, Any]]]:
    """Give every family each value of each axis in three runs, and all together each pair of values."""
    rows = []
    for number, family in enumerate(FAMILIES):
        for slots in range(3):
            chosen = {
                "num_slots": slots + 1,
                "activations": POLICIES[(number + slots) % 3],
                "dropout": (slots == number % 3) ^ bool(number & 1),
                "padded": (slots == (number + 1) % 3) ^ bool(number & 2),
                "num_micro_batches": 4 if (slots == (number // 2 + 2) % 3) ^ bool(number & 4) else 1,
            }
            rows.append((family, chosen))
    return rows


def row_name(value: Any) -> str | None:
    """Name a row of the table shortly."""
    if not isinstance(value, dict):
        return None
    policy = value["activations"] if isinstance(value["activations"], str) else "mix"
    flags = [flag for flag in ("dropout", "padded") if value[flag]]
    return "-".join([f"s{value['num_slots']}", policy, *flags, f"m{value['num_micro_batches']}"])


@pytest.mark.parametrize(
    ("family", "device", "steps"),
    [
        pytest.param(family, *case, marks=[] if case[0] == "checked" or is_here else [pytest.mark.parity])
        for number, family in enumerate(FAMILIES)
        for case, is_here in ((("checked", 2), True), (("emulated", 2), number % 4 == 0), (("cpu", 2), False))
    ],
)
def test_family_equals_resident(family: str, device: str, steps: int) -> None:
    check_parity(family, device=device, steps=steps)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "row"),
    [
        pytest.param(
            *row,
            marks=[] if number % 3 == number // 3 % 3 else [pytest.mark.parity],
            id=f"{row[0]}-{row_name(row[1])}",
        )
        for number, row in enumerate(pairwise_rows())
    ],
)
def test_every_pair_of_settings_equals_resident(family: str, row: dict[str, Any]) -> None:
    check_parity(family, **row)


def test_rows_hold_every_pair_of_settings() -> None:
    """The table above is what it claims to be."""
    rows = pairwise_rows()
    for (one, ones), (other, others) in itertools.combinations(AXES.items(), 2):
        for pair in itertools.product(ones, others):
            assert any((row[one], row[other]) == pair for _, row in rows), (one, other, pair)
    for family, (axis, values) in itertools.product(FAMILIES, AXES.items()):
        assert {row[axis] for name, row in rows if name == family} == set(values), (family, axis)


def test_most_families_have_dropout() -> None:
    """The dropout rows test something."""
    assert [family for family in FAMILIES if not has_dropout(family)] == ["mamba2"]


@pytest.mark.parity
@pytest.mark.parametrize("device", ["checked", "cpu", "emulated"])
@pytest.mark.parametrize("values", list(itertools.product(*AXES.values())), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_full_product_equals_resident(family: str, values: tuple[Any, ...], device: str) -> None:
    check_parity(family, device=device, **dict(zip(AXES, values, strict=True)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("max_grad_norm", [None, 1e9])
def test_unclipped_training_equals_resident(max_grad_norm: float | None) -> None:
    check_parity("llama_tied", max_grad_norm=max_grad_norm, num_micro_batches=2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_generators_that_go_on_equal_resident(num_micro_batches: int, activations: str) -> None:
    """Without seeds, dropout draws from torch's generator as it would in a resident loop."""
    model = make_model(family_config("gpt2", dropout=True))
    reference = Resident(model, **HYPER)
    engine = attach_plainly(model, device="checked", activations=activations)
    optimizer = engine.adamw(**HYPER, max_grad_norm=None)
    expected = []
    torch.manual_seed(7)
    for step in range(3):
        loss = reference.forward_backward(make_batches(num_micro_batches, seed=step))
        expected.append((loss, dict(reference.sums)))
        reference.step(0.0, None)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    for step, (expected_loss, gradients) in enumerate(expected):
        loss = engine.forward_backward(make_batches(num_micro_batches, seed=step))
        assert_same_bits(loss, expected_loss, f"loss of step {step}")
        assert_same_gradients(engine, gradients, f"in step {step}")
        optimizer.step()
    assert torch.equal(torch.get_rng_state(), state), "the generator is not where a resident loop leaves it"
    for name, master in engine.named_masters():
        assert_same_bits(master, reference.master(name), name)


def test_dropout_is_drawn_anew_in_every_micro_batch() -> None:
    """A seed per micro-batch: equal seeds give equal masks, other seeds other ones."""
    engine = attach_plainly(make_model(family_config("gpt2", dropout=True)), device="checked")
    batch = make_batches(1)[0]
    same = [float(engine.forward_backward([batch], seeds=[seed])) for seed in (1, 1, 2)]
    assert same[0] == same[1] != same[2]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_gradient_buffers", [2, 3])
def test_more_gradient_buffers_change_nothing(num_gradient_buffers: int) -> None:
    model = make_model(FAMILIES["llama"]())
    reference = Resident(model, **HYPER)
    lanes = EmulatedLanes(EmulatedMachine(seed=3))
    engine = attach_plainly(model, device=lanes, num_gradient_buffers=num_gradient_buffers)
    for step in range(2):
        expected = reference.forward_backward(make_batches(2, seed=step))
        assert_same_bits(engine.forward_backward(make_batches(2, seed=step)), expected)
        assert_same_gradients(engine, reference.sums)
    engine.detach()
