"""Attention by tiles in models: what their masks say is said in a few numbers, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Llama4TextConfig, PretrainedConfig, PreTrainedModel, masking_utils
from transformers.masking_utils import create_causal_mask, create_masks_for_generate

from megatrain.config.attention import (
    BY_DOCUMENT,
    EITHER_WHERE_ABLE,
    TILED,
    TILED_WHERE_ABLE,
    VARLEN,
)
from megatrain.errors import ConfigError, ModelError
from megatrain.model import masks
from megatrain.model.documents.able import implementation_of, why_not_tiled
from megatrain.model.documents.begins import Packed, documents, set_attention
from megatrain.model.documents.sight import Sight, sight_of
from megatrain.model.documents.tiled import make_mask
from megatrain.model.profile.count import count_anatomy, count_sizes
from tests.families import FAMILIES
from tests.model.tiles.test_attention import Calls
from tests.reference import attach_plainly, make_model

LENGTHS = [[50, 1, 70, 39], [160]]
TOKENS = 160
WINDOWS = {"gemma2", "gemma3_text", "gpt_oss", "mixtral", "qwen2"}


def llama4() -> PretrainedConfig:
    small = {"hidden_size": 16, "intermediate_size": 24, "intermediate_size_mlp": 24, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 4}
    return Llama4TextConfig(
        **small, **heads, num_local_experts=2, num_experts_per_tok=1, attention_chunk_size=32, pad_token_id=0
    )


ABLE = [
    *(name for name in FAMILIES if name not in {"falcon", "falcon_alibi", "bloom", "mpt"}),
    "llama4",
]


def config_of(family: str) -> PretrainedConfig:
    config = llama4() if family == "llama4" else FAMILIES[family]()
    config.max_position_embeddings = TOKENS
    if family in WINDOWS:
        config.sliding_window = 24
    return config


def batch_of(kind: str) -> dict[str, Any]:
    """Make two rows: whole ones, packed ones, or one that is padded."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 120, (2, TOKENS), generator=generator)
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    if kind == "packed":
        rows = [torch.cat([torch.arange(length) for length in row]) for row in LENGTHS]
        batch["position_ids"] = torch.stack(rows)
    if kind == "padded":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, 101:] = 0
        batch["labels"][1, 101:] = -100
    return batch


def trained(model: PreTrainedModel, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a batch, and the gradients."""
    model.zero_grad()
    positions = batch.get("position_ids")
    own = None if positions is None else positions.numpy()
    with documents(Packed(is_packed=positions is not None, positions=own)):
        loss = model(**batch).loss
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["whole", "packed", "padded"])
@pytest.mark.parametrize("family", ABLE)
def test_a_model_trains_as_with_eager_attention(family: str, kind: str) -> None:
    """Losses within 1e-6 and gradients within 2e-5 of their norm, in fp32."""
    if kind == "packed" and family in {"gpt2", "opt", "qwen3_next", "jamba", "mamba2"}:
        pytest.skip("its documents are not kept apart by a mask")
    config = config_of(family)
    assert why_not_tiled(config) is None
    model = make_model(config).eval()  # without dropout
    batch = batch_of(kind)
    found = []
    for name in ("eager", TILED):
        set_attention(model, name)
        with Largest() as largest:
            found.append(trained(model, batch))
    (eager, expected), (loss, gradients) = found
    assert float(loss) == pytest.approx(float(eager), rel=1e-6)
    assert gradients.keys() == expected.keys()
    for at, one in gradients.items():
        norm = float(expected[at].norm())
        assert float((one - expected[at]).norm()) <= 2e-5 * norm + 1e-8, at
    if (family, kind) != ("llama4", "padded"):  # chunks that begin behind the padding have a mask
        assert largest.pairs == 0, "no mask, and no scores, of whole rows"


class Largest(Calls):
    """Counts the tensors with a value for each pair of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor):
            self.pairs += tuple(output.shape[-2:]) == (TOKENS, TOKENS)
        return output


def test_plain_rows_have_the_bits_of_sdpa() -> None:
    model = make_model(FAMILIES["llama"]()).train()
    expected = trained(model, batch_of("whole"))
    set_attention(model, TILED)
    loss, gradients = trained(model, batch_of("whole"))
    assert torch.equal(loss, expected[0])
    assert all(torch.equal(gradients[at], each) for at, each in expected[1].items())


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gemma3_text"])
def test_tokens_are_generated_as_with_eager_attention(family: str) -> None:
    """With a cache of a window, whose keys do not begin at the first token, and a padded prompt."""
    config = config_of(family)
    config.output_router_logits = False
    model = make_model(config).eval()
    prompt = torch.randint(3, 60, (2, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    given = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    found = []
    for name in ("eager", TILED):
        set_attention(model, name)
        found.append(model.generate(prompt, **given))
    assert torch.equal(*found)


# -- counted ------------------------------------------------------------------------------------------------


SLOW = {"jamba", "qwen3_next"}
"""Families whose scans are counted operation by operation."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.parity] if name in SLOW else []) for name in ABLE],
)
def test_a_plan_refuses_no_length(family: str, is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "MOST_TOKENS", 96)
    shape: dict[str, Any] = {"micro_batch_size": 1, "seq_len": 97, "precision": "bf16"}
    config = config_of(family)
    assert count_anatomy(config, **shape, attn_implementation=TILED, is_packed=is_packed).seq_len == 97


def test_packed_rows_are_counted_by_their_documents() -> None:
    """Of gemma2: a window of 24 tokens in every other layer; several sizes at once are those of each."""
    shape: dict[str, Any] = {"seq_len": 960, "precision": "bf16", "is_packed": True, "document_len": 96}
    config = config_of("gemma2")
    config.max_position_embeddings = 960
    found = count_anatomy(config, micro_batch_size=2, **shape, attn_implementation=TILED)
    heads, size = config.num_attention_heads, config.head_dim
    assert found.layers[1].forward.attention_flops == 2 * 2 * size * heads * 20 * 96 * 96
    each = count_sizes(config, sizes=[2, 3], **shape, attn_implementation=TILED)
    assert [one.layers[1].forward.attention_flops for one in each] == [
        number * found.layers[1].forward.attention_flops / 2 for number in (2, 3)
    ]
    assert each[0].layers[0].backward == found.layers[0].backward


# -- where it is taken --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "words"),
    [("falcon", "falcon"), ("falcon_alibi", "falcon"), ("bloom", "bloom"), ("mpt", "mpt")],
)
def test_what_it_cannot_do_is_named(family: str, words: str, caplog: pytest.LogCaptureFixture) -> None:
    config = FAMILIES[family]()
    assert words in str(why_not_tiled(config))
    with caplog.at_level("INFO", "megatrain"):
        assert implementation_of(config, TILED_WHERE_ABLE, torch.float32) is None
    assert "attention by tiles cannot do" in caplog.text
    with pytest.raises(ConfigError, match=rf"attn_implementation=tiled cannot do what the {words} model"):
        implementation_of(config, TILED, torch.float32)


def test_dropout_is_refused_by_name() -> None:
    config = FAMILIES["llama"]()
    config.attention_dropout = 0.1
    model = make_model(config)
    set_attention(model, TILED)
    with pytest.raises(ConfigError, match=r"tiled cannot do dropout in attention \(attention_dropout=0.1\)"):
        attach_plainly(model)


def test_kernels_come_before_tiles() -> None:
    llama, gemma2 = FAMILIES["llama"](), FAMILIES["gemma2"]()
    llama.head_dim = gemma2.head_dim = 8
    assert implementation_of(llama, EITHER_WHERE_ABLE, torch.bfloat16) == VARLEN
    assert implementation_of(llama, EITHER_WHERE_ABLE, torch.float32) == TILED
    assert implementation_of(gemma2, EITHER_WHERE_ABLE, torch.bfloat16) == TILED
    llama.attention_dropout = 0.1
    assert implementation_of(llama, EITHER_WHERE_ABLE, torch.bfloat16) is None


@pytest.mark.parametrize("kind", ["windows", "padded"])
@pytest.mark.parametrize("name", [VARLEN, BY_DOCUMENT])
def test_long_rows_that_need_a_mask_under_other_attention_go_by_tiles(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short ones have the mask that they always had: no run changes its bits."""
    model = make_model(config_of("gemma3_text")).eval()
    batch = batch_of("padded" if kind == "padded" else "whole")
    batch.pop("labels")
    set_attention(model, name)
    for longest, number in ((TOKENS, 0), (TOKENS - 1, 2)):
        monkeypatch.setattr(masks, "MOST_TOKENS", longest)
        makes = mock.patch.object(masking_utils, "sdpa_mask", wraps=masking_utils.sdpa_mask)
        with makes as make, Largest() as largest, torch.no_grad():
            model(**batch)
        assert make.called == (number == 0)
        assert (largest.pairs > 0) == (number == 0)


def test_a_mask_of_pairs_beside_a_soft_cap_and_dropout_are_refused() -> None:
    model = make_model(FAMILIES["gemma2"]()).eval()
    set_attention(model, TILED)
    ids = torch.ones(1, 4, dtype=torch.long)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    with pytest.raises(ModelError, match="takes no mask of pairs beside a soft cap or sinks"):
        model(input_ids=ids, attention_mask=dict.fromkeys(set(model.config.layer_types), mask))
    config = FAMILIES["gemma2"]()
    config.attention_dropout = 0.1
    model = make_model(config).train()
    set_attention(model, TILED)
    with pytest.raises(ModelError, match=r"attention by tiles \(tiled\) has no dropout"):
        model(input_ids=ids)


# -- rules --------------------------------------------------------------------------------------------------


def rule(**given: Any) -> dict[str, Any]:
    return {"batch_size": 2, "q_length": 8, "kv_length": 8, **given}


def of_model(config: PretrainedConfig, **given: Any) -> Any:
    """Return what stands for a model's masks, of two rows of 8 tokens."""
    config._attn_implementation = TILED
    embeds = torch.zeros(2, 8, config.hidden_size)
    return create_causal_mask(config, embeds, given.pop("attention_mask", None), None, **given)


def places(sight: Sight) -> list[int]:
    """Return where documents begin, and the end."""
    assert sight.starts is not None
    return list(dict.fromkeys(sight.starts.tolist()))


def test_what_masks_say_is_said() -> None:
    config = FAMILIES["llama"]()
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [7, 8, 9, 10, 11, 12, 0, 1]])
    assert of_model(config) is None
    found = of_model(config, position_ids=positions)
    assert isinstance(found, Sight)
    assert found.starts is not None
    assert places(found) == [0, 3, 5, 8, 14, 16]
    assert len(found.starts) == 17, "so that compiled code sees few lengths"
    assert of_model(config, attention_mask=torch.ones(2, 8)) is None
    padding = torch.ones(2, 8)
    padding[0, 6:] = 0
    found = of_model(config, attention_mask=padding)
    assert found.present.tolist() == padding.bool().tolist()
    assert (found.window, found.starts) == (None, None)


def test_positions_of_the_host_are_read_there() -> None:
    config = FAMILIES["llama"]()
    positions = torch.tensor([[0, 1, 0, 1, 2, 3, 4, 5]] * 2)
    known = np.array([[0, 1, 2, 3, 0, 1, 2, 3]] * 2)
    for shape, begins in (((2, 8), [0, 4, 8, 12, 16]), ((2, 4), [0, 2, 8, 10, 16])):
        packed = Packed(is_packed=True, positions=known[:, : shape[1]])
        with documents(packed):
            found = of_model(config, position_ids=positions)
        assert places(found) == begins


def test_chunks_begin_anew_in_each_document_by_its_positions() -> None:
    config = llama4()
    config.attention_chunk_size = 4
    config._attn_implementation = TILED
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1], [2, 3, 4, 5, 6, 7, 8, 9]])
    embeds = torch.zeros(2, 8, config.hidden_size)
    made = {
        name: create_masks_for_generate(config, embeds, None, None, position_ids=each)["chunked_attention"]
        for name, each in (("packed", positions), ("whole", None))
    }
    assert places(made["packed"]) == [0, 4, 6, 8, 10, 14, 16]
    assert places(made["whole"]) == [0, 4, 8, 12, 16]


def window(size: int) -> Callable[..., Any]:
    return masking_utils.sliding_window_causal_mask_function(size)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"mask_function": window(3)}, 3),
        ({"mask_function": window(8)}, None),
        ({"mask_function": window(3), "q_length": 1, "q_offset": 20, "kv_offset": 13}, 3),
        ({"mask_function": window(3), "q_length": 2, "q_offset": 6}, 3),
    ],
)
def test_windows(given: dict[str, Any], expected: int | None) -> None:
    found = sight_of(rule(**given))
    assert found is not None
    assert found.window == expected


@pytest.mark.parametrize(
    "given",
    [
        {"mask_function": masking_utils.bidirectional_mask_function},
        {"mask_function": masking_utils.or_masks(masking_utils.causal_mask_function, window(2))},
        {"mask_function": masking_utils.and_masks(window(3), masking_utils.causal_mask_function)},
        {
            "mask_function": masking_utils.and_masks(
                lambda b, h, q, k: q >= k - 1, masking_utils.causal_mask_function
            )
        },
        {"mask_function": lambda b, h, q, k: k <= q},
        {"q_length": 4},
        {"q_length": 1, "q_offset": torch.tensor(7)},
    ],
)
def test_of_another_rule_nothing_is_said(given: dict[str, Any]) -> None:
    """It gets its mask, and is refused where that would be too long."""
    assert sight_of(rule(**given)) is None
    if "mask_function" in given:
        made = make_mask(**rule(allow_is_causal_skip=False, **given))
        assert isinstance(made, Tensor)
        assert made.shape == (2, 1, 8, 8)
