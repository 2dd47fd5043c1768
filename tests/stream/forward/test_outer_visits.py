"""Embedding and head that stream through the slots: the same bits, on a device that does not hold both."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import megatrain
from megatrain.config.choice import Choice, StepBatch
from megatrain.errors import ConfigError
from megatrain.plan.search.planner import make_plan
from megatrain.store.placement import Tiers
from megatrain.stream import machine
from megatrain.stream.attach import resolve
from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine
from tests.families import FAMILIES
from tests.reference import Resident, attach_plainly, make_batches, make_model
from tests.stream.execute.test_updates import slow_host
from tests.stream.runs import HYPER, assert_backwards_add_up, assert_same_steps, start

SETTINGS: list[dict[str, Any]] = [
    {"activations": "keep"},
    {"lockstep": 3, "activations": "recompute", "boundaries": "host"},
    {"lockstep": 2, "fragments": True, "activations": "drop_boundary", "gradients": "device"},
    {"lockstep": 3, "num_slots": 1, "activations": "offload", "resident_layers": 1},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("device", "precision", "settings"),
    [
        ("checked", "fp32", SETTINGS[0]),
        ("checked", "bf16", SETTINGS[1]),
        ("emulated", "bf16", SETTINGS[2]),
        ("checked", "fp32", SETTINGS[3]),
        *(
            pytest.param(device, precision, settings, marks=pytest.mark.parity)
            for device in ("checked", "emulated", "cpu")
            for precision in ("fp32", "bf16")
            for settings in SETTINGS
        ),
    ],
)
def test_loss_gradients_and_weights_equal_resident(
    device: str, precision: str, settings: dict[str, Any]
) -> None:
    """With three micro-batches in one, two or three rounds, each as foreseen."""
    lanes = slow_host() if device == "emulated" else device
    settings = {**settings, "outer_streams": True}
    _, reference, engine, optimizer = start("llama", device=lanes, precision=precision, **settings)
    assert_same_steps(engine, optimizer, reference, steps=2, num_micro_batches=3)
    assert not engine.executor._surprised
    engine.detach()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_families_equal_resident(family: str) -> None:
    _, reference, engine, optimizer = start(family, outer_streams=True, lockstep=2)
    assert_same_steps(engine, optimizer, reference, steps=2, num_micro_batches=2)
    engine.detach()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_head_in_chunks_gives_what_a_resident_one_gives(precision: str) -> None:
    """Three chunks of a micro-batch are one visit each way; their gradients add up in fp32."""
    found = []
    for streams in (False, True):
        _, _, engine, optimizer = start(
            "llama", precision=precision, outer_streams=streams, head_chunk_tokens=11, lockstep=2
        )
        for step in range(2):
            engine.forward_backward(make_batches(2, seed=step), seeds=[0, 1])
            optimizer.step()
        assert engine.counts.chunked_tokens == 2 * 2 * 32
        assert not engine.executor._surprised
        found.append(dict(engine.named_masters()))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_backwards_of_the_caller_add_up() -> None:
    _, reference, engine, optimizer = start("llama", outer_streams=True, gradients="device")
    assert_backwards_add_up(engine, optimizer, reference, precision="fp32", reads=False)
    engine.detach()


@pytest.mark.parametrize("frozen", ["lm_head", "embed_tokens"])
def test_a_frozen_end_equals_resident(frozen: str) -> None:
    model = make_model(FAMILIES["llama"]())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    reference = Resident(model, **HYPER)
    engine = attach_plainly(model, device="checked", outer_streams=True, lockstep=2)
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    assert_same_steps(engine, optimizer, reference, steps=2, num_micro_batches=2)
    engine.detach()


def test_it_can_be_changed_between_steps_and_generation_goes_on() -> None:
    model, reference, engine, optimizer = start("llama", lockstep=2)
    for step in range(4):
        engine.reconfigure(replace(engine.choice, outer_streams=step % 2 == 0))
        assert bool(engine.arrangement.slots._resident) is True  # the norm's, at least
        assert_same_steps(engine, optimizer, reference, steps=1, first=step, num_micro_batches=2)
        ids = make_batches(1)[0]["input_ids"][:, :4]
        with torch.no_grad():
            engine.sync()
            expected = reference.model.generate(ids, max_new_tokens=4, do_sample=False)
            assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
        model.train()
    engine.detach()


def test_ends_that_are_tied_or_resident_are_refused() -> None:
    with pytest.raises(ConfigError, match="embedding and head stream through the slots, but they are tied"):
        attach_plainly(make_model(FAMILIES["llama_tied"]()), outer_streams=True)
    choice = Choice(outer_streams=True, outer_resident=True).with_defaults(4)
    with pytest.raises(ConfigError, match="but outer_resident keeps them"):
        attach_plainly(make_model(FAMILIES["llama"]()), choice=choice)


# -- runs in small with the proportions of those that did not fit ------------------------------------------

OUTER_HEAVY = LlamaConfig(  # as Qwen2.5-7B: an end weighs more than two layers
    vocab_size=1024,
    hidden_size=32,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
DEEP = LlamaConfig(  # as a dense 120B: ends of the size of a layer
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
BATCH = StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=3)


def planned(config: Any, *, device: int, ram: int, tmp_path: Any = None) -> Any:
    """Attach with all but the sizes of device and RAM open; hold two steps against the resident model."""
    model = make_model(config)
    reference = Resident(model, **HYPER)
    tiers = None if tmp_path is None else Tiers(nvme=(tmp_path / "drive",), ram=ram)
    lanes = EmulatedLanes(EmulatedMachine(device_bytes=device))
    engine = megatrain.attach(
        model,
        device=lanes,
        batch=BATCH,
        host_limit=ram if tiers is None else None,
        tiers=tiers,
        fragments=False,
        compile="off",
    )
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    assert_same_steps(engine, optimizer, reference, steps=2, num_micro_batches=3)
    assert 0 < engine.device_bytes_peak <= device
    choice = engine.choice
    engine.detach()
    return choice


def test_outer_blocks_stream_where_the_device_is_small() -> None:
    """Both ends with the sums of their gradients would take 4 x 131 kB, of 1.01 MB."""
    choice = planned(OUTER_HEAVY, device=1_010_000, ram=1 << 30)
    assert choice.outer_streams


def test_gradients_wait_where_there_is_room_for_each() -> None:
    """RAM holds 12 bytes of the 16 per parameter in fp32, and some gradients; the device holds others."""
    numel = sum(parameter.numel() for parameter in make_model(DEEP).parameters())
    choice = planned(DEEP, device=2_200_000, ram=int(14.2 * numel))
    assert set(choice.gradients) == {"device", "host"}


def test_a_plan_with_a_drive_is_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Qwen2.5-14B on an rtx-3090: state on a drive, and what the device holds of the gradients there."""
    monkeypatch.setattr(machine, "measure_matmul_peak", lambda *_: 6e10)  # a busy one has another plan
    monkeypatch.setattr(resolve, "make_plan", partial(make_plan, budget=3_000))
    numel = sum(parameter.numel() for parameter in make_model(DEEP).parameters())
    choice = planned(DEEP, device=2_200_000, ram=int(9 * numel), tmp_path=tmp_path)
    assert choice.tier("moments") == "nvme"
    assert "device" in choice.gradients


def test_gradients_on_three_places_equal_resident(tmp_path: Path) -> None:
    """As dense 120B on an H200: the device, RAM and a drive hold some each, and both ends stream."""
    model = make_model(DEEP)
    reference = Resident(model, **HYPER)
    places = ("device",) * 2 + ("host",) * 1 + ("nvme",) * 5
    engine = attach_plainly(
        model,
        device=EmulatedLanes(EmulatedMachine()),
        tiers=Tiers(nvme=(tmp_path / "drive",), ram=1 << 30),
        gradients=places,
        outer_streams=True,
        lockstep=8,
        num_micro_batches=8,
        activations="recompute",
    )
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    assert_same_steps(engine, optimizer, reference, steps=2, num_micro_batches=8)
    assert engine.last_step.drive_write_bytes == 5 * engine.executor.spec.sizes[3].parked_bytes
    engine.detach()
