"""Long rows pass the last norm with the head's chunks: no bit is another than with the norm by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain.errors import ModelError
from megatrain.model.blocks import find_blocks
from megatrain.model.tiles.last_norm import LastNorm, NormOfChunks
from megatrain.model.tiles.position_wise import parts_in_tiles
from megatrain.stream.engine import Engine
from megatrain.stream.evaluate import losses, row_losses
from tests.chunked import CHUNK, heads_in_chunks
from tests.families import FAMILIES
from tests.kinds import tiny_config
from tests.products import every_pair
from tests.reference import assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.forward.test_tiles import TILE, start_in_tiles
from tests.stream.runs import assert_same_steps


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Take note of the shape of what passes the norm in chunks, at each backward of it."""
    seen: list[tuple[int, ...]] = []
    inner = NormOfChunks.go_back

    def go_back(norm: NormOfChunks, hidden: Tensor, *others: Any) -> Any:
        seen.append(tuple(hidden.shape))
        return inner(norm, hidden, *others)

    monkeypatch.setattr(NormOfChunks, "go_back", go_back)
    return seen


def norm_of(model: PreTrainedModel) -> nn.Module:
    """Return the norm that passes with the head."""
    layers = [block.module for block in find_blocks(model) if block.module is not None]
    (found,) = [module for module, part in parts_in_tiles(model, layers).items() if part.is_last]
    return found


def step(engine: Engine) -> list[Tensor]:
    return [engine.forward_backward(make_batches(3))]


def given(engine: Engine) -> list[Tensor]:
    """Take a step of losses that somebody scales: their factor is known in the backward alone."""

    def loss(batch: Any) -> Tensor:
        value: Tensor = engine.model(**batch).loss / 3
        return value

    return list(engine.run_losses([partial(loss, batch) for batch in make_batches(3)], only_loss=True))


def by_hand(engine: Engine) -> list[Tensor]:
    found = [engine.model(**batch).loss / 3 for batch in make_batches(3)]
    torch.stack(found).sum().backward()
    return found


def by_rows(engine: Engine) -> list[Tensor]:
    """Take a step of losses that are made of a sum for each row, as those of preferences are."""

    def loss(batch: Any) -> Tensor:
        value: Tensor = row_losses(engine, batch).exp().mean() / 3
        return value

    return list(engine.run_losses([partial(loss, batch) for batch in make_batches(3)]))


WAYS: dict[str, Callable[[Engine], list[Tensor]]] = {
    "step": step,
    "given": given,
    "by hand": by_hand,
    "by rows": by_rows,
}


@pytest.mark.sampled(3)
@every_pair(
    family=["llama", "llama_tied", "gemma2", "granite", "olmo2", "qwen3", "mixtral"],
    precision=["bf16", "fp32"],
    way=[*WAYS],
    lockstep=[1, 3],
    outer_streams=[False, True],
)
def test_no_bit_is_another_than_with_the_norm_by_itself(
    family: str,
    precision: str,
    way: str,
    lockstep: int,
    outer_streams: bool,
    calls: list[tuple[int, ...]],
) -> None:
    """Where somebody has hooked the norm, it runs by itself, in tiles of the same length."""
    config = FAMILIES[family]()
    found = []
    for is_watched in (False, True):
        model = make_model(config)
        engine = attach_plainly(
            model,
            precision=precision,
            lockstep=lockstep,
            num_micro_batches=3,
            outer_streams=outer_streams and not config.tie_word_embeddings,
            head_chunk_tokens=CHUNK,
            tile_tokens=TILE,
        )
        if is_watched:
            norm_of(model).register_forward_hook(lambda *_: None)
        calls.clear()
        made = WAYS[way](engine)
        assert calls == [] if is_watched else calls
        assert engine.counts.chunked_tokens == 3 * 32
        gradients = {name: gradient.clone() for name, gradient in engine.named_gradients()}
        scores = [loss for _, loss in losses(engine, make_batches(2))] if way == "step" else []
        found.append((made, gradients, scores))
        engine.detach()
    (loss, gradients, scores), (other, expected, whole) = found
    assert_same_bits(torch.stack(loss), torch.stack(other), "losses")
    assert gradients.keys() == expected.keys()
    assert any("norm" in name and "layers" not in name for name in gradients)
    for name, gradient in gradients.items():
        assert_same_bits(gradient, expected[name], name)
    assert str(scores) == str(whole)


@pytest.mark.parametrize(
    ("family", "precision", "settings"),
    [
        ("llama", "fp32", {"lockstep": 2}),
        ("gemma2", "bf16", {"activations": "keep_attention", "boundaries": "host"}),
        ("granite", "fp32", {"outer_streams": False, "device": "emulated"}),
    ],
)
def test_steps_equal_a_resident_model_s(
    family: str, precision: str, settings: dict[str, Any], calls: list[tuple[int, ...]]
) -> None:
    _, reference, engine, optimizer = start_in_tiles(
        family, precision=precision, num_micro_batches=2, head_chunk_tokens=CHUNK, **settings
    )
    with heads_in_chunks(reference, reference.model):
        assert_same_steps(engine, optimizer, reference, num_micro_batches=2)
    assert calls == [(1, 32, 32)] * 4
    engine.detach()


def test_which_norms_pass_with_the_head_is_found_by_trial() -> None:
    for family in ("llama", "gemma2", "mixtral", "gpt_oss", "olmo2"):
        model = make_model(FAMILIES[family]())
        assert norm_of(model) is model.model.norm, family
    model = make_model(tiny_config("qwen3_vl"))  # the layers of its vision tower come first
    assert norm_of(model) is model.model.language_model.norm
    for family in ("phi", "gpt2", "opt"):  # nn.LayerNorm keeps no more than its input
        model = make_model(FAMILIES[family]())
        layers = [block.module for block in find_blocks(model) if block.module is not None]
        assert not any(part.is_last for part in parts_in_tiles(model, layers).values())


def in_tiles(**settings: Any) -> tuple[Any, Engine]:
    model = make_model(FAMILIES["llama"]())
    return model, attach_plainly(model, head_chunk_tokens=CHUNK, tile_tokens=TILE, **settings)


def test_frozen_parts_have_no_gradient(calls: list[tuple[int, ...]]) -> None:
    """Only the norm is trained, or all but the norm, or the head alone."""
    trained: dict[str, Callable[[str], bool]] = {
        "norm": lambda name: name == "model.norm.weight",
        "others": lambda name: name != "model.norm.weight",
        "head": lambda name: name == "lm_head.weight",
    }
    for wants in trained.values():
        found = []
        for is_watched in (False, True):
            model = make_model(FAMILIES["llama"]())
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(wants(name))
            engine = attach_plainly(model, head_chunk_tokens=CHUNK, tile_tokens=TILE)
            if is_watched:
                model.model.norm.register_forward_hook(lambda *_: None)
            engine.forward_backward(make_batches(2))
            found.append(dict(engine.named_gradients()))
        assert found[0].keys() == found[1].keys()
        for name, gradient in found[0].items():
            assert wants(name)
            assert_same_bits(gradient, found[1][name], name)
    assert calls


def test_who_asks_for_hidden_states_sees_the_norm_s_output(calls: list[tuple[int, ...]]) -> None:
    model, engine = in_tiles()
    batch = make_batches(1)[0]
    model(**batch, output_hidden_states=True).loss.backward()
    assert calls == []
    model(**batch).loss.backward()
    assert calls == [(1, 32, 32)]
    engine.detach()


def test_a_head_that_runs_whole_gets_the_norm_s_output(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The chunks of a head that do not add up are known after the norm was handed on."""
    batches = make_batches(1)
    _, engine = in_tiles()
    expected = engine.forward_backward(batches)
    engine.detach()
    _, engine = in_tiles()
    monkeypatch.setattr("megatrain.model.head.head._is_close", lambda *_: False)
    for _ in range(2):
        found = engine.forward_backward(batches)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert engine.counts.chunked_tokens == 0
    assert "computes its loss whole" in caplog.text


def test_a_decoder_that_goes_on_with_the_norm_s_output_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = in_tiles()
    inner = LastNorm.__call__
    monkeypatch.setattr(LastNorm, "__call__", lambda norm, hidden: inner(norm, hidden) * 1)
    with pytest.raises(ModelError, match=r"train\.tile_tokens"):
        engine.forward_backward(make_batches(1))


def test_a_norm_whose_output_is_cast_runs_by_itself(calls: list[tuple[int, ...]]) -> None:
    """Inkling 2 adds up its layers in fp32, and casts what its last norm returns; one in fp32 does not."""
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for precision in ("bf16", "bf16", "fp32"):
        model = make_model(tiny_config("inkling2_text"))
        engine = attach_plainly(model, precision=precision, head_chunk_tokens=CHUNK, tile_tokens=TILE)
        if len(found) == 1:
            norm_of(model).register_forward_hook(lambda *_: None)
        loss = engine.forward_backward(make_batches(1))
        assert len(calls) == (precision == "fp32")
        found.append((loss, dict(engine.named_gradients())))
    (loss, gradients), (other, expected), _ = found
    assert_same_bits(loss, other, "loss")
    for name, gradient in gradients.items():
        assert_same_bits(gradient, expected[name], name)


def test_short_rows_pass_the_norm_as_they_are(calls: list[tuple[int, ...]]) -> None:
    _, engine = in_tiles()
    engine.forward_backward(make_batches(1, tokens=TILE, rows=4))
    assert engine.counts.chunked_tokens == 4 * TILE
    assert calls == []


def test_no_state_of_the_head_is_left_when_a_forward_fails(calls: list[tuple[int, ...]]) -> None:
    model, engine = in_tiles(num_micro_batches=2, lockstep=2)
    batches = make_batches(2)
    expected = engine.forward_backward(batches)
    engine.zero_grad()

    def fail(*_: Any) -> None:
        raise ValueError("not today")

    handle = model.model.layers[-1].register_forward_hook(fail)
    with pytest.raises(ValueError, match="not today"):
        engine.forward_backward(batches)
    handle.remove()
    assert_same_bits(engine.forward_backward(batches), expected, "loss")
    logits = model(input_ids=batches[0]["input_ids"]).logits.detach()
    engine.detach()
    torch.testing.assert_close(logits, model(input_ids=batches[0]["input_ids"]).logits)
