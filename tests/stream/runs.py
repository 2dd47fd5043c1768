"""Streamed runs held against resident ones; a resident run is made once and shared by all comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from megatrain.config.adaptation import Adaptation, LoraChoice
from megatrain.model.adapters.adapt import adapt
from megatrain.stream.engine import Engine
from tests.families import FAMILIES
from tests.reference import Batch, Resident, assert_same_bits, attach_plainly, make_batches, make_model

HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

_DROPOUT = ("dropout", "pdrop", "dropout_rate", "dropout_prob")
_NOT_OURS = ("classifier_dropout", "summary_first_dropout")


def add_adapters(model: PreTrainedModel) -> None:
    """Give a model adapters that change what it computes, for `start`."""
    torch.manual_seed(1)
    adapt(model, Adaptation(lora=LoraChoice(r=4, alpha=8.0)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model.train()


def start(
    family: str = "llama_tied",
    *,
    prepare: Callable[[PreTrainedModel], None] | None = None,
    max_grad_norm: float | None = 0.5,
    precision: str = "fp32",
    config: PretrainedConfig | None = None,
    updates: str = "deferred",
    **settings: Any,
) -> tuple[PreTrainedModel, Resident, Engine, Any]:
    """Make a family's model twice, resident and attached, with the same optimizer."""
    model = make_model(config or FAMILIES[family]())
    if prepare is not None:
        prepare(model)
    reference = Resident(model, precision=precision, **HYPER)
    engine = attach_plainly(model, **{"device": "checked", "precision": precision, **settings})
    return model, reference, engine, engine.adamw(**HYPER, max_grad_norm=max_grad_norm, updates=updates)


def family_config(family: str, *, dropout: bool = False) -> PretrainedConfig:
    """Make a family's config, with every dropout of its blocks at 0.1 if wanted."""
    config = FAMILIES[family]()
    if dropout:
        for key in config.to_dict():
            if key.endswith(_DROPOUT) and key not in _NOT_OURS:
                setattr(config, key, 0.1)
    return config


def has_dropout(family: str) -> bool:
    """Whether the family knows dropout at all."""
    return any(key.endswith(_DROPOUT) and key not in _NOT_OURS for key in FAMILIES[family]().to_dict())


def assert_same_gradients(engine: Engine, expected: dict[str, Tensor], what: str = "") -> None:
    """Assert that the engine's gradients are exactly `expected`, by name and bit."""
    gradients = dict(engine.named_gradients())
    assert gradients.keys() == expected.keys(), what
    for name, gradient in gradients.items():
        assert_same_bits(gradient, expected[name], f"gradient of {name} {what}")


def assert_same_round(
    engine: Engine, reference: Resident, batches: Sequence[Batch], seeds: Sequence[int] | None = None
) -> Tensor:
    """Run one step forward and backward in both, and compare the loss and every gradient."""
    expected = reference.forward_backward(batches, seeds)
    loss = engine.forward_backward(batches, seeds=seeds)
    assert_same_bits(loss, expected, "loss")
    assert_same_gradients(engine, reference.sums)
    return loss


def assert_backwards_add_up(
    engine: Engine, optimizer: Any, reference: Resident, *, precision: str, reads: bool
) -> None:
    """Take steps of three backwards of the caller's, each foreseen as the last, and compare everything.

    Args:
        engine: Of the model.
        optimizer: Of the engine, which clips to 0.5.
        reference: Its resident twin.
        precision: Of both.
        reads: The gradients are read between the backwards too, which changes none.
    """
    for step in range(2):
        batches = make_batches(3, seed=step)
        for batch in batches:
            (engine.model(**batch, num_items_in_batch=torch.tensor(90)).loss).backward()
            if reads:
                assert all(gradient.isfinite().all() for _, gradient in engine.named_gradients())
        reference.forward_backward(batches)
        if precision == "fp32":  # in bf16 the first backward's gradient was rounded, as with the host's plane
            assert_same_gradients(engine, reference.sums)
        found = {name: gradient.clone() for name, gradient in engine.named_gradients()}
        norm = optimizer.step().grad_norm
        sums = sum(float(gradient.double().square().sum()) for gradient in found.values())
        assert norm == pytest.approx(math.sqrt(sums), rel=1e-6)
        reference.sums = found
        reference.step(norm, 0.5)
        assert_same_masters(engine, reference)


def assert_same_steps(
    engine: Engine,
    optimizer: Any,
    reference: Resident,
    *,
    steps: int = 2,
    first: int = 0,
    num_micro_batches: int = 1,
    max_grad_norm: float | None = 0.5,
) -> None:
    """Train both for some steps, and compare loss, gradients, norm and masters after each."""
    for step in range(first, first + steps):
        batches = make_batches(num_micro_batches, seed=step)
        seeds = [100 * step + number for number in range(num_micro_batches)]
        assert_same_round(engine, reference, batches, seeds)
        stats = optimizer.step()
        assert stats.grad_norm == pytest.approx(reference.norm(), rel=1e-6)
        reference.step(stats.grad_norm, max_grad_norm)
        assert_same_masters(engine, reference)


def assert_same_masters(engine: Engine, reference: Resident) -> None:
    """Compare every trained parameter's fp32 value."""
    masters = dict(engine.named_masters())
    for name in reference.masters:
        assert_same_bits(masters[name], reference.master(name), name)


class RecordedRun:
    """A resident run whose steps are computed once, when first asked for.

    The reference clips by the norm that the engine found. It is the same for every lane, slot count and
    policy, so the first streamed run gives it and the others must find it again.
    """

    def __init__(
        self,
        family: str,
        *,
        dropout: bool,
        padded: bool,
        num_micro_batches: int,
        max_grad_norm: float | None,
        num_runs: int = 1,
    ) -> None:
        self.model: PreTrainedModel = make_model(family_config(family, dropout=dropout))
        self._resident = Resident(self.model, num_runs=num_runs, **HYPER)
        self._padded = padded
        self._num_micro_batches = num_micro_batches
        self._max_grad_norm = max_grad_norm
        self._rounds: list[tuple[Tensor, dict[str, Tensor], float]] = []
        self._norms: list[float] = []
        self._masters: list[dict[str, Tensor]] = []

    def batches(self, step: int) -> tuple[list[Batch], list[int]]:
        """Return a step's micro-batches and their seeds."""
        batches = make_batches(self._num_micro_batches, seed=step, padded=self._padded)
        return batches, [100 * step + number for number in range(self._num_micro_batches)]

    def round(self, step: int) -> tuple[Tensor, dict[str, Tensor], float]:
        """Return the loss, the gradients and torch's norm of a step; the steps before it must be done."""
        if step == len(self._rounds):
            assert len(self._norms) == step
            loss = self._resident.forward_backward(*self.batches(step))
            sums = {name: value.clone() for name, value in self._resident.sums.items()}
            self._rounds.append((loss, sums, self._resident.norm()))
        return self._rounds[step]

    def masters(self, step: int, grad_norm: float) -> dict[str, Tensor]:
        """Return the masters after a step whose gradients had this norm."""
        if step == len(self._norms):
            self._resident.step(grad_norm, self._max_grad_norm)
            self._norms.append(grad_norm)
            masters = {name: self._resident.master(name).clone() for name in self._resident.masters}
            self._masters.append(masters)
        assert self._norms[step] == grad_norm, "the norm is not that of the first streamed run"
        return self._masters[step]


@lru_cache(maxsize=64)
def recorded(
    family: str,
    dropout: bool,
    padded: bool,
    num_micro_batches: int,
    max_grad_norm: float | None,
    num_runs: int = 1,
) -> RecordedRun:
    """Return the one resident run of these settings."""
    return RecordedRun(
        family,
        dropout=dropout,
        padded=padded,
        num_micro_batches=num_micro_batches,
        max_grad_norm=max_grad_norm,
        num_runs=num_runs,
    )


def check_parity(
    family: str,
    *,
    device: Any = "checked",
    num_micro_batches: int = 1,
    padded: bool = False,
    dropout: bool = False,
    steps: int = 2,
    max_grad_norm: float | None = 0.5,
    updates: str = "deferred",
    num_runs: int = 1,
    **settings: Any,
) -> None:
    """Train the family streamed, and compare everything after every step with the resident run.

    `settings` go to `megatrain.attach`.
    """
    reference = recorded(family, dropout, padded, num_micro_batches, max_grad_norm, num_runs)
    model = make_model(family_config(family, dropout=dropout))
    engine = attach_plainly(
        model, device=device, num_micro_batches=num_micro_batches, num_runs=num_runs, **settings
    )
    engine.arrangement.offloaded._min_bytes = 1  # tiny tensors too, or nothing would be copied
    optimizer = engine.adamw(**HYPER, max_grad_norm=max_grad_norm, updates=updates)
    masters: dict[str, Tensor] = {}
    for step in range(steps):
        batches, seeds = reference.batches(step)
        expected_loss, gradients, norm = reference.round(step)
        loss = engine.forward_backward(batches, seeds=seeds)
        assert_same_bits(loss, expected_loss, f"loss of step {step}")
        if updates != "immediate":
            assert_same_gradients(engine, gradients, f"in step {step}")
        stats = optimizer.step()
        assert stats.grad_norm == pytest.approx(norm, rel=1e-6)
        masters = reference.masters(step, stats.grad_norm)
        if step == steps - 1 or updates == "serial":
            for name, master in engine.named_masters():
                assert_same_bits(master, masters[name], f"{name} after step {step}")
    engine.detach()
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter.detach(), masters[name], name)
