"""The size of micro-batches and the budget of compiled layers that a plan takes, of those looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.config import build_config
from megatrain.config.choice import StepBatch
from megatrain.plan.search.request import Request
from megatrain.train.planning import micro_batches
from megatrain.train.planning.micro_batches import with_fastest_size
from tests.plan.anatomies import Shape, llama_like, machine

SETTINGS: dict[str, Any] = {
    "model": {"path": "model"},
    "data": {"path": "data.txt", "seq_len": 128},
    "train": {"tokens_per_step": 8 * 128, "steps": 1000, "activation_budget": 1.0},
}


class Counted:
    """A model that is counted at once."""

    def count(self, *_: object) -> Any:
        """Return the same anatomy for every size."""
        return llama_like(Shape(num_layers=2), micro_batch_size=1, seq_len=128)

    def count_each(self, *_: object) -> None:
        """Count nothing before it is asked for."""


def chosen(looked: dict[int, float], whole: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the size that is taken where looks and whole searches find these seconds, and those searched."""
    searched: list[int] = []

    def found(seconds: dict[int, float], request: Request) -> Any:
        size = request.batch.micro_batch_size
        return SimpleNamespace(choice=size, step=SimpleNamespace(step_s=seconds[size]))

    def search(request: Request) -> Any:
        searched.append(request.batch.micro_batch_size)
        assert request.start == request.batch.micro_batch_size, "it begins with what the look has found"
        return found(whole, request)

    monkeypatch.setattr(micro_batches, "look", lambda request, _: found(looked, request))
    monkeypatch.setattr(micro_batches, "search", search)

    def ask(config: Any, anatomy: Any) -> Request:
        size = config.train.micro_batch_size
        batch = StepBatch(micro_batch_size=size, seq_len=128, num_micro_batches=8 // size)
        return Request(spec=machine(), anatomy=anatomy, batch=batch)

    model: Any = Counted()
    config, start = with_fastest_size(build_config(SETTINGS), model, "cuda", ask)
    assert config.train.micro_batch_size == start
    return start, sorted(searched)


def test_the_best_two_looks_are_searched_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = {1: 3.0, 2: 1.0, 3: 2.5, 4: 1.01, 5: 2.5, 6: 2.5, 7: 2.5, 8: 2.0}
    assert chosen(looked, {2: 1.0, 4: 0.9}, monkeypatch) == (4, [2, 4])
    assert chosen(looked, {2: 0.99, 4: 0.989}, monkeypatch) == (2, [2, 4]), "alike: the smaller one"


def test_a_look_that_is_far_ahead_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = {1: 3.0, 2: 1.0, 3: 2.5, 4: 1.1, 5: 2.5, 6: 2.5, 7: 2.5, 8: 2.0}
    assert chosen(looked, {}, monkeypatch) == (2, [])
