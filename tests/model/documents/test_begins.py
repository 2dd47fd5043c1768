"""Where documents begin is read on the host, and flash attention is told it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel, masking_utils, modeling_flash_attention_utils

from megatrain.errors import ConfigError
from megatrain.model.documents.apart import why_not_apart
from megatrain.model.documents.begins import read_documents, require_one_row
from tests.families import FAMILIES
from tests.reference import attach_plainly, make_model

LENGTHS = ((7, 9, 16), (20, 12), (32,))
IDS = torch.arange(96).view(3, 32) * 7 % 120 + 3
PACKED = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in LENGTHS])


class _Reads(TorchDispatchMode):
    """Counts what makes the host wait for the device: values that are read back."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["llama", "gemma2"])
def family(request: pytest.FixtureRequest) -> str:
    """One kind of mask, and two."""
    return str(request.param)


FULL = torch.ones_like(IDS)
PADDED = torch.arange(32).expand(3, -1) < torch.tensor([[20], [32], [30]])


@pytest.mark.parametrize(
    "told",
    [{}, {"position_ids": PACKED}, {"attention_mask": FULL}, {"attention_mask": PADDED}],
    ids=["plain", "packed", "full", "padded"],
)
def test_no_value_is_read_back_in_a_forward(family: str, told: dict[str, Tensor]) -> None:
    gc.collect()  # engines of other tests, which share what is replaced
    found = masking_utils.find_packed_sequence_indices, masking_utils.fast_all
    model = make_model(FAMILIES[family]()).eval()
    given = {"input_ids": IDS, "use_cache": False} | told
    with torch.no_grad():
        expected = model(**given).logits
        with _Reads() as before:
            model(**given)
        engine = attach_plainly(model)
        with _Reads() as reads:
            logits = model(**given).logits
        engine.detach()
    is_asked = family != "gemma2" or "attention_mask" not in told  # a mask of gemma2's is always made
    assert (before.number > 0, reads.number) == (is_asked, 0)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    assert (masking_utils.find_packed_sequence_indices, masking_utils.fast_all) == found


# -- flash attention: transformers' own way to the kernels, with exact attention in their place --------------


def _attend(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> Tensor:
    """Attend within each of some stretches of tokens, all (tokens, heads, D)."""
    parts = []
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        q, k, v = (each[begin:end].transpose(0, 1) for each in (query, key, value))
        k, v = (each.repeat_interleave(len(q) // len(each), dim=0) for each in (k, v))
        parts.append(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1))
    return torch.cat(parts)


def _flash(query: Tensor, key: Tensor, value: Tensor, causal: bool = True, **_: Any) -> Tensor:
    assert causal
    whole = torch.tensor([0, query.shape[1]])
    return torch.stack([_attend(*row, whole) for row in zip(query, key, value, strict=True)])


def _flash_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = True,
    **_: Any,
) -> Tensor:
    assert causal
    assert cu_seqlens_q.dtype is torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    return _attend(query, key, value, cu_seqlens_q)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    found = modeling_flash_attention_utils
    monkeypatch.setattr(found, "_loaded_implementation", "flash_attention_2")
    monkeypatch.setattr(found, "_flash_fn", _flash)
    monkeypatch.setattr(found, "_flash_varlen_fn", _flash_varlen)
    process = found._lazy_define_process_function(_flash_varlen)
    monkeypatch.setattr(found, "_process_flash_kwargs_fn", process)


def _with_flash(model: PreTrainedModel) -> PreTrainedModel:
    model.config._attn_implementation = "flash_attention_2"  # when made so, it would ask for the package
    return model


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_flash_attention_keeps_documents_of_all_rows_apart(flash: None, rows: int, activations: str) -> None:
    model, reference = (make_model(FAMILIES["llama"]()) for _ in range(2))
    batch = {"input_ids": IDS[:rows], "labels": IDS[:rows], "position_ids": PACKED[:rows], "use_cache": False}
    expected = reference(**batch)
    expected.loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in reference.parameters()])
    engine = attach_plainly(_with_flash(model), activations=activations)
    with torch.no_grad(), _Reads() as reads:
        logits = model(**{name: batch[name] for name in ("input_ids", "position_ids")}).logits
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-5)
    optimizer = engine.adamw(lr=1e-3)
    loss = engine.forward_backward([batch])
    torch.testing.assert_close(loss, expected.loss.detach(), rtol=0, atol=1e-6)
    assert float(optimizer.step().grad_norm) == pytest.approx(float(norm), rel=1e-5)
    engine.detach()
    assert reads.number == model.config.num_hidden_layers  # in the kernel above, and nowhere else


def test_models_that_do_not_tell_flash_attention_are_refused(flash: None) -> None:
    config = FAMILIES["falcon"]()
    model = _with_flash(make_model(config))
    sentence = "the falcon model does not tell flash attention where they begin"
    assert why_not_apart(model.config) == sentence
    engine = attach_plainly(model)
    with pytest.raises(ConfigError, match=f"{sentence}.*use data.packing=pad"):
        model(input_ids=IDS, position_ids=PACKED)
    engine.detach()


def test_what_is_told_is_that_of_all_rows() -> None:
    config = FAMILIES["llama"]()
    config._attn_implementation = "flash_attention_2"
    packed, told = read_documents(config, (IDS,), {"position_ids": PACKED})
    assert packed is not None
    assert packed.is_packed
    assert told["cu_seq_lens_q"].tolist() == [0, 7, 16, 32, 52, 64, 96]
    assert told["max_length_k"] == 32
    one_each = {"input_ids": IDS, "position_ids": PACKED[2:].expand(3, -1)}
    packed, told = read_documents(config, (), one_each)
    assert packed is not None
    assert (packed.is_packed, told) == (False, {"use_cache": False})
    masked = one_each | {"attention_mask": torch.ones_like(IDS)}
    assert read_documents(config, (), masked) == (None, {"use_cache": False})


def test_several_packed_rows_in_shards_are_refused() -> None:
    require_one_row(torch.arange(32, 64).expand(2, -1), 1)
    require_one_row(PACKED[:1], 0)
    for positions in (PACKED, torch.arange(32).expand(3, -1) + 16):
        with pytest.raises(ConfigError, match=r"train\.micro_batch_size=1"):
            require_one_row(positions, 1)


def test_tokens_behind_a_cache_by_either_name_are_no_whole_rows() -> None:
    """Positions of a step of `generate` do not begin at 0, and the model's cache is obeyed."""
    config = FAMILIES["llama"]()
    given = {"input_ids": IDS[:, :1], "position_ids": torch.full((3, 1), 32)}
    for name in ("past_key_values", "cache"):
        assert read_documents(config, (), given | {name: DynamicCache(config=config)}) == (None, {})
    assert read_documents(config, (), given)[1] == {"use_cache": False}
