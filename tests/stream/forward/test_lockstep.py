"""Micro-batches in lockstep: in which order they pass, and that nobody can tell from the numbers."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaModel

from megatrain.errors import ConfigError
from megatrain.stream.engine import Engine
from megatrain.stream.execute.block_visit import BlockVisit
from tests.families import FAMILIES
from tests.products import every_value
from tests.reference import Batch, Resident, assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import (
    HYPER,
    assert_same_gradients,
    assert_same_masters,
    assert_same_round,
    assert_same_steps,
    family_config,
    start,
)


def unequal_batches(*lengths: int, seed: int = 0) -> list[Batch]:
    """Make one micro-batch per length, which tells them apart."""
    return [make_batches(1, seed=seed + n, tokens=length)[0] for n, length in enumerate(lengths)]


def recorded_visits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """Record what the executor opens: (block, micro-batch, is backward)."""
    visits: list[tuple[int, int, bool]] = []
    opened = engine.executor.open

    def record(visit: BlockVisit, *, is_backward: bool, is_again: bool) -> Any:
        visits.append((visit.block, visit.micro_batch, is_backward))
        return opened(visit, is_backward=is_backward, is_again=is_again)

    monkeypatch.setattr(engine.executor, "open", record)
    return visits


def watch_layers(model: PreTrainedModel) -> list[tuple[str, int, int]]:
    """Record (event, layer, tokens of the micro-batch) by hooks, which know nothing of the engine."""
    events: list[tuple[str, int, int]] = []

    def watch(number: int, layer: nn.Module) -> None:
        def after(_: nn.Module, __: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            tokens = hidden.shape[1]
            events.append(("forward", number, tokens))
            hidden.register_hook(lambda _: events.append(("gradient", number, tokens)))

        layer.register_forward_hook(after)

    for number, layer in enumerate(model.model.layers):
        watch(number, layer)
    return events


# -- order ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_layers_are_passed_block_major(activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward: micro-batches m-1 to 0 pass a layer before any enters the next. Backward: 0 to m-1."""
    _, _, engine, _ = start("llama", lockstep=3, activations=activations)
    visits = recorded_visits(engine, monkeypatch)
    for _ in range(2):
        visits.clear()
        engine.forward_backward(make_batches(3))
        assert visits == [
            *((block, micro_batch, False) for block in range(4) for micro_batch in (2, 1, 0)),
            *((block, micro_batch, True) for block in (3, 2, 1, 0) for micro_batch in (0, 1, 2)),
        ]


def test_hooks_and_gradients_see_the_same_order() -> None:
    """Gradients of a layer's output arrive from micro-batch 0 first, as in ordinary accumulation.

    Those of the last layer's come from the head, before the next micro-batch passes it.
    """
    model, reference, engine, _ = start("llama", lockstep=3)
    events = watch_layers(model)
    batches = unequal_batches(5, 6, 7)
    engine.forward_backward(batches)
    assert events == [
        *(("forward", layer, tokens) for layer in range(3) for tokens in (7, 6, 5)),
        *((event, 3, tokens) for tokens in (5, 6, 7) for event in ("forward", "gradient")),
        *(("gradient", layer, tokens) for layer in (2, 1, 0) for tokens in (5, 6, 7)),
    ]
    reference.forward_backward(batches)
    assert_same_gradients(engine, reference.sums)


def test_a_round_of_fewer_micro_batches_than_lockstep_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    _, reference, engine, optimizer = start("llama_tied", lockstep=8)
    visits = recorded_visits(engine, monkeypatch)
    assert_same_steps(engine, optimizer, reference, num_micro_batches=5)
    assert visits[:5] == [(0, micro_batch, False) for micro_batch in (4, 3, 2, 1, 0)]
    streamed = sum(size.is_streamed for size in engine.executor.spec.sizes)
    assert engine.executor.counts.offloads == 2 * streamed, "one gradient per block and step"
    assert_same_steps(engine, optimizer, reference, steps=1, first=2, num_micro_batches=1)
    assert_same_steps(engine, optimizer, reference, steps=1, first=3, num_micro_batches=11)


# -- numbers -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@every_value(family=["llama_tied", "gpt2", "mixtral"], lockstep=[2, 3, 4])
def test_lockstep_equals_resident_accumulation(family: str, lockstep: int) -> None:
    """Tied weights among them: the embedding's gradient has two parts in every micro-batch."""
    _, reference, engine, optimizer = start(family, lockstep=lockstep)
    assert_same_steps(engine, optimizer, reference, num_micro_batches=4)


def train_bits(num_steps: int, batches: Callable[[int], list[Batch]], **settings: Any) -> dict[str, Tensor]:
    """Train by settings, and return losses, gradients of the last step and masters."""
    engine = attach_plainly(make_model(FAMILIES[settings.pop("family")]()), device="checked", **settings)
    optimizer = engine.adamw(**HYPER)
    found: dict[str, Tensor] = {}
    for step in range(num_steps):
        found[f"loss of step {step}"] = engine.forward_backward(batches(step))
        if step == num_steps - 1:
            found |= {f"gradient of {n}": g.clone() for n, g in engine.named_gradients()}
        optimizer.step()
    return found | dict(engine.named_masters())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_chunked_head_in_lockstep_equals_one_micro_batch_after_the_other(precision: str) -> None:
    """The head's chunks have gradients of their own, which add up in fp32 in the order of micro-batches."""
    settings = {"family": "llama", "precision": precision, "head_chunk_tokens": 7}
    expected = train_bits(2, lambda step: make_batches(4, seed=step), **settings)
    for lockstep in (2, 4):
        found = train_bits(2, lambda step: make_batches(4, seed=step), lockstep=lockstep, **settings)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert_same_bits(value, expected[name], name)


def test_chunks_of_micro_batches_of_unequal_length_add_up_in_order() -> None:
    """Some pass the head whole, whose gradient is not that of chunks; the order is that of micro-batches."""
    settings = {"family": "olmo2", "head_chunk_tokens": 9}
    batches = unequal_batches(4, 7, 16, 5)
    expected = train_bits(1, lambda _: batches, **settings)
    found = train_bits(1, lambda _: batches, lockstep=4, **settings)
    for name, value in found.items():
        assert_same_bits(value, expected[name], name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lockstep", [2, 4])
def test_chunks_of_a_tied_head_leave_one_gradient_per_micro_batch(lockstep: int, precision: str) -> None:
    """It adds to what comes from the embedding, whatever passes together; rows are long, short and whole."""
    settings = {"family": "llama_tied", "head_chunk_tokens": 7, "precision": precision}
    batches = unequal_batches(16, 5, 24, 9)
    expected = train_bits(2, lambda _: batches, **settings)
    found = train_bits(2, lambda _: batches, lockstep=lockstep, **settings)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert_same_bits(value, expected[name], name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "settings", [{}, {"activations": "keep"}, {"fragments": True}, {"resident_layers": 2}]
)
def test_micro_batches_of_unequal_length_and_padding_equal_resident(settings: dict[str, Any]) -> None:
    """Each has positions, masks and a count of real tokens of its own."""
    _, reference, engine, optimizer = start("gemma2", lockstep=4, **settings)
    for step in range(2):
        batches = [
            *unequal_batches(9, 16, seed=10 * step),
            *make_batches(1, seed=step, padded=True),
            *make_batches(1, seed=step + 5, rows=3, tokens=12, padded=True),
        ]
        assert_same_round(engine, reference, batches)
        stats = optimizer.step()
        reference.step(stats.grad_norm, 0.5)
    assert_same_masters(engine, reference)


def test_grad_mode_of_the_caller_does_not_leak_between_micro_batches() -> None:
    """The grad mode is the thread's, not a coroutine's."""
    for lockstep in (1, 3):
        _, reference, engine, _ = start("llama", lockstep=lockstep)
        expected = reference.forward_backward(make_batches(3))
        with torch.no_grad():
            loss = engine.forward_backward(make_batches(3))
            assert not torch.is_grad_enabled()
        assert_same_bits(loss, expected, "loss")
        assert_same_gradients(engine, reference.sums)


@pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.autocast("cpu", dtype=torch.bfloat16)])
def test_a_mode_inside_the_model_holds_for_its_own_micro_batch(
    mode: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that runs its decoder in a mode of its own leaves and enters it once per micro-batch."""
    forward = LlamaModel.forward
    numbers = iter(range(100))

    def in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode() if next(numbers) % 2 else nullcontext():
            return forward(*args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", in_mode)
    _, reference, engine, _ = start("llama", lockstep=4)
    expected = reference.forward_backward(make_batches(4)[::-1])  # in lockstep the last one begins
    torch.testing.assert_close(engine.forward_backward(make_batches(4)), expected, rtol=1e-6, atol=0)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    for name, gradient in engine.named_gradients():
        torch.testing.assert_close(gradient, reference.sums[name], rtol=1e-5, atol=1e-7)


# -- random generators ---------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("lockstep", [1, 2, 3, 8])
def test_seeded_steps_leave_the_generator_where_a_resident_loop_does(lockstep: int) -> None:
    model = make_model(family_config("gpt2", dropout=True))
    reference = Resident(model, **HYPER)
    engine = attach_plainly(model, device="checked", lockstep=lockstep)
    for step in range(2):
        seeds = [10 * step + n for n in range(3)]
        expected = reference.forward_backward(make_batches(3, seed=step), seeds)
        state = torch.get_rng_state()
        torch.manual_seed(99)
        assert_same_bits(engine.forward_backward(make_batches(3, seed=step), seeds=seeds), expected, "loss")
        assert_same_gradients(engine, reference.sums)
        assert torch.equal(torch.get_rng_state(), state)


def test_unseeded_steps_follow_from_the_global_seed() -> None:
    """Every micro-batch draws masks of its own, and the same ones again from the same seed."""
    model = make_model(family_config("gpt2", dropout=True))
    engine = attach_plainly(model, device="checked", lockstep=3)
    same = make_batches(1) * 3

    def step(seed: int) -> tuple[float, list[Tensor], Tensor]:
        torch.manual_seed(seed)
        loss = float(engine.forward_backward(same))
        gradients = [gradient.clone() for _, gradient in engine.named_gradients()]
        return loss, gradients, torch.get_rng_state()

    first, again, other = step(1), step(1), step(2)
    assert first[0] == again[0] != other[0]
    assert all(map(torch.equal, first[1], again[1]))
    assert torch.equal(first[2], again[2])
    following = float(engine.forward_backward(same))
    assert following not in (first[0], other[0]), "the generator does not go on"
    alike = float(engine.forward_backward(same, seeds=[5, 5, 5]))
    one = float(engine.forward_backward(same[:1], seeds=[5]))
    assert alike == pytest.approx(one, rel=1e-6)
    assert first[0] != pytest.approx(one, rel=1e-6), "all micro-batches draw the same masks"


# -- exceptions ----------------------------------------------------------------------------------------------


class Stop(Exception):
    """Raised inside a model."""


class RaiseOnCall:
    """A forward pre-hook that raises on its n-th call."""

    def __init__(self, number: int, error: type[BaseException]) -> None:
        self.calls = 0
        self._number = number
        self._error = error

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == self._number:
            raise self._error


RAISES: dict[str, tuple[Callable[[PreTrainedModel], nn.Module], int]] = {
    "embedding, others not begun": (lambda model: model.model.embed_tokens, 1),
    "embedding, one waits": (lambda model: model.model.embed_tokens, 2),
    "third micro-batch in a layer": (lambda model: model.model.layers[2].mlp, 3),
    "head, one is done": (lambda model: model.lm_head, 2),
    "recomputation": (lambda model: model.model.layers[2].mlp, 5),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("place", "error"),
    [*((place, Stop) for place in RAISES), *((list(RAISES)[2], e) for e in (KeyboardInterrupt, SystemExit))],
)
def test_an_exception_in_one_micro_batch_unwinds_all(place: str, error: type[BaseException]) -> None:
    """Parameters are in place again, none but the raised exception comes out, and the next step is exact."""
    model, reference, engine, optimizer = start("llama", lockstep=3)
    assert_same_steps(engine, optimizer, reference, steps=1, num_micro_batches=3)
    places = [(module, leaf) for module in model.modules() for leaf in module._parameters]
    before = [module._parameters[leaf] for module, leaf in places]
    module_of, number = RAISES[place]
    hook = RaiseOnCall(number, error)
    handle = module_of(model).register_forward_pre_hook(hook)
    with pytest.raises(error):
        engine.forward_backward(make_batches(3, seed=9), seeds=[1, 2, 3])
    handle.remove()
    assert hook.calls == number, "others went on after the exception"
    assert all(module._parameters[leaf] is p for (module, leaf), p in zip(places, before, strict=True))
    assert torch.is_grad_enabled()
    assert engine.executor.open_visit is None
    with pytest.raises(ConfigError, match="found no gradient"):
        optimizer.step()
    assert_same_steps(engine, optimizer, reference, steps=1, first=1, num_micro_batches=3)
    assert_same_steps(engine, optimizer, reference, steps=1, first=2, num_micro_batches=1)


# -- layers that are skipped by chance -----------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("lockstep", [1, 4])
@pytest.mark.parametrize("activations", ["recompute", "keep", "offload"])
def test_layers_dropped_by_chance_equal_resident(activations: str, lockstep: int) -> None:
    """Micro-batches are then in different layers at a time: the same terms, added in another order."""
    config = family_config("opt", dropout=True)
    config.layerdrop = 0.4
    model = make_model(config)
    reference = Resident(model, **HYPER)
    engine = attach_plainly(model, device="checked", lockstep=lockstep, activations=activations)
    num_calls = 0

    def count(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1

    for layer in model.model.decoder.layers:
        layer.register_forward_pre_hook(count)
    for step in range(4):
        batches, seeds = make_batches(4, seed=step), [10 * step + n for n in range(4)]
        expected = reference.forward_backward(batches, seeds)
        loss = engine.forward_backward(batches, seeds=seeds)
        assert_same_bits(loss, expected, f"loss of step {step}")
        found = dict(engine.named_gradients())
        assert found.keys() == reference.sums.keys()
        for name, gradient in found.items():
            if lockstep == 1:
                assert_same_bits(gradient, reference.sums[name], name)
            else:
                torch.testing.assert_close(gradient, reference.sums[name], rtol=1e-5, atol=1e-7)
    assert num_calls < 0.8 * 4 * 4 * 4, "too few layers were skipped to tell"


# -- what a coroutine can see --------------------------------------------------------------------------------

_ROOM: contextvars.ContextVar[str] = contextvars.ContextVar("room")


def test_context_variables_are_the_caller_s() -> None:
    """Each micro-batch sees what the caller set, keeps what it sets itself, and lets nothing out."""
    model, _, engine, _ = start("llama", lockstep=3)
    seen: list[tuple[int, str]] = []

    def look(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            seen.append((args[0].shape[1], _ROOM.get("none")))

    def change(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        _ROOM.set(f"{_ROOM.get('none')} {args[0].shape[1]}")

    model.model.embed_tokens.register_forward_pre_hook(change)
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(look)
    token = _ROOM.set("caller")
    try:
        engine.forward_backward(unequal_batches(5, 6, 7))
        assert _ROOM.get() == "caller"
    finally:
        _ROOM.reset(token)
    assert seen == [(tokens, f"caller {tokens}") for _ in range(4) for tokens in (7, 6, 5)]


def test_autocast_of_the_caller_holds_in_every_micro_batch() -> None:
    _, reference, engine, _ = start("llama", lockstep=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = reference.forward_backward(make_batches(3))
        loss = engine.forward_backward(make_batches(3))
    assert_same_bits(loss, expected, "loss")
    assert_same_gradients(engine, reference.sums)


def test_a_generator_of_micro_batches_is_taken_whole() -> None:
    _, reference, engine, _ = start("llama", lockstep=2)

    def batches() -> Iterator[Batch]:
        yield from make_batches(3)

    expected = reference.forward_backward(make_batches(3))
    assert_same_bits(engine.forward_backward(batches()), expected, "loss")  # type: ignore[arg-type]
