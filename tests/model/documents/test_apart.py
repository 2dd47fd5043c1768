"""Which models keep packed documents apart: what their code says is what their numbers say."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM

from megatrain.model.documents.apart import why_not_apart
from tests.families import FAMILIES

LENGTHS = (7, 5, 12, 8)

STATEFUL = {"qwen3_next", "jamba", "mamba2"}
WITHOUT_POSITIONS = {"falcon_alibi", "bloom", "mpt"}
MASKS_WITHOUT_POSITIONS = {"opt", "gpt_oss"}
if Version(transformers.__version__) < Version("5.24"):  # which hands its positions on to its masks
    MASKS_WITHOUT_POSITIONS |= {"falcon"}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_from_the_code_is_what_the_model_does(family: str) -> None:
    config = FAMILIES[family]()
    reason = why_not_apart(config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    documents = [torch.randint(3, 120, (1, length)) for length in LENGTHS]
    given = {"input_ids": torch.cat(documents, dim=1), "use_cache": False}
    if family not in WITHOUT_POSITIONS | {"mamba2"}:
        given["position_ids"] = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with torch.no_grad():
        packed = model(**given).logits[0]
        alone = torch.cat([model(input_ids=ids, use_cache=False).logits[0] for ids in documents])
    assert (float((packed - alone).abs().max()) < 1e-5) is (reason is None), reason


@pytest.mark.parametrize(
    ("families", "words"),
    [
        (STATEFUL, "carry a state from token to token"),
        (WITHOUT_POSITIONS, "takes no positions"),
        (MASKS_WITHOUT_POSITIONS, "makes its masks without positions"),
        (set(FAMILIES) - STATEFUL - WITHOUT_POSITIONS - MASKS_WITHOUT_POSITIONS, "None"),
    ],
)
def test_reason_is_named(families: set[str], words: str) -> None:
    for family in families:
        assert words in str(why_not_apart(FAMILIES[family]())), family


def test_flash_attention_reads_documents_from_positions_itself() -> None:
    config = FAMILIES["gpt_oss"]()
    config._attn_implementation = "flash_attention_2"
    assert why_not_apart(config) is None
