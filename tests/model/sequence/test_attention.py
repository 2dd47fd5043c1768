"""What attention functions are given, and what is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface
from transformers.models.llama import modeling_llama

from megatrain.errors import ModelError
from megatrain.model.profile.count import count_anatomy
from megatrain.model.sequence import attention
from megatrain.model.sequence.attention import rows_shared
from megatrain.model.sequence.shards import Counted
from tests.families import FAMILIES
from tests.model.sequence.test_check import check
from tests.reference import make_model


def _as_flash(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """Attend without a mask, as flash attention does: documents begin where positions do."""
    assert mask is None
    documents = given["position_ids"].eq(0).cumsum(-1)
    sees = (documents[:, :, None] == documents[:, None]).tril()[:, None]
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    output = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=sees)
    return output.transpose(1, 2), None


def test_a_kernel_that_reads_positions_gets_those_of_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", _as_flash)

    def change(model: PreTrainedModel) -> None:  # after it was made, when the package would be asked for
        model.config._attn_implementation = "flash_attention_2"

    check(FAMILIES["llama"](), change)
    monkeypatch.setattr(attention, "gather", lambda mine, rows: mine.repeat(1, rows.number))
    with pytest.raises(ModelError, match="tokens see others elsewhere"):
        check(FAMILIES["llama"](), change)


def test_others_go_on_as_they_are() -> None:
    before = AttentionInterface.get_interface, modeling_llama.create_causal_mask
    model, other, plain = (make_model(FAMILIES["llama"]()) for _ in range(3))
    with rows_shared(model, Counted(2)) as rows:
        with rows.active():
            torch.testing.assert_close(_logits(other), _logits(plain), rtol=0, atol=0)
            assert rows.num_calls == 0
            _logits(model)
            assert rows.num_calls == 4
        torch.testing.assert_close(_logits(model), _logits(plain), rtol=0, atol=0)
        assert rows.num_calls == 4
    found = AttentionInterface.get_interface, modeling_llama.create_causal_mask
    assert found == before or attention._shared  # engines of other tests may be attached


def _logits(model: PreTrainedModel) -> Tensor:
    logits: Tensor = model(torch.arange(16)[None], use_cache=False).logits
    return logits


@pytest.mark.sampled(2)
@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_a_rank_is_counted_by_what_it_computes(attn_implementation: str) -> None:
    """All work and all boundaries are halves, and what goes to the other rank is half of four tensors."""
    shape = {"micro_batch_size": 2, "seq_len": 64, "precision": "fp32", "device_type": "cpu"}
    shape["attn_implementation"] = attn_implementation
    config = FAMILIES["llama"]()
    whole = count_anatomy(config, **shape)  # type: ignore[arg-type]
    part = count_anatomy(config, **shape, sequence=2)  # type: ignore[arg-type]
    assert part.tokens == whole.tokens // 2 == 64
    assert part.model_flops_per_token == whole.model_flops_per_token
    for one, other in zip(part.layers, whole.layers, strict=True):
        assert one.forward.matmul_flops == other.forward.matmul_flops / 2
        assert one.forward.attention_flops == other.forward.attention_flops / 2
        assert one.backward.attention_flops == other.backward.attention_flops / 2
        assert one.boundary_bytes == other.boundary_bytes // 2
        queries, keys = 2 * 32 * 4 * 8 * 4, 2 * 32 * 2 * 8 * 4  # rows, tokens, heads, their size, fp32
        assert one.forward.swapped_bytes == one.backward.swapped_bytes == (2 * queries + 2 * keys) / 2
        assert other.forward.swapped_bytes == 0
