"""Passes without gradients run together: the bits of single ones, and each layer fetched once for all."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.config.choice import StepBatch
from megatrain.errors import ConfigError
from megatrain.stream.engine import Engine
from megatrain.stream.evaluate import ids_of, losses
from megatrain.stream.forward.shared_state import SharedStateError
from tests.families import FAMILIES
from tests.products import every_value
from tests.reference import assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER, assert_same_steps, start


def logits_of(model: Any, batch: Any) -> Tensor:
    found: Tensor = model(**batch).logits
    return found


def alone(model: Any, batches: list[Any]) -> list[Tensor]:
    """Return what single passes give."""
    with torch.no_grad():
        return [logits_of(model, batch) for batch in batches]


@contextmanager
def counted(engine: Engine) -> Iterator[list[int]]:
    """Yield a list that will have the number of fetches, and the bytes of all copies to the device."""
    found: list[int] = []
    before = engine.counts.fetches, engine.counts.fetch_bytes
    yield found
    found += [engine.counts.fetches - before[0], engine.counts.fetch_bytes - before[1]]


@every_value(
    family=["llama", "mixtral", "gpt2"],
    resident_layers=[0, 1],
    outer_streams=[False, True],
    fragments=[False, True],
    precision=["fp32", "bf16"],
    num_slots=[2, 3],
)
def test_calls_together_have_the_bits_of_single_ones(
    family: str, resident_layers: int, outer_streams: bool, fragments: bool, precision: str, num_slots: int
) -> None:
    """Of different lengths; streamed blocks are fetched once, and training goes on as if nothing had been."""
    settings: dict[str, Any] = {
        "resident_layers": resident_layers,
        "outer_streams": outer_streams and family == "llama",
        "fragments": fragments,
        "num_slots": num_slots,
        "precision": precision,
    }
    model, reference, engine, optimizer = start(family, **settings)
    assert_same_steps(engine, optimizer, reference, steps=1)
    batches = [make_batches(1, seed=n, tokens=8 + n, padded=n > 2)[0] for n in range(5)]
    model.eval()
    expected = alone(model, batches)
    with counted(engine) as found:
        together = engine.together.run([partial(logits_of, model, batch) for batch in batches])
    for number, (one, other) in enumerate(zip(together, expected, strict=True)):
        assert_same_bits(one, other, f"logits {number}")
        assert not one.requires_grad
    spec = engine.executor.spec
    streamed = [block for block, size in enumerate(spec.sizes) if size.is_streamed]
    # what the slots hold of the passes before need not come again
    assert len(streamed) - num_slots <= found[0] <= len(streamed)
    assert len(streamed) >= 3
    model.train()
    assert_same_steps(engine, optimizer, reference, first=1, steps=1)


def test_calls_of_several_passes_are_foreseen_once_they_were_seen() -> None:
    model = make_model(FAMILIES["llama"]()).eval()
    engine = attach_plainly(model, device="checked", outer_streams=True)
    improvised: list[int] = []
    improvise = engine.executor._improvise
    done: list[int] = []

    def note(*given: Any, **named: Any) -> Any:
        improvised.append(len(done))
        return improvise(*given, **named)

    engine.executor._improvise = note  # type: ignore[method-assign]

    def call(batch: Any) -> Tensor:
        first = logits_of(model, batch)
        return first + logits_of(model, {"input_ids": batch["input_ids"].flip(1)})

    batches = make_batches(3)
    with torch.no_grad():
        expected = [call(batch) for batch in batches]
    num_blocks = sum(size.is_streamed for size in engine.executor.spec.sizes)
    improvised.clear()
    while len(done) < 3:
        with counted(engine) as found:
            together = engine.together.run([partial(call, batch) for batch in batches])
        for one, other in zip(together, expected, strict=True):
            assert_same_bits(one, other, "sum of logits")
        assert found[0] <= 2 * num_blocks
        done.append(found[0])
    assert set(improvised) == {0}


def test_losses_of_many_batches_fetch_each_layer_once() -> None:
    """Seven batches of a row, in the tokens of one round of two micro-batches of a longer row."""
    model = make_model(FAMILIES["llama"]()).eval()
    batch = StepBatch(micro_batch_size=1, seq_len=64, num_micro_batches=2)
    engine = attach_plainly(model, device="checked", lockstep=2, batch=batch)
    batches = make_batches(7, rows=1)
    with torch.no_grad():
        expected = [model(**one).loss for one in batches]
    with counted(engine) as found:
        told = list(losses(engine, batches))
    assert [count for _, count in told] == [15] * 7
    for one, other in zip(told, expected, strict=True):
        assert_same_bits(one[0], other, "loss")
    assert found[0] <= 4 < 7 * 4  # of four layers


def test_batches_are_grouped_by_the_room_that_there_is() -> None:
    model = make_model(FAMILIES["llama"]())
    batches = make_batches(5, rows=1, tokens=10)
    large = make_batches(1, rows=3, tokens=30)

    def sizes(engine: Engine, *given: Any) -> list[int]:
        return [len(group) for group in engine.together.groups(given, ids_of)]

    engine = attach_plainly(
        model, lockstep=2, batch=StepBatch(micro_batch_size=1, seq_len=10, num_micro_batches=2)
    )
    assert sizes(engine, *batches) == [2, 2, 1]
    engine.together.planned_tokens = 45
    assert sizes(engine, *batches) == [4, 1]
    assert sizes(engine, *large, *batches[:2], *large) == [1, 2, 1]
    engine.together.planned_tokens, engine.together.micro_batch_tokens = 0, None
    assert sizes(engine, *large * 3) == [2, 1]  # of steps of which nothing is known: as many as a round has


def test_a_plan_says_how_many_pass_together() -> None:
    """More than a round has, since nothing is kept for a backward; another choice asks anew."""
    import megatrain

    model = make_model(FAMILIES["llama"]())
    batch = StepBatch(micro_batch_size=1, seq_len=32, num_micro_batches=2)
    engine = megatrain.attach(model, batch=batch, activations="keep", lockstep=1, compile="off")
    assert engine.together.planned_tokens >= 32
    assert engine.together.planned_tokens % 32 == 0
    assert engine.together.fit([engine.together.planned_tokens])
    engine.reconfigure(engine.choice)
    assert engine.together.planned_tokens == 0


def test_the_first_pass_after_a_step_fetches_what_was_updated(caplog: pytest.LogCaptureFixture) -> None:
    """As the planner's list of it does."""
    model, reference, engine, optimizer = start("llama", lockstep=2, num_micro_batches=2)
    assert_same_steps(engine, optimizer, reference, steps=1, num_micro_batches=2)
    from megatrain.plan.program.step import visits_program
    from megatrain.plan.program.visits import pass_visits

    spec = engine.executor.spec
    visits = pass_visits(spec.layers, 3, ends=spec.ends)
    program = visits_program(spec, visits, [None] * spec.num_slots)
    with counted(engine) as found, caplog.at_level(logging.DEBUG):
        engine.together.run([partial(logits_of, model, batch) for batch in make_batches(3)])
    assert found[1] == program.nbytes("fetch")


def test_what_cannot_run_together_is_refused_and_leaves_the_engine_whole() -> None:
    model, reference, engine, optimizer = start("llama")
    batches = make_batches(3)
    calls = [partial(logits_of, model, batch) for batch in batches]

    def changes_mode() -> Tensor:
        model.eval()
        try:
            return calls[0]()
        finally:
            model.train()

    def fails() -> Tensor:
        calls[0]()
        raise ValueError("not today")

    def with_gradients() -> Tensor:
        with torch.enable_grad():
            return calls[0]()

    def of_its_own() -> list[Tensor]:
        return engine.together.run(calls)

    refused: list[tuple[Any, type[Exception], str]] = [
        (changes_mode, SharedStateError, "in a mode, or with adapters, that it changes"),
        (fails, ValueError, "not today"),
        (with_gradients, ConfigError, "give what has gradients to engine.run_losses"),
        (of_its_own, ConfigError, "by one of its own calls"),
    ]
    for call, kind, says in refused:
        with pytest.raises(kind, match=says):
            engine.together.run([calls[1], call, calls[2]])
        for one, other in zip(engine.together.run(calls), alone(model, batches), strict=True):
            assert_same_bits(one, other, "logits after an error")
    with pytest.raises(ConfigError, match="within a step"):
        engine.run_losses([lambda: engine.together.run(calls)[0].sum()])
    assert engine.together.run([]) == []
    assert_same_steps(engine, optimizer, reference, steps=1)


def test_passes_between_forward_and_backward_change_nothing() -> None:
    model, reference, engine, optimizer = start("llama_tied")
    batch = make_batches(1)[0]
    loss = model(**batch).loss
    engine.together.run([partial(logits_of, model, other) for other in make_batches(3, seed=5)])
    loss.backward()
    reference.forward_backward([batch])
    norm = optimizer.step().grad_norm
    reference.step(norm, 0.5)
    for name, master in engine.named_masters():
        assert_same_bits(master, reference.master(name), name)


def test_a_mode_that_a_loss_changes_is_refused_in_lockstep() -> None:
    """Each micro-batch would have it; one by one, it is the call's own."""
    model, batches = make_model(FAMILIES["llama"]()), make_batches(2)

    def loss(batch: Any) -> Tensor:
        model.eval()
        with torch.no_grad():
            target = logits_of(model, batch)
        model.train()
        return (logits_of(model, batch) - target / 2).square().mean()

    calls = [partial(loss, batch) for batch in batches]
    engine = attach_plainly(model, lockstep=2)
    engine.adamw(**HYPER)
    with pytest.raises(SharedStateError, match=r"before=\[PassBefore"):
        engine.run_losses(calls)
    model.train()
    engine.detach()
    assert len(attach_plainly(model).run_losses(calls)) == 2
