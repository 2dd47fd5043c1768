"""No mask or matrix of scores beyond 16,384 x 16,384 tokens: refused before it is made, in one sentence."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    masking_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.models.llama.modeling_llama import LlamaMLP

import megatrain
from megatrain.config.choice import StepBatch
from megatrain.errors import ConfigError
from megatrain.model import masks
from megatrain.model.masks import MOST_TOKENS, LongAttentionError
from megatrain.model.profile.count import count_anatomy
from megatrain.model.profile.metering import Meter
from tests.families import FAMILIES
from tests.reference import Resident, attach_plainly, make_batches, make_model

LONG = MOST_TOKENS + 1
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 1 << 17,
}


def llama() -> PretrainedConfig:
    return LlamaConfig(**SMALL)


def mistral() -> PretrainedConfig:
    return MistralConfig(**SMALL, sliding_window=4096)


def gemma2() -> PretrainedConfig:
    return Gemma2Config(**SMALL, head_dim=16, sliding_window=4096)


def gpt2() -> PretrainedConfig:
    return GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=128, n_positions=1 << 17)


def count(config: PretrainedConfig, seq_len: int, **options: Any) -> Any:
    return count_anatomy(config, micro_batch_size=1, seq_len=seq_len, precision="bf16", **options)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- counted, as a plan and a run do it first ---------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_model_that_makes_no_mask_may_have_rows_of_any_length(make: Callable[[], PretrainedConfig]) -> None:
    tokens = 1 << 17
    anatomy = count(make(), tokens)
    assert anatomy.layers[0].forward.attention_flops == 2 * 2 * tokens**2 * 32 / 2
    # ids, positions, rotary tables and a row of ones: some numbers for each token, and none for each pair
    assert anatomy.pass_bytes < 1000 * tokens < tokens**2 / 100


def test_a_sliding_window_may_have_a_mask_of_16k_tokens_and_not_of_one_more() -> None:
    made = count(mistral(), MOST_TOKENS).pass_bytes - MOST_TOKENS**2
    assert 0 < made < 100 * MOST_TOKENS, "a byte for each pair, and rotary tables"
    message = refusal(lambda: count(mistral(), LONG))
    assert message == (
        "the mistral model, with model.attn_implementation=sdpa, would make an attention mask or scores of "
        "16,385 x 16,385 tokens (its window of 4,096 tokens needs one), and none beyond 16,384 x 16,384 is "
        "made; use model.attn_implementation=tiled, which needs none, or model.attn_implementation="
        "flash_attention_2, a package that needs none, or rows of at "
        "most 16,384 tokens (data.seq_len)"
    )


@pytest.mark.parametrize("make", [llama, gpt2, gemma2])
def test_eager_attention_is_refused_and_sdpa_named_where_the_model_has_it(
    make: Callable[[], PretrainedConfig],
) -> None:
    message = refusal(lambda: count(make(), LONG, attn_implementation="eager"))
    assert "16,385 x 16,385 tokens (eager attention always has one)" in message
    assert ("use model.attn_implementation=sdpa, or " in message) == (make is not gemma2)
    assert "model.attn_implementation=flash_attention_2" in message


REFUSED = {"bloom", "falcon", "falcon_alibi", "gemma2", "gemma3_text", "gpt_oss", "mixtral", "mpt", "qwen2"}
"""Families whose default attention makes a mask for rows that are whole."""


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_refused_if_they_make_a_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "MOST_TOKENS", 96)
    if family in REFUSED:
        assert "97 x 97 tokens" in refusal(lambda: count(FAMILIES[family](), 97))
    else:
        assert count(FAMILIES[family](), 97).seq_len == 97


@pytest.mark.parametrize("shape", [(LONG, LONG), (1, 1, LONG, LONG)])
def test_a_mask_from_anywhere_is_seen_at_the_kernel(shape: tuple[int, ...]) -> None:
    def attend(tokens: int) -> None:
        with FakeTensorMode(), Meter():
            query = torch.empty(1, 2, tokens, 8)
            mask = torch.empty((*shape[:-2], tokens, tokens), dtype=torch.bool)
            torch.nn.functional.scaled_dot_product_attention(query, query, query, mask)

    attend(MOST_TOKENS)
    with pytest.raises(LongAttentionError, match="16385 x 16385"):
        attend(LONG)


def test_scores_are_seen_where_they_become_weights_and_logits_are_none() -> None:
    with FakeTensorMode(), Meter():
        torch.empty(1, 2, MOST_TOKENS, MOST_TOKENS).softmax(-1)
        torch.empty(1, LONG, 1 << 17).softmax(-1)  # of a vocabulary
        with pytest.raises(LongAttentionError, match="16385 x 16385"):
            torch.empty(1, 2, LONG, LONG).softmax(-1)


# -- of a model's own code ----------------------------------------------------------------------------------


def decayed(hidden: Tensor) -> Tensor:
    """Mix tokens by a matrix of decay, as linear attention is written down."""
    places = torch.arange(hidden.shape[1])
    return (0.9 ** (places[:, None] - places).clamp(min=0)).tril().to(hidden.dtype) @ hidden


def biased(hidden: Tensor) -> Tensor:
    """Mix tokens by a bias for each head and each pair of them, in which the row is padded by one token."""
    bias = torch.zeros(4, hidden.shape[1], hidden.shape[1] + 1, dtype=hidden.dtype)
    return hidden + bias.mean((0, 2))[None, :, None]


def chosen(hidden: Tensor) -> Tensor:
    """Score each token against groups of eight, as an indexer of keys does."""
    keys = hidden[:, : hidden.shape[1] // 8 * 8].unflatten(1, (-1, 8)).mean(2)
    return hidden + (hidden @ keys.transpose(1, 2)).relu().amax(-1, keepdim=True)


def in_chunks(hidden: Tensor) -> Tensor:
    """Mix the tokens of each 64, and the states of chunks."""
    chunks = nn.functional.pad(hidden, (0, 0, 0, -hidden.shape[1] % 64)).unflatten(1, (-1, 64))
    mixed = torch.ones(64, 64, dtype=hidden.dtype).tril() @ chunks
    return mixed.flatten(1, 2)[:, : hidden.shape[1]]


@pytest.mark.parametrize(
    ("mix", "tokens", "pairs"),
    [
        (decayed, LONG, "16,385 x 16,385"),
        (decayed, MOST_TOKENS, None),
        (decayed, 1 << 20, "1,048,576 x 1,048,576"),  # of positions, which are known: 8 TiB are not computed
        (biased, LONG, "16,386 x 16,385"),
        (chosen, 1 << 16, "65,536 x 8,192"),
        (chosen, 1 << 15, None),
        (in_chunks, 1 << 20, None),
    ],
)
def test_pairs_of_tokens_are_seen_whatever_makes_them(
    mix: Callable[[Tensor], Tensor], tokens: int, pairs: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, hidden: forward(self, mix(hidden)))
    if pairs is None:
        assert count(llama(), tokens).seq_len == tokens
    else:
        assert f"scores of {pairs} tokens (its own code makes them)" in refusal(
            lambda: count(llama(), tokens)
        )


def test_sizes_of_a_model_that_are_as_large_as_its_rows_are_no_tokens() -> None:
    """A vocabulary, a layer and a context of the very length; a fused product has two of them in one."""
    tokens = 1 << 17
    sizes = {"vocab_size": tokens, "intermediate_size": tokens, "max_position_embeddings": tokens}
    fused = Phi3Config(**{**SMALL, **sizes, "pad_token_id": 0})
    assert count(fused, tokens).seq_len == tokens


# -- as it runs ---------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that an operation has made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.numel = max(
            [self.numel, *(leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor))]
        )
        return made


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let masks end at so many tokens that they are larger than anything else."""
    monkeypatch.setattr(masks, "MOST_TOKENS", 512)
    return 512


@pytest.fixture
def clean() -> Iterator[None]:
    """When a test ends, transformers has its own functions again, but for engines of other tests."""
    gc.collect()
    before = len(masks._guards)
    yield
    assert len(masks._guards) == before
    assert (AttentionMaskInterface._global_mapping["sdpa"] is masking_utils.sdpa_mask) == (not before)
    assert (AttentionInterface._global_mapping["sdpa"] is sdpa_attention_forward) == (not before)


def small(**changes: Any) -> PretrainedConfig:
    return LlamaConfig(**{**SMALL, **changes})


def given(case: str, tokens: int) -> dict[str, Any]:
    """Make a row that has to have a mask."""
    batch: dict[str, Any] = dict(make_batches(1, rows=1, tokens=tokens, padded=case == "padded")[0])
    if case == "packed":
        batch |= {"position_ids": torch.arange(tokens)[None] % (tokens // 2), "use_cache": False}
    if case == "own mask":
        batch["attention_mask"] = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
    return batch


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    ("case", "cause"),
    [
        (
            "padded",
            "an attention_mask with padding needs one), and none beyond 512 x 512 is made; use rows without",
        ),
        ("packed", "packed rows (position_ids)"),
        ("own mask", "the batch has a mask of pairs"),
    ],
)
def test_a_batch_that_needs_a_long_mask_is_refused_before_it_is_made(
    short: int, case: str, cause: str
) -> None:
    model = make_model(small())
    reference = Resident(model)
    engine = attach_plainly(model, activations="recompute")
    long = given(case, short + 1)
    with Largest() as largest:
        message = refusal(lambda: engine.forward_backward([long]))
    assert "513 x 513 tokens" in message
    assert cause in message
    assert largest.numel < 513 * 513 / 2, "all that the engine is made of was there before"
    for batch in (given(case, short), make_batches(1, rows=1, tokens=short + 1)[0]):  # and it goes on
        loss = engine.forward_backward([batch])
        assert loss == reference.forward_backward([batch])
    engine.detach()


@pytest.mark.usefixtures("clean")
def test_other_models_of_the_process_are_left_alone_and_engines_may_end_in_any_order(short: int) -> None:
    first, second, other = (make_model(small()) for _ in range(3))
    batch = given("padded", short + 1)
    one, two = attach_plainly(first), attach_plainly(second)
    assert other(**batch).loss.isfinite()
    one.detach()
    assert first(**batch).loss.isfinite()
    refusal(lambda: second(**batch))
    two.detach()
    assert second(**batch).loss.isfinite()


@pytest.mark.usefixtures("clean")
def test_a_model_that_is_dropped_while_it_is_attached_is_let_go() -> None:
    model = make_model(small())
    engine = attach_plainly(model)
    engine.forward_backward(make_batches(1))
    gone = weakref.ref(model)
    del model, engine
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("clean")
def test_attach_refuses_what_it_cannot_plan_and_does_not_fall_back_to_caution(short: int) -> None:
    model = make_model(small(attn_implementation="eager"))
    batch = StepBatch(micro_batch_size=1, seq_len=short + 1, num_micro_batches=1)
    assert "(eager attention always has one)" in refusal(lambda: megatrain.attach(model, batch=batch))
    assert getattr(model, "_megatrain_engine", None) is None


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("deepseek_v3", {}, "on cpu torch has no kernel that spares them for heads of 16 and 8 elements"),
        (
            "llama",
            {"attention_dropout": 0.1},
            "on cpu torch has no kernel that spares them with dropout of attention), and none beyond",
        ),
    ],
)
def test_scores_that_torch_would_make_are_refused_before_it_does(
    short: int, family: str, changes: dict[str, Any], why: str
) -> None:
    """Nobody has foreseen the length: attach was given no batch."""
    config = FAMILIES[family]()
    config.update({"max_position_embeddings": 1024, **changes})
    model = make_model(config)
    engine = attach_plainly(model, activations="keep")
    with Largest() as largest:
        message = refusal(lambda: engine.forward_backward(make_batches(1, rows=1, tokens=short + 1)))
    assert "513 x 513 tokens" in message
    assert why in message
    assert largest.numel < 2 * 513 * 513, "of four heads"
    assert engine.forward_backward(make_batches(1, rows=1, tokens=short)).isfinite(), "and it goes on"
    engine.detach()


@pytest.mark.usefixtures("clean")
def test_dropout_in_attention_is_what_is_to_be_left_out(short: int) -> None:
    """Neither tiles nor kernels of documents can draw it: they are no way out."""
    sizes = {"vocab_size": 64, "n_positions": 1024, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = make_model(GPT2Config(**sizes, attn_pdrop=0.1))
    engine = attach_plainly(model, activations="keep")
    ids = torch.arange(short + 1)[None] % 64
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(short + 1)[None] % 300}
    message = refusal(lambda: engine.forward_backward([batch]))
    assert "use no dropout in attention (attn_pdrop=0.1), or " in message
    assert "tiled" not in message
    assert "varlen" not in message
    engine.detach()
