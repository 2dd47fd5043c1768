"""Cases that broke the engine once: models and uses that the families and the parity rows do not have."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from transformers import (
    HrmTextConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from megatrain.errors import ModelError
from megatrain.plan.program.kinds import Lane
from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine
from tests.families import FAMILIES, VOCAB_SIZE
from tests.products import every_pair, every_value
from tests.reference import Resident, assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER, assert_same_round, assert_same_steps, family_config


def attached(model: PreTrainedModel, **settings: Any) -> tuple[Resident, Any, Any]:
    """Attach a model, all of its saved activations worth a copy, with its reference and optimizer."""
    reference = Resident(model, **HYPER)
    engine = attach_plainly(model, **{"device": "checked", **settings})
    engine.arrangement.offloaded._min_bytes = 1
    return reference, engine, engine.adamw(**HYPER, max_grad_norm=0.5)


def layer_drop() -> PretrainedConfig:
    """Make a model that skips layers at random: its micro-batches do not take the same way."""
    return OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        word_embed_proj_dim=16,
        ffn_dim=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=64,
        layerdrop=0.4,
        dropout=0.1,
    )


@pytest.mark.sampled(2)
@every_value(activations=["recompute", "keep", "drop_boundary"], lockstep=[2, 4])
def test_layers_dropped_in_lockstep_equal_resident(activations: str, lockstep: int) -> None:
    reference, engine, optimizer = attached(
        make_model(layer_drop()), lockstep=lockstep, activations=activations
    )
    assert_same_steps(engine, optimizer, reference, steps=4, num_micro_batches=4)


def recurrent() -> PretrainedConfig:
    """Make a model that runs its layers several times in a forward, some of them without gradients."""
    return HrmTextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("activations", ["recompute", "keep", "drop_boundary"])
def test_layers_that_run_again_equal_resident_in_one_micro_batch(activations: str) -> None:
    reference, engine, optimizer = attached(make_model(recurrent()), activations=activations)
    assert_same_steps(engine, optimizer, reference, steps=2)


@pytest.mark.parametrize("lockstep", [1, 2])
def test_layers_that_run_again_are_refused_in_several_micro_batches(lockstep: int) -> None:
    _, engine, _ = attached(make_model(recurrent()), lockstep=lockstep)
    with pytest.raises(ModelError, match="more than once in a forward"):
        engine.forward_backward(make_batches(2))
    assert torch.is_grad_enabled()  # a forward that was left in the middle leaves no mode behind


@every_pair(
    activations=["recompute", "recompute_cheap", "drop_boundary", "keep"],
    resident_layers=[0, 2],
    trained=["layers.0", "layers.1.mlp", "q_proj"],
)
def test_frozen_fragments_equal_resident(activations: str, resident_layers: int, trained: str) -> None:
    model = make_model(FAMILIES["llama"]())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    reference, engine, optimizer = attached(
        model, fragments=True, activations=activations, resident_layers=resident_layers
    )
    assert_same_steps(engine, optimizer, reference, steps=2, num_micro_batches=2)


@pytest.mark.parametrize("resident_layers", [0, 2])
def test_state_dict_waits_for_updates(resident_layers: int) -> None:
    lanes = EmulatedLanes(EmulatedMachine(host_bytes_per_s=1e7))
    model = make_model(FAMILIES["llama"]())
    reference, engine, optimizer = attached(model, device=lanes, resident_layers=resident_layers)
    assert_same_round(engine, reference, make_batches(1), [0])
    reference.step(optimizer.step().grad_norm, 0.5)
    state = model.state_dict()
    for name in reference.masters:
        assert_same_bits(state[name], reference.master(name), name)
    engine.detach()


@pytest.mark.parametrize("updates", ["deferred", "immediate"])
def test_norm_of_a_failed_step_raises(updates: str) -> None:
    lanes = EmulatedLanes(EmulatedMachine(host_bytes_per_s=1e6))
    engine = attach_plainly(make_model(FAMILIES["llama"]()), device=lanes)
    optimizer = engine.adamw(**HYPER, updates=updates, max_grad_norm=None if updates == "immediate" else 0.5)
    submit = lanes._submit

    def failing(lane: Lane, function: Any, work: float, label: object) -> None:
        def fail() -> None:
            raise OSError("no more")

        submit(lane, fail if lane is Lane.HOST else function, work, label)

    if updates == "deferred":
        engine.forward_backward(make_batches(1))
    lanes._submit = failing  # type: ignore[method-assign]
    if updates == "immediate":
        with pytest.raises(OSError, match="no more"):
            step(engine, optimizer)
        return
    steps = []

    def norm() -> float:
        steps.append(optimizer.step())
        return float(steps[0].grad_norm)

    with pytest.raises(OSError, match="no more"):
        norm()
    for stats in steps:  # none where the job had failed before all of the step was issued
        with pytest.raises(ModelError, match="norm of this step is not known"):
            math.isfinite(stats.grad_norm)


def step(engine: Any, optimizer: Any) -> float:
    """Run a step to its end, and return its norm."""
    engine.forward_backward(make_batches(1))
    return float(optimizer.step().grad_norm)


def test_a_detached_model_can_be_copied() -> None:
    model = make_model(FAMILIES["llama"]())
    attach_plainly(model).detach()
    copied = copy.deepcopy(model)
    engine = attach_plainly(copied)
    engine.forward_backward(make_batches(1))
    for one, other in zip(model.parameters(), copied.parameters(), strict=True):
        assert one.data_ptr() != other.data_ptr()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", [{"activations": "offload"}, {"boundaries": "host"}])
def test_forwards_without_backward_leave_nothing_on_the_host(settings: dict[str, Any]) -> None:
    model = make_model(FAMILIES["llama"]())
    _, engine, optimizer = attached(model, **settings)
    held = set()
    for step in range(8):
        engine.forward_backward(make_batches(1, seed=step))
        optimizer.step()
        model(**make_batches(1, seed=step)[0])
        held.add((engine.arrangement.offloaded.host_bytes, len(engine.arrangement.offloaded._visits)))
    assert len(held) == 1


def test_rows_of_a_split_batch_draw_their_own_dropout() -> None:
    model = make_model(family_config("gpt2", dropout=True))
    attach_plainly(model, micro_batch_size=1)
    ids = torch.randint(3, 100, (1, 16)).repeat(2, 1)
    logits = model(input_ids=ids, labels=ids).logits
    assert not torch.equal(logits[0], logits[1])


def test_a_split_batch_may_return_a_tuple() -> None:
    model = make_model(FAMILIES["llama"]())
    attach_plainly(model, micro_batch_size=1)
    batch = make_batches(1)[0]
    loss, logits = model(**batch, return_dict=False)[:2]
    assert loss.ndim == 0
    assert logits.shape == (2, 16, VOCAB_SIZE)
