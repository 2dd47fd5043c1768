"""Experts in chunks equal resident ones, bit for bit, and each block is fetched twice in a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from megatrain.model.blocks import find_blocks, group_layers, num_chunks
from megatrain.plan.program.features.weights import Fetch
from megatrain.stream.execute.executor import Executor
from tests.expert_families import APART, BEHIND, NUM_EXPERTS
from tests.products import pairwise_rows
from tests.reference import assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import add_adapters, assert_same_masters, assert_same_round, assert_same_steps, start

RERUN = ("recompute", "recompute_cheap", "keep_attention")


ROWS = pairwise_rows(
    {
        "family": list(APART),
        "activations": [*RERUN, "keep", "offload"],
        "boundaries": ["device", "host"],
        "expert_chunks": [4, 2, 8],
        "lockstep": [3, 1, 2],
        "device": ["checked", "emulated", "cpu"],
        "resident_layers": [0, 1],
        "sums": ["device", "host"],
        "num_slots": [4, 3, 7],
    }
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "row",
    [*ROWS[::4], *(pytest.param(row, marks=pytest.mark.parity) for n, row in enumerate(ROWS) if n % 4)],
    ids=lambda row: "-".join(map(str, row.values())),
)
def test_chunks_equal_a_resident_model(row: dict[str, Any]) -> None:
    settings = dict(row)
    family = settings.pop("family")
    _, reference, engine, optimizer = start(config=APART[family](), num_micro_batches=3, **settings)
    engine.arrangement.offloaded._min_bytes = 1
    assert engine.choice.expert_chunks == settings["expert_chunks"]
    assert any(layer.chunks for layer in engine.arrangement.layers)
    assert_same_steps(engine, optimizer, reference, steps=2, num_micro_batches=3)
    engine.detach()


@pytest.mark.parametrize("updates", ["immediate", "serial"])
def test_updates_of_chunks_may_come_at_any_time(updates: str) -> None:
    limit = None if updates == "immediate" else 0.5
    _, reference, engine, optimizer = start(
        config=APART["glm4_moe"](), expert_chunks=4, lockstep=2, updates=updates, max_grad_norm=limit
    )
    for step in range(2):
        batches = make_batches(2, seed=step)
        expected = reference.forward_backward(batches)
        assert_same_bits(engine.forward_backward(batches), expected, "loss")
        stats = optimizer.step()
        reference.step(stats.grad_norm, limit)
    assert_same_masters(engine, reference)
    engine.detach()


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_bf16_equals_the_reference_loop(family: str) -> None:
    _, reference, engine, optimizer = start(
        config=APART[family](), precision="bf16", expert_chunks=4, lockstep=2, num_micro_batches=2
    )
    assert_same_steps(engine, optimizer, reference, steps=3, num_micro_batches=2)
    engine.detach()


def test_a_callers_own_backward_is_the_same() -> None:
    model, reference, engine, optimizer = start(config=APART["olmoe"](), expert_chunks=4)
    (batch,) = make_batches(1)
    loss = model(**batch).loss
    loss.backward()
    assert_same_bits(loss.detach(), reference.forward_backward([batch]), "loss")
    optimizer.step()
    reference.step(optimizer.last_stats.grad_norm, 0.5)
    assert_same_masters(engine, reference)
    engine.detach()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_adapters_of_experts_equal_resident_ones(family: str) -> None:
    """PEFT adds them to whole matrices, of which a chunk has a part."""
    pytest.importorskip("peft")

    model, reference, engine, optimizer = start(
        config=APART[family](), prepare=add_adapters, expert_chunks=4, lockstep=2, num_micro_batches=2
    )
    adapted = {name.split(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert any("expert" in name for name in adapted)
    assert any(layer.chunks for layer in engine.arrangement.layers)
    assert_same_steps(engine, optimizer, reference, steps=2, num_micro_batches=2)
    engine.detach()


def test_what_is_not_trained_has_no_gradient_and_passes_one_on() -> None:
    def freeze(model: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts" not in name or ".1." in name)
        model.get_input_embeddings().requires_grad_(False)

    _, reference, engine, optimizer = start(
        config=APART["qwen3_moe"](), prepare=freeze, expert_chunks=4, lockstep=2, num_micro_batches=2
    )
    assert_same_steps(engine, optimizer, reference, steps=2, num_micro_batches=2)
    engine.detach()


def test_experts_without_tokens_have_gradients_of_zero() -> None:
    """All tokens are one word, so most chunks get none."""
    _, reference, engine, optimizer = start(config=APART["qwen3_moe"](), expert_chunks=8, lockstep=2)
    batches = make_batches(2)
    for batch in batches:
        batch["input_ids"].fill_(7)
    assert_same_round(engine, reference, batches)
    gradients = dict(engine.named_gradients())
    name = next(name for name in gradients if name.endswith("2.mlp.experts.down_proj"))
    used = gradients[name].flatten(1).any(dim=1)
    assert 0 < used.sum() < NUM_EXPERTS
    optimizer.step()
    engine.detach()


@contextmanager
def fetches() -> Iterator[Counter[int]]:
    """Count the fetches of each block."""
    found: Counter[int] = Counter()
    issue = Executor.issue

    def noted(executor: Executor, operation: Any) -> None:
        found[operation.block] += isinstance(operation, Fetch)
        issue(executor, operation)

    with mock.patch.object(Executor, "issue", noted):
        yield found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("family", list(APART))
def test_a_round_fetches_each_block_twice(family: str, activations: str) -> None:
    """All of its micro-batches pass a chunk before the next one comes, and a chunk goes back in one visit."""
    _, _, engine, optimizer = start(
        config=APART[family](), expert_chunks=4, lockstep=3, num_micro_batches=3, activations=activations
    )
    with mock.patch.object(Executor, "_improvise", side_effect=AssertionError("a visit was not foreseen")):
        for step in range(2):
            with fetches() as found:
                engine.forward_backward(make_batches(3, seed=step))
                optimizer.step()
            inner = {block: found[block] for layer in engine.arrangement.layers for block in _numbers(layer)}
            assert set(inner.values()) <= {1, 2}
            # what is in the slots when the forward turns is not fetched again
            assert sum(count == 1 for count in inner.values()) <= engine.choice.num_slots
    engine.detach()


def _numbers(layer: Any) -> list[int]:
    return [block.index for block in layer.blocks]


def test_slots_are_as_large_as_the_largest_chunk() -> None:
    model = make_model(APART["qwen3_moe"]())
    engine = attach_plainly(model, device="checked", expert_chunks=8)
    first = 2 * 32 * 64 * 4  # of one expert, in fp32
    attention = 4 * sum(p.numel() for n, p in model.named_parameters() if ".0." in n and "experts" not in n)
    assert engine.arrangement.slots.slot_bytes >= max(first, attention)
    assert engine.arrangement.slots.slot_bytes < 2 * max(first, attention)
    engine.detach()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", list(APART))
def test_a_layer_comes_apart_in_the_order_of_its_forward(family: str) -> None:
    model = make_model(APART[family]())
    blocks = find_blocks(model, expert_chunks=4)
    layer = group_layers(blocks)[-1]
    assert num_chunks(blocks, layer) == 4
    rows = [blocks[index].rows for index in layer[1:9]]
    assert rows == [range(n, n + 2) for n in (6, 6, 4, 4, 2, 2, 0, 0)]
    later = {name for index in layer[9:] for name in blocks[index].parameters}
    prefix = f"{blocks[layer[0]].name}."
    modules = BEHIND.get(family, set())
    assert all(any(name.startswith(f"{prefix}{module}.") for module in modules) for name in later)
    assert all(any(name.startswith(f"{prefix}{module}.") for name in later) for module in modules)
    owned = [name for block in blocks for name in block.parameters if block.rows is None]
    assert len(set(owned)) == len(owned)
    assert blocks[layer[0]].keeps_experts_output is (family == "flex_olmo")
