"""Packed rows without a mask: variable-length attention, and one document after the other."""

from __future__ import annotations

import functools
import gc
import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma3TextConfig,
    Llama4TextConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    masking_utils,
)

from megatrain.config.attention import BY_DOCUMENT, FLEX, VARLEN, WHERE_ABLE
from megatrain.errors import ConfigError, ModelError
from megatrain.model.blocks import find_blocks
from megatrain.model.documents import able, begins, varlen
from megatrain.model.documents.able import implementation_of, why_not
from megatrain.model.documents.apart import why_not_apart
from megatrain.model.documents.begins import Packed, documents, set_attention, tells_windows, told_of
from megatrain.model.profile.count import count_anatomy
from megatrain.model.tiles import attention
from megatrain.model.tiles.position_wise import tile
from tests.families import FAMILIES
from tests.flash_kernels import flash_on_cpu
from tests.reference import Resident, assert_same_bits, attach_plainly, make_model
from tests.stream.runs import HYPER

TOKENS = 160


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """The kernels on the CPU, in fp32 too: there no fault is lost in rounding."""
    monkeypatch.setattr(able, "DTYPES", (*able.DTYPES, torch.float32))
    with flash_on_cpu() as calls:
        yield calls


def cut(rows: int, per_row: int, seed: int = 0) -> list[list[int]]:
    """Return the lengths of documents of rows; one row has so many of them, others at most as many."""
    draw = np.random.default_rng(seed)
    found = []
    for row in range(rows):
        number = per_row if row == 0 else int(draw.integers(1, per_row + 1))
        places = np.sort(draw.choice(np.arange(1, TOKENS), number - 1, replace=False))
        found.append(np.diff(np.concatenate([[0], places, [TOKENS]])).tolist())
    return found


def batch_of(lengths: list[list[int]]) -> dict[str, Any]:
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    ids = torch.randint(3, 120, positions.shape, generator=torch.Generator().manual_seed(3))
    labels = ids.masked_fill(positions == 0, -100)  # no document is asked for another one's first token
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def one_at_a_time(model: PreTrainedModel, batch: dict[str, Any], lengths: list[list[int]]) -> Tensor:
    """Return the logits of each document alone, (B, T, V), with gradients of the loss of all in the model."""
    logits: list[Tensor] = []
    for ids, row in zip(batch["input_ids"], lengths, strict=True):
        logits += [model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(row)]
    whole = torch.cat(logits).view(*batch["input_ids"].shape, -1)
    loss = torch.nn.functional.cross_entropy(
        whole[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten(), ignore_index=-100
    )
    loss.backward()
    return whole.detach()


# -- the function -----------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [VARLEN, BY_DOCUMENT])
@pytest.mark.parametrize(("rows", "per_row"), [(1, 1), (1, 40), (2, 7), (5, 20)])
def test_logits_and_gradients_are_those_of_one_document_at_a_time(
    calls: dict[str, int], name: str, rows: int, per_row: int
) -> None:
    lengths = cut(rows, per_row)
    batch = batch_of(lengths)
    model, reference = (make_model(FAMILIES["llama"]()) for _ in range(2))
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    expected = one_at_a_time(reference, batch, lengths)
    set_attention(model, name)
    packed = Packed(is_packed=True, shape=(rows, TOKENS))
    with documents(packed), mock.patch.object(masking_utils, "sdpa_mask") as make:
        output = model(**batch, **told_of(batch["position_ids"]), use_cache=False)
    assert not make.called
    output.loss.backward()
    torch.testing.assert_close(output.logits.detach(), expected, rtol=0, atol=1e-5)
    for (at, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-5, msg=at)
    number = model.config.num_hidden_layers if name == VARLEN else 0
    assert calls == {"forward": number, "backward": number}


def test_places_are_filled_up_so_that_few_shapes_are_seen() -> None:
    shapes, longest = set(), set()
    for seed in range(50):
        told = told_of(batch_of(cut(3, 5, seed))["position_ids"])
        starts = told["cu_seq_lens_q"]
        assert starts.dtype is torch.int32
        assert int(starts[-1]) == 3 * TOKENS
        shapes.add(len(starts))
        longest.add(told["max_length_q"])
    assert shapes == {17}
    assert longest <= {TOKENS // 4, TOKENS // 2, TOKENS}
    assert len(longest) > 1
    many = told_of(batch_of([[4] * 40])["position_ids"])["cu_seq_lens_q"]
    assert len(many) == 65
    assert many[40:].unique().tolist() == [160]
    assert many[:41].tolist() == list(range(0, 161, 4))
    long = told_of(torch.arange(16_384)[None])
    assert (len(long["cu_seq_lens_q"]), long["max_length_k"]) == (65, 16_384)


def older(names: str, given: dict[str, Any]) -> Any:
    """Return a kernel that takes these settings, and notes them with the shapes of keys and the query."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *places: object, **settings: Any) -> Tensor:
        given.update(settings, keys=key.shape[1], query=float(query.flatten()[0]))
        return query

    kept = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names.split()]
    attend.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
    return attend


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("is_causal", {"is_causal": True, "keys": 2, "query": 2.0}),
        ("is_causal scale", {"is_causal": True, "scale": 1.0, "keys": 2, "query": 1.0}),
        ("window_size scale", {"window_size": (-1, 0), "scale": 1.0, "keys": 4, "query": 1.0}),
        (
            "window_size scale enable_gqa",
            {"window_size": (-1, 0), "scale": 1.0, "enable_gqa": True, "keys": 2, "query": 1.0},
        ),
    ],
)
def test_older_torch_is_told_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, names: str, expected: dict[str, Any]
) -> None:
    """Arguments came one by one: `is_causal` became `window_size`, then there was `enable_gqa`."""
    given: dict[str, Any] = {}
    varlen.kernel.cache_clear()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older(names, given))
    query, key = torch.ones(4, 4, 4), torch.ones(4, 2, 4)
    starts = torch.tensor([0, 4], dtype=torch.int32)
    varlen._varlen(query, key, key, starts, 512, 1.0)
    if "window_size" not in names:
        with pytest.raises(ModelError, match="no attention in windows"):
            varlen._varlen(query, key, key, starts, 512, 1.0, window=3)
    varlen.kernel.cache_clear()
    assert given == expected


# -- in an engine -----------------------------------------------------------------------------------------


def resident_step(name: str, lengths: list[list[int]]) -> Resident:
    """Take a step of a resident model under the same interface."""
    resident = Resident(make_model(FAMILIES["llama"]()), **HYPER)
    set_attention(resident.model, name)
    batch = batch_of(lengths)
    with documents(Packed(is_packed=True)):
        resident.forward_backward([{**batch, **told_of(batch["position_ids"]), "use_cache": False}])
    resident.step(resident.norm(), None)
    return resident


def streamed_step(name: str, lengths: list[list[int]], **settings: Any) -> dict[str, Tensor]:
    """Take a streamed step; return the masters after it."""
    gc.collect()
    model = make_model(FAMILIES["llama"]())
    set_attention(model, name)
    engine = attach_plainly(model, **settings)
    optimizer = engine.adamw(**HYPER, max_grad_norm=None)
    engine.forward_backward([batch_of(lengths)])
    optimizer.step()
    masters = {at: master.clone() for at, master in engine.named_masters()}
    engine.detach()
    return masters


def assert_as_resident(masters: dict[str, Tensor], resident: Resident) -> None:
    for at, master in masters.items():
        assert_same_bits(master, resident.master(at), at)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("activations", ["keep", "recompute", "keep_attention"])
@pytest.mark.parametrize("name", [VARLEN, BY_DOCUMENT])
def test_a_streamed_step_has_the_bits_of_a_resident_one_under_the_same_interface(
    calls: dict[str, int], name: str, activations: str
) -> None:
    lengths = cut(3, 9)
    resident = resident_step(name, lengths)
    forwards = calls["forward"]
    masters = streamed_step(name, lengths, activations=activations)
    assert_as_resident(masters, resident)
    times = 2 if activations == "recompute" else 1  # kept attention does not run again
    assert calls["forward"] == (1 + times) * forwards


def test_a_wrong_boundary_is_found(calls: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected: one document begins a token late."""
    lengths = cut(2, 9)
    resident = resident_step(VARLEN, lengths)
    assert_as_resident(streamed_step(VARLEN, lengths), resident)  # it asks a small model, once in a process
    find = begins._begins

    def late(positions: Tensor) -> Any:
        found = find(positions)
        row, place = np.argwhere(found[:, 1:-1])[3] + (0, 1)
        found[row, place], found[row, place + 1] = False, True
        return found

    monkeypatch.setattr(begins, "_begins", late)
    with pytest.raises(AssertionError, match="differ"):
        assert_as_resident(streamed_step(VARLEN, lengths), resident)


def assert_no_masks(name: str) -> None:
    """Assert that no mask is made in a streamed step on packed rows."""
    make = masking_utils.sdpa_mask
    streamed_step(name, cut(2, 9))  # a small model is asked once in a process, with masks
    with mock.patch.object(masking_utils, "sdpa_mask", wraps=make) as made:
        streamed_step(name, cut(2, 9))
    assert not made.called, "a mask is made"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [VARLEN, BY_DOCUMENT])
def test_a_mask_where_none_should_be_is_found(
    calls: dict[str, int], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Injected: what makes masks is told nothing of the rows; results are the same, but the mask is seen."""
    assert_no_masks(name)
    monkeypatch.setattr(varlen, "packed_now", lambda: None)
    with pytest.raises(AssertionError, match="a mask is made"):
        assert_no_masks(name)


def test_whole_and_padded_rows_go_the_way_of_sdpa(calls: dict[str, int]) -> None:
    plain, ours = (make_model(FAMILIES["llama"]()).eval() for _ in range(2))
    set_attention(ours, VARLEN)
    batch = batch_of([[TOKENS], [TOKENS]])
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 100:] = 0
    engine = attach_plainly(ours)
    for given in ({}, {"position_ids": batch["position_ids"]}, {"attention_mask": mask}):
        with torch.no_grad():
            expected = plain(input_ids=batch["input_ids"], use_cache=False, **given).logits
            logits = ours(input_ids=batch["input_ids"], use_cache=False, **given).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    engine.detach()
    assert calls["forward"] == 0


@pytest.mark.parametrize("name", [VARLEN, BY_DOCUMENT])
@pytest.mark.parametrize("kind", [Gemma3TextConfig, MistralConfig])
def test_windows_are_the_kernels_own(calls: dict[str, int], kind: type[PretrainedConfig], name: str) -> None:
    config = kind(**{**FAMILIES["gemma3_text"]().to_dict(), "sliding_window": 8})
    plain, ours = (make_model(config) for _ in range(2))
    set_attention(ours, name)
    lengths = cut(2, 5)
    assert max(map(max, lengths)) > 40
    batch = batch_of(lengths)
    expected = one_at_a_time(plain, batch, lengths)
    with (
        documents(Packed(is_packed=True, shape=(2, TOKENS))),
        mock.patch.object(masking_utils, "sdpa_mask") as make,
    ):
        output = ours(**batch, **told_of(batch["position_ids"]), use_cache=False)
    assert not make.called
    output.loss.backward()
    torch.testing.assert_close(output.logits.detach(), expected, rtol=0, atol=1e-5)
    for (at, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-5, msg=at)
    assert calls["forward"] == (config.num_hidden_layers if name == VARLEN else 0)


@pytest.mark.parametrize("name", [VARLEN, BY_DOCUMENT])
def test_packed_rows_pass_in_tiles_that_cut_documents(
    calls: dict[str, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention is told where the documents of whole rows begin, and its heads come in groups."""
    monkeypatch.setattr(attention, "LEAST_IN_GROUPS", 0)
    batch = batch_of(cut(2, 5))
    told = {**batch, **told_of(batch["position_ids"])}
    found = []
    for tokens in (None, 24):
        model = make_model(FAMILIES["llama"]()).train()
        set_attention(model, name)
        if tokens is not None:
            layers = [block.module for block in find_blocks(model) if block.module is not None]
            tile(model, layers, tokens)
            calls["forward"] = 0
        with documents(Packed(is_packed=True, shape=(2, TOKENS))):
            loss = model(**told, use_cache=False).loss
        loss.backward()
        found.append((loss.detach(), model))
    (loss, whole), (of_tiles, tiled) = found
    assert_same_bits(of_tiles, loss, "loss")
    for (at, one), other in zip(tiled.named_parameters(), whole.named_parameters(), strict=True):
        if at == "model.embed_tokens.weight":
            assert_same_bits(one.grad, other[1].grad, at)
        torch.testing.assert_close(one.grad, other[1].grad, rtol=0, atol=1e-6, msg=at)
    groups = FAMILIES["llama"]().num_key_value_heads
    assert calls["forward"] == (groups * len(layers) if name == VARLEN else 0)


def test_many_documents_go_back_in_one_piece(calls: dict[str, int]) -> None:
    """A slice of each would have a gradient as wide as the row: 32 s of 1,024 documents in 524,288 tokens."""
    model = make_model(FAMILIES["llama"]()).train()
    set_attention(model, BY_DOCUMENT)
    batch = batch_of([[4] * 40])
    with documents(Packed(is_packed=True, shape=(1, TOKENS))):
        loss = model(**batch, **told_of(batch["position_ids"]), use_cache=False).loss
    names = Counter[str]()

    class Named(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    with Named():
        loss.backward()
    layers = model.config.num_hidden_layers
    assert names["_scaled_dot_product_flash_attention_for_cpu_backward"] == 40 * layers
    assert names["slice_backward"] < 40


@pytest.mark.parametrize("why", ["a torch without windows", "a model that does not tell"])
def test_layers_with_a_window_keep_their_mask_where_there_is_no_other_way(
    calls: dict[str, int], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    config = FAMILIES["gemma3_text"]()
    kinds = config.layer_types
    assert config.sliding_window < TOKENS
    assert set(kinds) == {"full_attention", "sliding_attention"}
    if why == "a torch without windows":
        takes = varlen.kernel()[1] - {"window_size"}
        attend = varlen.kernel()[0]
        plainly = functools.partial(attend, window_size=(-1, 0))
        monkeypatch.setattr(
            varlen, "kernel", lambda: (lambda *given, is_causal, **named: plainly(*given, **named), takes)
        )
    else:
        monkeypatch.setattr(varlen, "tells_windows", lambda config: False)
    plain, ours = (make_model(config).eval() for _ in range(2))
    set_attention(ours, VARLEN)
    batch = batch_of(cut(2, 5))
    given = {name: batch[name] for name in ("input_ids", "position_ids")}
    engine = attach_plainly(ours)
    with torch.no_grad():
        expected = plain(**given, use_cache=False).logits
        logits = ours(**given).logits
    engine.detach()
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert calls["forward"] == kinds.count("full_attention")


@pytest.mark.parametrize(
    ("kind", "tells"), [(Gemma3TextConfig, True), (MistralConfig, True), (Llama4TextConfig, False)]
)
def test_a_model_is_asked_whether_it_tells_of_its_windows(kind: type[PretrainedConfig], tells: bool) -> None:
    """Llama 4 has chunks, of which a kernel knows nothing."""
    assert tells_windows(kind()) is tells


# -- where it can be --------------------------------------------------------------------------------------

ABLE = {"llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt_neox", "olmo2", "granite"}


@pytest.mark.parametrize(
    ("family", "words"),
    [
        *((family, None) for family in sorted(ABLE & set(FAMILIES))),
        ("gemma2", "softcap"),
        ("gpt_oss", "s_aux"),
        ("falcon", "falcon model does"),
        ("bloom", "bloom model does"),
        ("mamba2", ""),
    ],
)
def test_what_a_model_wants_of_attention_is_tried(family: str, words: str | None) -> None:
    found = able.why_not_without_mask(FAMILIES[family]())
    assert found is None if words is None else words in str(found), found
    config = FAMILIES[family]()
    config._attn_implementation = BY_DOCUMENT
    assert (why_not_apart(config) is None) is (words is None)


@pytest.mark.parametrize(
    ("changes", "dtype", "words"),
    [
        ({}, torch.bfloat16, None),
        ({}, torch.float32, "float32"),
        ({"attention_dropout": 0.1}, torch.bfloat16, "dropout in attention"),
        ({"head_dim": 12}, torch.bfloat16, "heads of 12"),
        ({"head_dim": 264}, torch.bfloat16, "heads of 264"),
        ({"head_dim": 208}, torch.bfloat16, "none of 193 to 224"),
        ({"head_dim": 256}, torch.bfloat16, None),
    ],
)
def test_what_it_cannot_do_is_named(
    changes: dict[str, Any], dtype: torch.dtype, words: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = FAMILIES["llama"]()
    config.head_dim = 8
    for name, value in changes.items():
        setattr(config, name, value)
    found = why_not(config, dtype)
    assert found is None if words is None else words in str(found)
    with caplog.at_level("INFO", "megatrain"):
        asked = implementation_of(config, WHERE_ABLE, dtype)
    assert asked == (VARLEN if words is None else None)
    assert (words is None) or words in caplog.text
    assert implementation_of(config, "sdpa", dtype) == "sdpa"


def test_the_cpu_has_none_and_says_so() -> None:
    model = make_model(FAMILIES["llama"]())
    set_attention(model, VARLEN)
    assert not able.has_varlen(torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"varlen cannot run on cpu.*use sdpa_by_document or sdpa"):
        attach_plainly(model)


def test_a_name_that_nobody_knows_and_flex_attention_on_a_cpu_are_refused() -> None:
    """Flex attention is counted on a CPU all the same, as what keeps as much: a plan may be for a GPU."""
    with pytest.raises(
        ConfigError, match=r"is 'flsh', which transformers does not have; use eager, .* or varlen"
    ):
        able.require_name("flsh", "cuda")
    for name in ("sdpa", "flash_attention_2", "kernels-community/flash-attn", VARLEN, FLEX):
        able.require_name(name, "cuda")
    model = make_model(FAMILIES["llama"]())
    set_attention(model, FLEX)
    with pytest.raises(ConfigError, match="flex_attention has no backward on the CPU; use sdpa"):
        attach_plainly(model)
    for precision, like in (("bf16", VARLEN), ("fp32", "sdpa")):
        shape: Any = {"micro_batch_size": 1, "seq_len": 64, "is_packed": True, "precision": precision}
        counts = [
            count_anatomy(FAMILIES["llama"](), **shape, attn_implementation=name) for name in (FLEX, like)
        ]
        assert counts[0].layers[0].saved_bytes == counts[1].layers[0].saved_bytes


def test_what_repeats_and_fp32_are_refused() -> None:
    model = make_model(FAMILIES["llama"]())
    set_attention(model, VARLEN)
    with flash_on_cpu():
        with pytest.raises(ConfigError, match=r"train\.deterministic"):
            attach_plainly(model, deterministic=True)
        with pytest.raises(ConfigError, match="float32, only bfloat16 and float16"):
            attach_plainly(model)


def test_long_packed_rows_are_not_refused() -> None:
    config = FAMILIES["llama"]()
    shape: Any = {"micro_batch_size": 1, "seq_len": 20_480, "precision": "bf16", "is_packed": True}
    with pytest.raises(ConfigError, match="packed rows"):
        count_anatomy(config, **shape, attn_implementation="sdpa")
    whole = count_anatomy(config, **{**shape, "is_packed": False}, attn_implementation="sdpa")
    joined = 20_480 * config.hidden_size * 2  # the documents' outputs in one tensor, beside each of them
    more = {VARLEN: 16, BY_DOCUMENT: joined, WHERE_ABLE: 16}  # 16: the kernel's random state
    for name, nbytes in more.items():
        kept = count_anatomy(config, **shape, attn_implementation=name).layers[0].saved_bytes["keep"]
        assert kept == whole.layers[0].saved_bytes["keep"] + nbytes, name


def test_the_table_of_limits_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs/training.md").read_text()
    for what, instead in able.LIMITS.items():
        assert f"| {what} | {instead} |" in text
