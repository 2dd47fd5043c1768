"""Boundaries that are dropped or wait on the host: what it frees, what it costs, and when it falls back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from megatrain.plan.program.schedule import schedule
from megatrain.plan.program.visits import Round, round_visits
from megatrain.stream.engine import Engine
from tests.reference import Resident, assert_same_bits, make_batches
from tests.stream.execute.test_memory import LiveStorages, deep_config
from tests.stream.runs import (
    assert_same_gradients,
    assert_same_round,
    assert_same_steps,
    family_config,
    start,
)

LAYERS = 8
ROWS, TOKENS = 2, 64
BOUNDARY = ROWS * TOKENS * 64 * 4
"""Bytes of a layer's input: 32 KiB, enough to be worth a copy."""


class LiveBoundaries(LiveStorages):
    """Tells the live storages that are as large as a boundary from others."""

    @property
    def live(self) -> int:
        return sum(nbytes == BOUNDARY for ref, nbytes in self._live.values() if not ref.expired())


def deep_start(
    activations: str | Sequence[str], **settings: Any
) -> tuple[PreTrainedModel, Resident, Engine, Any]:
    return start(config=deep_config(LAYERS), activations=activations, **settings)


def live_after_forward(activations: str | Sequence[str], **settings: Any) -> tuple[int, int]:
    """Count boundary-sized storages that a forward leaves behind, and the most bytes of its backward."""
    model, _, engine, _ = deep_start(activations, **settings)
    batch = make_batches(1, rows=ROWS, tokens=TOKENS)[0]
    engine.forward_backward([batch])
    engine.zero_grad()
    with LiveBoundaries() as made:
        loss = model(**batch).loss
        live = made.live
        made.peak = 0
        loss.backward()
    engine.detach()
    return live, made.peak


# -- memory --------------------------------------------------------------------------------------------------


def test_a_dropped_boundary_is_freed() -> None:
    """The live bytes after a forward fall by one boundary per dropped layer, no more and no less."""
    kept, kept_peak = live_after_forward("recompute")
    assert kept >= LAYERS
    for pattern, dropped in (
        (["recompute", "drop_boundary"] * 4, 4),
        (["recompute", "drop_boundary", "drop_boundary", "drop_boundary"] * 2, 6),
    ):
        live, peak = live_after_forward(pattern)
        assert live == kept - dropped, pattern
        if pattern == ["recompute", "drop_boundary"] * 4:
            assert peak < kept_peak, "what a chain makes is dropped with its layer"


def test_boundaries_on_the_host_leave_the_device() -> None:
    """All but the last layer's, which is needed first, and the one before, which is on its way."""
    kept, kept_peak = live_after_forward("recompute")
    live, peak = live_after_forward("recompute", boundaries="host")
    assert live == kept - (LAYERS - 2)
    assert peak < kept_peak - (LAYERS - 4) * BOUNDARY


@pytest.mark.parametrize("lockstep", [1, 2])
def test_bytes_of_boundaries_on_the_host(lockstep: int) -> None:
    """Every boundary but the last layer's goes out once; what had left the device comes back once."""
    _, reference, engine, _ = deep_start("recompute", boundaries="host", lockstep=lockstep)
    offloaded = engine.arrangement.offloaded
    for step in range(2):
        saved, restored = offloaded.saved_bytes, offloaded.restored_bytes
        assert_same_round(engine, reference, make_batches(lockstep, seed=step, rows=ROWS, tokens=TOKENS))
        assert offloaded.saved_bytes - saved == lockstep * (LAYERS - 1) * BOUNDARY
        assert offloaded.restored_bytes - restored == (lockstep * (LAYERS - 1) - 1) * BOUNDARY
        assert offloaded.host_bytes == lockstep * (LAYERS - 1) * BOUNDARY
        assert not offloaded._visits
    assert offloaded.kept_bytes == 0


# -- cost ----------------------------------------------------------------------------------------------------


def count_forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of every layer whose own forward runs, recomputations included."""
    calls: list[int] = []
    forward = LlamaDecoderLayer.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self.self_attn.layer_idx)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", counted)
    return calls


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("dropped", "lockstep"),
    [((), 1), ((1,), 3), ((7,), 1), ((1, 3, 5, 7), 3), ((2, 3, 4), 1), (tuple(range(8)), 1), ((0, 4, 5), 3)],
    ids=str,
)
def test_a_dropped_boundary_costs_one_forward_of_the_layer_before(
    dropped: tuple[int, ...], lockstep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No layer runs twice for boundaries, however long the chain; fetches are as the program says."""
    calls = count_forwards(monkeypatch)
    policies = ["drop_boundary" if number in dropped else "recompute" for number in range(LAYERS)]
    _, reference, engine, _ = deep_start(policies, lockstep=lockstep)
    for step in range(2):
        batches = make_batches(lockstep, seed=step)
        expected = reference.forward_backward(batches)
        calls.clear()
        fetches = engine.executor.counts.fetches
        contents = list(engine.executor.contents)
        assert_same_bits(engine.forward_backward(batches), expected, "loss")
        extra = [number + 1 in dropped for number in range(LAYERS)]
        per_layer = [calls.count(number) for number in range(LAYERS)]
        assert per_layer == [lockstep * (2 + flag) for flag in extra]
        visits = round_visits(engine.arrangement.rounds.plans, Round(num_micro_batches=lockstep))
        program = schedule(
            visits,
            engine.executor.spec.sizes,
            contents,
            num_gradient_buffers=engine.choice.num_gradient_buffers,
        )
        assert engine.executor.counts.fetches - fetches == program.count("fetch")
        assert_same_gradients(engine, reference.sums)
    assert not engine.arrangement.rounds._orders, "the model took another way than the program"


# -- random numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lockstep", [1, 2])
def test_a_boundary_that_is_made_again_has_the_same_dropout(lockstep: int) -> None:
    config = family_config("gpt2", dropout=True)
    _, reference, engine, optimizer = start(config=config, activations="drop_boundary", lockstep=lockstep)
    assert_same_steps(engine, optimizer, reference, num_micro_batches=2)


# -- fall-back -----------------------------------------------------------------------------------------------


def edit_in_place(_: nn.Module, args: tuple[Tensor, ...]) -> None:
    args[0].mul_(1.25)


def edit(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] * 1.25, *args[1:])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("hook", [edit_in_place, edit])
@pytest.mark.parametrize("settings", [{}, {"lockstep": 2}, {"boundaries": "host"}])
def test_hidden_states_edited_between_layers_are_kept_and_exact(
    hook: Any, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The input is not what the layer before returned, so making that again would not do. Said once."""

    def prepare(model: PreTrainedModel) -> None:
        model.model.layers[2].register_forward_pre_hook(hook)

    _, reference, engine, optimizer = start(
        config=deep_config(4), prepare=prepare, activations="drop_boundary", **settings
    )
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        assert_same_steps(engine, optimizer, reference, steps=2, num_micro_batches=2)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("megatrain")]
    assert messages == [
        "model.layers.2: its input is not just the output of the layer before, so it is kept in place of "
        "being dropped"
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", [{}, {"lockstep": 2}, {"boundaries": "host"}])
@pytest.mark.parametrize("activations", ["drop_boundary", "recompute", "offload"])
def test_hidden_states_by_keyword_are_exact(
    activations: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A layer that is given everything by name: its boundary cannot be dropped, and this is said."""

    def by_name(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        return (), {"hidden_states": args[0], **kwargs}

    def prepare(model: PreTrainedModel) -> None:
        model.model.layers[2].register_forward_pre_hook(by_name, with_kwargs=True)

    _, reference, engine, optimizer = start(
        config=deep_config(4), prepare=prepare, activations=activations, **settings
    )
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        assert_same_steps(engine, optimizer, reference, steps=2, num_micro_batches=2)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("megatrain")]
    named = "model.layers.2: its input is given by name, so it stays on the device"
    is_kept = activations == "drop_boundary" or (activations == "recompute" and "boundaries" in settings)
    assert messages.count(named) == is_kept


def test_two_forwards_and_one_backward_with_dropped_boundaries_are_exact() -> None:
    """Two passes at the same time have boundaries of their own."""
    model, reference, engine, _ = start(config=deep_config(4), activations="drop_boundary", precision="fp32")
    first, second = make_batches(2)
    for net in (model, reference.model):
        (net(**first).loss + 2 * net(**second).loss).backward()
    for name, gradient in engine.named_gradients():
        expected = reference.parameters[name].grad
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
