"""Streamed equals resident on the device, bit for bit: an accelerator's lanes, streams and autograd thread.

Bits are those of the resident model on the same device. The device computes with the CPU's kernels, but takes
other ways than the CPU through models that ask which device they are on.
"""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.checkpoint.rng import encode_rng, restore_rng
from megatrain.config.policies import POLICY_NAMES
from megatrain.stream.lanes import AcceleratorLanes
from tests.families import FAMILIES
from tests.host_device.device import TYPE, register
from tests.host_device.on_device.resident import ResidentOnDevice
from tests.products import pairwise_rows
from tests.reference import assert_same_bits, attach_plainly, make_batches, make_model, twin
from tests.stream.runs import (
    HYPER,
    assert_same_gradients,
    assert_same_masters,
    check_parity,
    family_config,
    recorded,
)
from tests.stream.test_speed_parity import AXES as SPEED_AXES
from tests.stream.test_speed_parity import row_name, settings_of

host = register()
AXES = {**SPEED_AXES, "device": (TYPE,)}
ROWS = pairwise_rows(AXES)
ALWAYS = list(zip(("llama_tied", "gemma2", "mixtral", "gpt2"), ROWS[::11], strict=False))


def dawdle(seed: int) -> None:
    """Let streams dawdle at random, as long as tens of kernels take, and copies now and then longer."""
    host.native.delay(seed, 0.1, 3e-4, 1e-4 * (seed % 3))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "row"), ALWAYS, ids=row_name)
def test_a_sample_of_settings_equals_resident(family: str, row: dict[str, Any]) -> None:
    dawdle(1)
    check_parity(family, **settings_of(row))


def test_a_deterministic_run_equals_resident() -> None:
    dawdle(4)
    check_parity("mixtral", device=TYPE, deterministic=True, activations="recompute", num_micro_batches=2)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("family", "row"),
    [(family, row) for (family, row) in zip(itertools.cycle(FAMILIES), ROWS, strict=False)],
    ids=row_name,
)
def test_every_pair_of_settings_equals_resident(family: str, row: dict[str, Any]) -> None:
    dawdle(2)
    check_parity(family, **settings_of(row))


@pytest.mark.parity
@pytest.mark.parametrize("activations", POLICY_NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_policy_equals_resident(family: str, activations: str) -> None:
    dawdle(3)
    check_parity(family, device=TYPE, activations=activations, num_micro_batches=2, lockstep=2, dropout=True)


@pytest.mark.parametrize("num_seeds", [2, pytest.param(200, marks=pytest.mark.parity)])
def test_delays_change_no_bit(num_seeds: int) -> None:
    """Nor of the norm, but for `fragments`, where fp32 sums of other blocks are rounded otherwise."""
    for has_fragments in (False, True):
        recorded.cache_clear()
        for seed in range(1, 1 + num_seeds):
            row = {**ROWS[seed % len(ROWS)], "dropout": True}
            if row["fragments"] is has_fragments:
                dawdle(seed)
                check_parity("llama_tied", **settings_of(row))


def test_bf16_equals_the_reference_loop() -> None:
    """Also the update of resident layers on the device, whose operations run in compute's stream."""
    dawdle(4)
    model = make_model(FAMILIES["llama_tied"]())
    reference = ResidentOnDevice(model, precision="bf16", **HYPER)
    engine = attach_plainly(model, device=TYPE, precision="bf16", lockstep=2, resident_layers=2)
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    for step in range(3):
        batches = make_batches(2, seed=step)
        expected = reference.forward_backward(batches, [1, 2])
        assert_same_bits(engine.forward_backward(batches, seeds=[1, 2]).cpu(), expected, f"loss {step}")
        assert_same_gradients(engine, reference.sums)
        reference.step(optimizer.step().grad_norm, 0.5)
    assert_same_masters(engine, reference)
    engine.lanes.close()


def test_an_adapted_model_generates_what_it_does_resident() -> None:
    """PEFT's `generate` calls the model inside the adapters, whose head is on the device too."""
    peft = pytest.importorskip("peft")
    dawdle(6)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        model = peft.get_peft_model(make_model(FAMILIES["llama"]()), config).eval()
    resident, ids = twin(model).to(TYPE), make_batches(1)[0]["input_ids"]
    engine = attach_plainly(model, device=TYPE)
    found, expected = model.generate(ids, max_new_tokens=3), resident.generate(ids.to(TYPE), max_new_tokens=3)
    assert found.tolist() == expected.tolist()
    engine.lanes.close()


@pytest.mark.parametrize("is_threaded", [True, False])
def test_backward_in_either_thread_gives_the_same_bits(is_threaded: bool) -> None:
    dawdle(5)
    with torch.autograd.set_multithreading_enabled(is_threaded):
        check_parity(
            "gpt2", device=TYPE, activations="recompute", num_micro_batches=2, lockstep=2, dropout=True
        )


def test_a_run_that_goes_on_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    """The device's generator is in the checkpoint, and a wrong one shows."""
    losses = []
    state: dict[str, Any] = {}
    for is_resumed in (False, True):
        engine = attach_plainly(make_model(family_config("gpt2", dropout=True)), device="auto")
        assert isinstance(engine.lanes, AcceleratorLanes)
        if is_resumed:
            torch.manual_seed(77)
            restore_rng(state)
        else:
            torch.manual_seed(1)
            engine.forward_backward(make_batches(2))
            state = encode_rng()
        losses.append(float(engine.forward_backward(make_batches(2, seed=3))))
        engine.lanes.close()
    assert state["accelerator"]["kind"] == TYPE
    assert len(state["accelerator"]["states"]) == 2
    assert losses[0] == losses[1]


def test_a_step_waits_for_the_device_where_it_must_and_nowhere_else() -> None:
    engine = attach_plainly(make_model(FAMILIES["llama_tied"]()), device=TYPE, activations="offload")
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    for step in range(3):
        engine.forward_backward(make_batches(2, seed=step), seeds=[1, 2])
        optimizer.step()
        engine.sync()
        counts = host.native.take_counts()
    engine.lanes.close()
    assert counts == {"copy": 1}, "of the squares, for the norm"
