"""Attention by tiles in an engine: the bits of a resident model, and how often it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PretrainedConfig

from megatrain.config.attention import TILED
from megatrain.model.documents.begins import Packed, documents, set_attention
from tests.families import FAMILIES
from tests.model.documents.test_varlen import batch_of, cut
from tests.products import every_pair
from tests.reference import assert_same_bits
from tests.stream.activations.test_kept_results import count
from tests.stream.activations.test_on_drives import tiers_in
from tests.stream.runs import assert_same_masters, start


def config_of(family: str) -> PretrainedConfig:
    config = FAMILIES[family]()
    config.sliding_window = 24
    return config


@every_pair(
    family=["gemma2", "gpt_oss", "gemma3_text", "deepseek_v3"],
    activations=["keep", "offload", "recompute", "recompute_cheap", "keep_attention", "drop_boundary"],
    boundaries=["device", "host", "nvme"],
    lockstep=[1, 2],
    precision=["fp32", "bf16"],
    fragments=[False, True],
)
def test_packed_rows_train_as_resident(
    family: str,
    activations: str,
    boundaries: str,
    lockstep: int,
    precision: str,
    fragments: bool,
    tmp_path: Path,
) -> None:
    _, reference, engine, optimizer = start(
        config=config_of(family),
        prepare=lambda model: set_attention(model, TILED),
        activations=activations,
        boundaries=boundaries,
        tiers=tiers_in(tmp_path) if boundaries == "nvme" else None,
        lockstep=lockstep,
        precision=precision,
        fragments=fragments,
        max_grad_norm=None,
    )
    batches = [batch_of(cut(2, 9, seed)) for seed in range(2)]
    expected = reference.forward_backward([{**batch, "use_cache": False} for batch in batches])
    assert_same_bits(engine.forward_backward(batches), expected)
    reference.step(float(optimizer.step().grad_norm), None)
    assert_same_masters(engine, reference)
    engine.detach()


@pytest.mark.parametrize(
    ("activations", "times"), [("keep", 1), ("recompute", 2), ("recompute_cheap", 1), ("keep_attention", 1)]
)
def test_it_runs_no_second_time_where_its_results_are_kept(activations: str, times: int) -> None:
    model, _, engine, _ = start(
        config=config_of("gpt_oss"),
        prepare=lambda model: set_attention(model, TILED),
        activations=activations,
    )
    layers = model.config.num_hidden_layers
    assert count(engine, [batch_of(cut(2, 9))]) == (times * layers, layers)
    engine.detach()


@pytest.mark.parity
@pytest.mark.parametrize(("activations", "times"), [("keep_attention", 1), ("recompute", 2)])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_compiled_layers_call_it_whatever_documents_rows_have(
    family: str, activations: str, times: int
) -> None:
    model, reference, engine, _ = start(
        config=config_of(family),
        prepare=lambda model: set_attention(model, TILED),
        device="cpu",
        activations=activations,
        compile="on",
    )
    layers = model.config.num_hidden_layers
    count(engine, [batch_of(cut(2, 5, 7))])  # which compiles, and calls it as it does
    for seed in range(3):
        batch = batch_of(cut(2, 5, seed))
        assert count(engine, [batch]) == (times * layers, layers)
        packed = Packed(is_packed=True, positions=batch["position_ids"].numpy())
        with documents(packed):
            expected = reference.forward_backward([{**batch, "use_cache": False}])
        assert float(engine.forward_backward([batch])) == pytest.approx(float(expected), rel=1e-6)
        engine.zero_grad()
    engine.detach()
