"""Streamed == resident, bit for bit, in fp32 on the CPU: loss, every gradient, every weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatrain
from tests.families import FAMILIES
from tests.reference import Resident, assert_same_bits, make_batches, make_model

HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def check_parity(
    family: str,
    *,
    device: Any = "checked",
    num_slots: int = 2,
    activations: Any = "recompute",
    num_micro_batches: int = 1,
    padded: bool = False,
    dropout: bool = False,
    steps: int = 5,
    max_grad_norm: float | None = 0.5,
) -> None:
    """Train the family streamed and resident, and compare everything after every step."""
    config = FAMILIES[family]()
    if dropout:
        for key in list(config.to_dict()):
            if (
                key.endswith(("dropout", "pdrop", "dropout_rate", "dropout_prob"))
                and key != "classifier_dropout"
            ):
                setattr(config, key, 0.1)
    model = make_model(config)
    reference = Resident(model, **HYPER)
    engine = megatrain.attach(model, device=device, num_slots=num_slots, activations=activations)
    optimizer = engine.adamw(**HYPER, max_grad_norm=max_grad_norm)
    for step in range(steps):
        batches = make_batches(num_micro_batches, seed=step, padded=padded)
        seeds = [100 * step + number for number in range(num_micro_batches)]
        expected_loss = reference.forward_backward(batches, seeds)
        loss = engine.forward_backward(batches, seeds=seeds)
        assert_same_bits(loss, expected_loss, f"loss of step {step}")
        gradients = dict(engine.named_gradients())
        assert gradients.keys() == reference.sums.keys()
        for name, gradient in gradients.items():
            assert_same_bits(gradient, reference.sums[name], f"gradient of {name}, step {step}")
        stats = optimizer.step()
        assert stats.grad_norm == pytest.approx(reference.norm(), rel=1e-6)
        reference.step(stats.grad_norm, max_grad_norm)
        for name, master in engine.named_masters():
            assert_same_bits(master, reference.master(name), f"{name} after step {step}")
    engine.detach()
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter.detach(), reference.parameters[name].detach(), name)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_resident(family: str) -> None:
    check_parity(family)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("activations", ["recompute", "keep", ["keep", "recompute", "recompute", "keep"]])
def test_slots_and_activations_equal_resident(num_slots: int, activations: Any) -> None:
    check_parity(
        "llama_tied", num_slots=num_slots, activations=activations, num_micro_batches=2, dropout=True
    )


def test_torch_threads_are_as_found() -> None:
    assert torch.get_num_threads() >= 1
