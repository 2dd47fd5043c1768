"""Gradients of several rounds that the host adds up: the bits of sums on the device, and fewer copies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

from megatrain.errors import ConfigError
from megatrain.layout.host_buffers import NUM_GRADIENT_STAGING
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Operation
from megatrain.plan.program.step import step_program
from megatrain.store.placement import Tiers
from megatrain.stream.execute.gradient_buffers import Home
from megatrain.stream.lanes import Cause, OrderingError
from tests.families import FAMILIES
from tests.products import every_value
from tests.reference import Resident, attach_plainly, make_batches, make_model
from tests.stream.execute.test_updates import slow_host
from tests.stream.lanes.test_lanes import ForgetfulLanes
from tests.stream.runs import (
    HYPER,
    assert_backwards_add_up,
    assert_same_masters,
    assert_same_round,
    assert_same_steps,
    start,
)
from tests.stream.test_attack import layer_drop


def freeze_half(model: PreTrainedModel) -> None:
    """Freeze a part of every layer, and one whole."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "attn" not in name and ".0." not in name


@pytest.mark.sampled(3)
@every_value(
    family=("llama_tied", "mixtral", "gpt2", "deepseek_v3"),
    rounds=((2, 1), (3, 1), (2, 2), (2, 3)),
    precision=("fp32", "bf16"),
    updates=("deferred", "immediate", "serial"),
    place=("ram", "drives", "resident", "outer streams"),
    fragments=(False, True),
    freezes=(False, True),
    device=("checked", "emulated"),
)
def test_loss_gradients_and_weights_equal_resident(
    family: str,
    rounds: tuple[int, int],
    precision: str,
    updates: str,
    place: str,
    fragments: bool,
    freezes: bool,
    device: str,
    tmp_path: Path,
) -> None:
    """Rounds are (R, m), of which the last one of (2, 3) is short; experts miss gradients in some of them."""
    num_rounds, lockstep = rounds
    count = 5 if rounds == (2, 3) else num_rounds * lockstep
    settings: dict[str, Any] = {"lockstep": lockstep, "fragments": fragments}
    if place == "resident":
        settings["resident_layers"] = 1
    if place == "drives":
        settings["tiers"] = Tiers(nvme=(tmp_path / "drive",), ram=1 << 30, blocks_in_ram=2, weights_in_ram=3)
    if place == "outer streams" and "tied" not in family and family != "gpt2":
        settings["outer_streams"] = True
    if fragments or lockstep > 1:
        settings["num_gradient_buffers"] = 3
    clips = updates != "immediate"
    _, reference, engine, optimizer = start(
        family,
        device=slow_host() if device == "emulated" else device,
        precision=precision,
        prepare=freeze_half if freezes else None,
        updates=updates,
        max_grad_norm=0.5 if clips else None,
        sums="host",
        **settings,
    )
    if clips:
        assert_same_steps(engine, optimizer, reference, num_micro_batches=count)
        assert any(operation.label == "add" for operation in listed(engine, [lockstep, count - lockstep]))
    else:
        for step in range(2):
            batches = make_batches(count, seed=step)
            seeds = list(range(count))
            loss, expected = (side.forward_backward(batches, seeds=seeds) for side in (engine, reference))
            assert torch.equal(loss, expected)
            reference.step(optimizer.step().grad_norm, None)
            assert_same_masters(engine, reference)
    engine.close(removes=True)


def attached(**settings: Any) -> Any:
    """Attach a small llama to lanes that look for races."""
    return attach_plainly(make_model(FAMILIES["llama"]()), device="checked", **settings)


def listed(engine: Any, rounds: list[int]) -> list[Operation]:
    """List a step as the planner does."""
    return list(step_program(engine.executor.spec, [[1] * count for count in rounds if count]).operations)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("num_rounds", "lockstep"), [(3, 1), (2, 2)])
def test_norms_are_those_of_sums_on_the_device(precision: str, num_rounds: int, lockstep: int) -> None:
    """To the last bit, like everything else."""
    norms = []
    for sums in ("device", "host"):
        engine = attached(precision=precision, sums=sums, lockstep=lockstep)
        optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
        for step in range(2):
            engine.forward_backward(make_batches(num_rounds * lockstep, seed=step))
            norms.append((optimizer.step().grad_norm, engine.arrangement.gradients.shared._squares.tolist()))
        engine.detach()
    assert norms[:2] == norms[2:]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lockstep", [1, 2])
def test_a_gradient_that_is_missing_adds_nothing(precision: str, lockstep: int) -> None:
    """Not even to a sum of negative zeros, which a gradient of zeros would turn into zeros."""
    name = "model.layers.1.mlp.gate_proj.weight"
    found = []
    for sums in ("device", "host"):
        engine = attached(precision=precision, sums=sums, lockstep=lockstep)
        gradients = engine.executor.gradients
        seen: list[Any] = []
        collect = gradients.collect

        def changed(
            operation: Any, grads: Any, engine: Any = engine, seen: Any = seen, collect: Any = collect
        ) -> None:
            grads, trained = list(grads), engine.host.layouts[operation.block].trained
            for place, entry in enumerate(trained):
                if entry.name == name:
                    grads[place] = None if seen else torch.full_like(grads[place], -0.0)
                    seen.append(operation.visit.sums_on_host)
            collect(operation, grads)

        with mock.patch.object(gradients, "collect", changed):
            engine.forward_backward(make_batches(4))
        assert seen == [False] * lockstep + [sums == "host"] * (4 - lockstep)
        found.append(dict(engine.named_gradients()))
        assert torch.equal(bits(found[-1][name]), bits(torch.full_like(found[-1][name], -0.0)))
        engine.detach()
    for name, gradient in found[0].items():
        assert torch.equal(bits(found[1][name]), bits(gradient)), name


def bits(gradient: torch.Tensor) -> torch.Tensor:
    """View fp32 values as what tells a negative zero."""
    return gradient.view(torch.int32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("reads", [False, True])
def test_backwards_of_the_caller_add_up(precision: str, reads: bool) -> None:
    """Three before a step, each foreseen as the last: what was complete is added to on the host."""
    _, reference, engine, optimizer = start("llama_tied", precision=precision, sums="host")
    assert_backwards_add_up(engine, optimizer, reference, precision=precision, reads=reads)
    engine.detach()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lockstep", [1, 2])
def test_layers_dropped_by_chance_equal_resident(lockstep: int) -> None:
    """Micro-batches that take other ways than foreseen, so that rounds end early, or miss a block."""
    model = make_model(layer_drop())
    reference = Resident(model, **HYPER)
    engine = attach_plainly(model, device="checked", sums="host", lockstep=lockstep, num_gradient_buffers=2)
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    assert_same_steps(engine, optimizer, reference, steps=3, num_micro_batches=4)
    engine.detach()


def test_nothing_but_weights_goes_to_the_device_and_half_the_bytes_come_back() -> None:
    """Two rounds: 4 bytes per parameter up in each, and 4 and then 2 down; with sums there 4 more up."""
    moved = {}
    for sums in ("device", "host"):
        _, reference, engine, optimizer = start("llama", precision="bf16", sums=sums, num_slots=2)
        assert_same_steps(engine, optimizer, reference, steps=1, num_micro_batches=2)
        engine.settle()
        report = engine.last_step
        assert report is not None
        moved[sums] = report.fetch_bytes, report.offload_bytes
        layers = engine.executor.spec.layers
        sums_bytes = sum(engine.host.layouts[layer.blocks[0]].sizes.accumulator_bytes for layer in layers)
        engine.detach()
    assert moved["device"][0] - moved["host"][0] == sums_bytes
    assert moved["device"][1] == moved["host"][1], "two rounds: the complete sum is as large as a gradient"


@pytest.mark.parametrize(
    ("forgotten", "message"),
    [
        (
            Cause(Lane.HOST, Lane.OFFLOAD, "staging"),
            "lane host uses staging . without waiting until lane offload has written it",
        ),
        (
            Cause(Lane.OFFLOAD, Lane.HOST, "staging"),
            "lane offload uses staging . without waiting until lane host has read it",
        ),
    ],
)
def test_a_missing_wait_is_found(forgotten: Cause, message: str) -> None:
    """An addition before its gradient has come, and a buffer that is filled again too early."""
    lanes = ForgetfulLanes(forgotten)
    engine = attach_plainly(
        make_model(FAMILIES["llama_tied"]()),
        device=lanes,
        precision="bf16",
        sums="host",
        lockstep=2,
        num_gradient_buffers=2,
    )
    with pytest.raises(OrderingError, match=message):
        engine.forward_backward(make_batches(4))
    assert lanes.num_forgotten > 0


def test_a_change_between_steps_changes_no_bit() -> None:
    _, reference, engine, optimizer = start("llama_tied", precision="bf16", sums="host")
    for step, sums in enumerate(("host", "device", "host", "host")):
        engine.reconfigure(replace(engine.choice, sums=sums, lockstep=1 + step % 2, num_gradient_buffers=2))
        assert_same_steps(engine, optimizer, reference, steps=1, first=step, num_micro_batches=4)
        staging = engine.host.arena("staging")
        assert (staging is not None) == (sums == "host")
    engine.detach()


def test_the_buffers_are_as_planned() -> None:
    """Three of the largest block that streams; and none in a step of one round."""
    for count in (1, 2):
        _, reference, engine, optimizer = start("llama_tied", precision="bf16", sums="host")
        assert_same_steps(engine, optimizer, reference, steps=1, num_micro_batches=count)
        planes = engine.host.plane_bytes
        streamed = [engine.host.layouts[layer.blocks[0]].sizes for layer in engine.executor.spec.layers]
        largest = max(-(-sizes.gradient_bytes // 4096) * 4096 for sizes in streamed)
        assert planes.get("staging", 0) == (NUM_GRADIENT_STAGING * largest if count > 1 else 0)
        engine.detach()


def test_a_sum_that_is_complete_is_rounded_once() -> None:
    """In the gradient plane, with its squares; nothing is left to round when the step ends."""
    _, reference, engine, _ = start("llama_tied", precision="bf16", sums="host")
    assert_same_round(engine, reference, make_batches(3))
    streamed = [layer.blocks[0] for layer in engine.executor.spec.layers]
    assert {engine.arrangement.gradients.homes[block] for block in streamed} == {Home.GRADIENT}
    assert engine.arrangement.gradients.still_at(Home.ACCUMULATOR) == []
    engine.detach()


def test_complete_gradients_elsewhere_are_refused() -> None:
    with pytest.raises(ConfigError, match="gradients=device lets complete gradients wait there"):
        attach_plainly(make_model(FAMILIES["llama"]()), gradients="device", sums="host")
