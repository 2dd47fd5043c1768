"""A model whose rotary embeddings are scaled streams to the bits of the resident one of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import megatrain
from megatrain.config.choice import StepBatch
from megatrain.errors import ConfigError
from tests.families import FAMILIES, MAX_POSITIONS
from tests.kinds import tiny_config
from tests.reference import Resident, assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER, assert_same_masters, assert_same_round

TOKENS = 3 * MAX_POSITIONS
YARN = {"rope_type": "yarn", "factor": 4}


def as_transformers_has_it(family: str, kind: str) -> dict[str, Any]:
    """Return what a user of transformers would give `from_pretrained` for the same."""
    plain: Any = FAMILIES[family]().rope_parameters
    own = plain.get("full_attention", plain)
    scaling = {**own, "rope_type": kind, "factor": 4.0}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = MAX_POSITIONS
    if own is not plain:
        scaling = {**plain, "full_attention": scaling}
    longest = {} if kind == "linear" else {"max_position_embeddings": 4 * MAX_POSITIONS}
    return {"rope_parameters": scaling, **longest}


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "yarn"), ("llama", "linear"), ("mixtral", "yarn"), ("gemma3_text", "yarn")]
)
def test_scaled_model_equals_the_resident_one(tmp_path: Path, family: str, kind: str) -> None:
    make_model(FAMILIES[family]()).save_pretrained(tmp_path)
    given = as_transformers_has_it(family, kind)
    if family == "mixtral":  # transformers' YaRN fails on the None that is there
        given["head_dim"] = 8
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **given).train()
    reference = Resident(model, **HYPER)
    loaded = megatrain.load(tmp_path, rope_scaling={"type": kind, "factor": 4}).train()
    assert loaded.config.get_text_config().rope_parameters == given["rope_parameters"]
    engine = attach_plainly(
        loaded, device="checked", activations="recompute", num_micro_batches=2, lockstep=2
    )
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    plain = Resident(make_model(FAMILIES[family]()), **HYPER)
    for step in range(3):
        batches = make_batches(2, seed=step, tokens=TOKENS)
        loss = assert_same_round(engine, reference, batches)
        if step == 0:
            assert not torch.equal(loss, plain.forward_backward(batches)), "the scaling is there"
        stats = optimizer.step()
        reference.step(stats.grad_norm, 0.5)
        assert_same_masters(engine, reference)
    engine.detach()


def test_random_model_begins_from_the_same_values_whatever_its_positions() -> None:
    config = FAMILIES["llama"]()
    plain = megatrain.load(config=config, seed=3)
    scaled = megatrain.load(config=config, seed=3, rope_scaling=YARN)
    assert config.max_position_embeddings == MAX_POSITIONS, "the caller's configuration is its own"
    assert scaled.config.max_position_embeddings == 4 * MAX_POSITIONS
    for (name, value), (_, other) in zip(plain.named_parameters(), scaled.named_parameters(), strict=True):
        assert_same_bits(value, other, name)


def test_rows_beyond_the_range_are_refused_before_anything_is_allocated() -> None:
    def batch(tokens: int) -> StepBatch:
        return StepBatch(micro_batch_size=1, seq_len=tokens, num_micro_batches=1)

    config = FAMILIES["llama"]()
    with pytest.raises(
        ConfigError, match=r"batch\.seq_len 65 .*context of 64 tokens; use 64 or less, or load\(.* 2}"
    ):
        megatrain.load(config=config, batch=batch(65))
    with pytest.raises(
        ConfigError, match=r"batch\.seq_len 257 .*256 tokens \(yarn, factor 4\).*'factor': 5}"
    ):
        megatrain.load(config=config, batch=batch(257), rope_scaling=YARN)
    model = megatrain.load(config=config, batch=batch(256), rope_scaling=YARN)
    with pytest.raises(ConfigError, match=r"batch\.seq_len 257 .*\(yarn, factor 4\); use 256 or less$"):
        megatrain.attach(model, batch=batch(257))
    megatrain.attach(model, batch=batch(256), device="cpu").detach()


def test_load_refuses_a_model_that_cannot_be_scaled() -> None:
    with pytest.raises(ConfigError, match="the gpt2 model has no rotary embeddings"):
        megatrain.load(config=FAMILIES["gpt2"](), rope_scaling=YARN)
    with pytest.raises(ConfigError, match="granitemoehybrid model computes no rotary"):
        megatrain.load(config=tiny_config("granitemoehybrid"), rope_scaling=YARN)
