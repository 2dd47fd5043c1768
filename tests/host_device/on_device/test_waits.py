"""A step waits for the device once, for the norm, whatever the family and the policies of its layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.config.attention import TILED
from megatrain.config.policies import POLICY_NAMES
from megatrain.model.documents.begins import set_attention
from tests.expert_families import APART
from tests.families import FAMILIES
from tests.host_device.device import TYPE, register
from tests.host_device.waits import Wait, watched
from tests.reference import Batch, attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER

host = register()

POLICIES = (
    ("keep", "offload", "recompute", "recompute"),
    ("recompute_cheap", "keep_attention", "recompute", "drop_boundary"),
)
"""Those of four layers: between them they are all of the table's."""

LISTED = {
    "falcon": {("copy", "transformers/models/falcon/modeling_falcon.py _split_heads")},
}
"""Waits that are transformers' own, by family.

falcon: `fused_qkv[..., [-2], :]` indexes by a list, of which torch makes a tensor on the host and copies it,
twice in each layer's forward. Nothing of ours stands between."""


def waits_of_a_step(
    family: str, batches: list[Batch], fault: Any = None, attention: str | None = None, **settings: Any
) -> tuple[list[Wait], dict[str, int]]:
    """Take two steps; return what threads that launch waited for in the second, and all threads' counts.

    Experts run as by default, and in bf16: torch's grouped product of fp32 reads its offsets on the host.
    """
    model = make_model((APART if "expert_chunks" in settings else FAMILIES)[family]())
    if attention is not None:
        set_attention(model, attention)
    is_routed = "expert" in str(model.config)
    if fault is not None:
        model.get_submodule("model.layers.1.mlp").register_forward_hook(fault)
    if is_routed:
        assert model.config._experts_implementation == "grouped_mm"
    given = {"lockstep": 2, "num_micro_batches": 2, "precision": "bf16" if is_routed else "fp32", **settings}
    engine = attach_plainly(model, device=TYPE, **given)
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    engine.count_experts()  # which a run does; they are read where the loss is
    for _ in range(2):
        host.native.take_counts()
        with watched() as found:
            engine.forward_backward(batches)
            optimizer.step()
        engine.sync()
    counts = host.native.take_counts()
    engine.lanes.close()
    return found, counts


def test_the_policies_are_all_that_there_are() -> None:
    assert {name for row in POLICIES for name in row} == set(POLICY_NAMES)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_waits_once_and_the_launching_thread_nowhere(family: str) -> None:
    """The one wait is the copy of the squares, in a thread of its own."""
    for policies in POLICIES:
        found, counts = waits_of_a_step(family, make_batches(2), activations=policies)
        assert {(wait.what, wait.place) for wait in found} == LISTED.get(family, set()), policies
        counts["copy"] -= len(found)
        assert counts == {"copy": 1}, policies


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_experts_in_chunks_wait_once_in_a_layer_of_each_micro_batch(family: str, activations: str) -> None:
    """For how many rows each chunk has, in the forward alone."""
    settings: dict[str, Any] = {"activations": activations, "expert_chunks": 4}
    found, _ = waits_of_a_step(family, make_batches(2), **settings)
    num_layers = 3 - (family == "glm4_moe")  # whose first layer is dense
    assert found == [Wait(what="event", place="megatrain/stream/lanes/accelerator.py read")] * 2 * num_layers


def packed(tokens: int = 16) -> list[Batch]:
    positions = torch.cat([torch.arange(5), torch.arange(tokens - 5)]).expand(2, -1)
    return [{**batch, "position_ids": positions} for batch in make_batches(2)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "batches",
    [packed(), make_batches(2, padded=True), make_batches(2)],
    ids=["packed rows", "padded rows", "whole rows"],
)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_attention_by_tiles_waits_for_nothing(family: str, batches: list[Batch]) -> None:
    """Where documents begin is known on the host, and masks of padding are read on the device alone."""
    found, counts = waits_of_a_step(family, batches, attention=TILED, activations="recompute")
    assert found == []
    assert counts["copy"] == 1
    assert "item" not in counts


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "batches", [packed(), make_batches(2, padded=True)], ids=["packed rows", "padded rows"]
)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_rows_with_documents_or_padding_wait_no_more(family: str, batches: list[Batch]) -> None:
    found, counts = waits_of_a_step(family, batches, activations="recompute")
    assert found == []
    assert counts == {"copy": 1}


def test_a_wait_in_a_forward_is_caught() -> None:
    """A number read of the device shows with its place."""

    def read(module: Any, args: Any, output: torch.Tensor) -> None:
        output.detach().sum().item()

    found, _ = waits_of_a_step("llama", make_batches(2), read, activations="keep")
    place = "transformers/models/llama/modeling_llama.py forward"
    assert found == [Wait(what="item", place=place)] * 2, "one in each micro-batch"


def test_a_write_to_where_a_mask_says_is_a_wait() -> None:
    values = torch.arange(4.0, device=TYPE)
    host.native.take_counts()
    values[values > 1] = 0.0  # one number: filled in
    assert host.native.take_counts() == {}
    values[values > 1] = torch.ones(0, device=TYPE)
    assert host.native.take_counts() == {"nonzero of a mask": 1}
