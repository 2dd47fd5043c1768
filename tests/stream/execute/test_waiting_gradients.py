"""Complete gradients that wait on the device for the norm: the same bits, without a plane on the host."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from megatrain.config import apply_overrides, build_config
from megatrain.config.runs import SumRoom
from megatrain.errors import CapacityError, ConfigError
from megatrain.layout import pools
from megatrain.layout.host_buffers import NUM_GRADIENT_STAGING, padded
from megatrain.plan.program.block_size import BlockSize
from megatrain.plan.program.features.waiting import held
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Program
from megatrain.plan.program.schedule import schedule
from megatrain.plan.program.spec import StepSpec
from megatrain.plan.program.step import update_program
from megatrain.plan.program.visits import LayerPlan, Round, Visit, round_visits
from megatrain.stream.engine import Engine
from megatrain.stream.forward.arrangement import places_of
from megatrain.stream.lanes import Cause, EmulatedLanes, EmulatedMachine, OrderingError
from megatrain.stream.memory import host_planes, residency_of
from megatrain.train.loop import train
from tests.families import FAMILIES
from tests.reference import Resident, attach_plainly, make_batches, make_model
from tests.stream.execute.test_memory import deep_config
from tests.stream.execute.test_updates import assert_same_planes, planes_of, slow_host
from tests.stream.lanes.test_lanes import ForgetfulLanes
from tests.stream.runs import (
    HYPER,
    assert_backwards_add_up,
    assert_same_masters,
    assert_same_round,
    assert_same_steps,
    check_parity,
    start,
)
from tests.stream.test_attack import layer_drop
from tests.train.project import make_config
from tests.train.test_loop import assert_same_runs

SETTINGS: list[dict[str, Any]] = [
    {"activations": "keep"},
    {"lockstep": 3, "activations": "recompute"},
    {"lockstep": 2, "fragments": True, "activations": "drop_boundary"},
    {"resident_layers": 2, "activations": "offload", "lockstep": 3},
    {"resident_layers": 4, "num_slots": 1},
]


def trained(lanes: Any, model: PreTrainedModel, num: int = 2, **settings: Any) -> tuple[Engine, Any]:
    engine = attach_plainly(model, device=lanes, **settings)
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    for step in range(2):
        engine.forward_backward(make_batches(num, seed=step))
        optimizer.step()
    return engine, optimizer


# -- numbers -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("device", "precision", "settings"),
    [
        *(("checked", "bf16", settings) for settings in SETTINGS),
        ("emulated", "fp32", SETTINGS[0]),
        ("emulated", "fp32", SETTINGS[3]),
        *(
            pytest.param(device, precision, settings, marks=pytest.mark.parity)
            for device, precision in (("emulated", "bf16"), ("checked", "fp32"), ("cpu", "bf16"))
            for settings in SETTINGS
        ),
    ],
)
def test_loss_gradients_and_weights_equal_resident(
    device: str, precision: str, settings: dict[str, Any]
) -> None:
    """With three micro-batches in one, two or three rounds."""
    lanes = slow_host() if device == "emulated" else device
    _, reference, engine, optimizer = start(
        "llama_tied", device=lanes, precision=precision, gradients="device", **settings
    )
    assert_same_steps(engine, optimizer, reference, steps=2, num_micro_batches=3)
    assert engine.host.arena("gradient") is None
    engine.detach()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "max_grad_norm", "updates"),
    [
        ("qwen3_moe", 0.5, "deferred"),
        ("opt", None, "serial"),
        *(
            pytest.param(family, norm, updates, marks=pytest.mark.parity)
            for family in ("gpt2", "gemma2", "mixtral")
            for norm in (0.5, None)
            for updates in ("deferred", "serial")
        ),
    ],
)
def test_families_equal_resident(family: str, max_grad_norm: float | None, updates: str) -> None:
    check_parity(
        family, gradients="device", updates=updates, max_grad_norm=max_grad_norm, num_micro_batches=2, steps=2
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("reads", [False, True])
def test_backwards_of_the_caller_add_up(precision: str, reads: bool) -> None:
    """Three backwards before a step, each foreseen as the last; reading gradients between changes none."""
    model, reference, engine, optimizer = start("llama_tied", precision=precision, gradients="device")
    assert_backwards_add_up(engine, optimizer, reference, precision=precision, reads=reads)
    assert engine.host.arena("gradient") is None
    assert model.training


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_backwards_of_the_caller_give_what_they_give_with_the_host_s_plane(precision: str) -> None:
    found = []
    for gradients in ("host", "device"):
        _, _, engine, optimizer = start("llama", precision=precision, gradients=gradients, resident_layers=1)
        for step in range(2):
            for batch in make_batches(3, seed=step):
                engine.model(**batch).loss.backward()
            optimizer.step()
        found.append(planes_of(engine))
    assert found[0].keys() == found[1].keys()
    for name, plane in found[0].items():
        assert torch.equal(plane, found[1][name]), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lockstep", [1, 4])
def test_layers_dropped_by_chance_equal_resident(lockstep: int) -> None:
    """Micro-batches that take other ways than foreseen: what has added up is held before its time."""
    model = make_model(layer_drop())
    reference = Resident(model, **HYPER)
    engine = attach_plainly(model, device="checked", lockstep=lockstep, gradients="device")
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    if lockstep == 1:
        assert_same_steps(engine, optimizer, reference, steps=3, num_micro_batches=4)
        return
    for step in range(3):  # the same terms, added in another order
        batches, seeds = make_batches(4, seed=step), [10 * step + n for n in range(4)]
        expected = reference.forward_backward(batches, seeds)
        torch.testing.assert_close(engine.forward_backward(batches, seeds=seeds), expected)
        for name, gradient in engine.named_gradients():
            torch.testing.assert_close(gradient, reference.sums[name], rtol=1e-4, atol=1e-6)
        reference.step(optimizer.step().grad_norm, 0.5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_skipped_steps_change_nothing(precision: str) -> None:
    model, reference, engine, optimizer = start(
        "llama_tied", device=slow_host(), precision=precision, gradients="device"
    )
    before = planes_of(engine)
    hook = model.lm_head.register_forward_hook(lambda _, __, logits: logits * math.inf)
    engine.forward_backward(make_batches(2))
    assert optimizer.step().skipped
    hook.remove()
    assert_same_planes(engine, before)
    assert_same_steps(engine, optimizer, reference, num_micro_batches=2)
    engine.detach()


def test_dropped_gradients_are_gone() -> None:
    _, reference, engine, optimizer = start("llama_tied", gradients="device")
    engine.forward_backward(make_batches(2, seed=9))
    optimizer.zero_grad()
    assert dict(engine.named_gradients()) == {}
    assert_same_steps(engine, optimizer, reference)


def test_a_block_without_gradient_is_not_updated() -> None:
    model, reference, engine, optimizer = start("llama_tied", gradients="device")
    for net in (model, reference.model):
        net.model.layers[1].requires_grad_(False)
    assert_same_round(engine, reference, make_batches(2))
    reference.step(optimizer.step().grad_norm, 0.5)
    assert_same_masters(engine, reference)


@pytest.mark.parity
def test_a_run_writes_what_a_run_with_the_host_s_plane_writes(tmp_path: Path) -> None:
    runs = []
    for gradients in ("host", "device", "auto"):
        (tmp_path / gradients).mkdir()
        config = make_config(
            tmp_path / gradients,
            train={"steps": 4, "device": "emulated", "precision": "bf16"},
            memory={"gradients": gradients, "fragments": False, "activations": "recompute", "lockstep": 2},
        )
        runs.append(train(config))
    assert_same_runs(runs[1], runs[0])
    assert_same_runs(runs[2], runs[0])


# -- order ---------------------------------------------------------------------------------------------------


def sized(is_streamed: bool, offload_bytes: int) -> BlockSize:
    return BlockSize(
        is_streamed=is_streamed,
        is_trained=True,
        fetch_bytes=10,
        offload_bytes=offload_bytes,
        accumulator_bytes=40,
        update_bytes=260,
    )


def waiting(visits: list[Visit], sizes: list[BlockSize], waits: Any, **options: Any) -> Program:
    """Schedule visits whose gradients wait on the device, where `waits` says so."""
    program = schedule(visits, sizes, [None, None], **options)
    return replace(program, operations=tuple(held(program.operations, waits)))


def test_the_program_holds_gradients_and_takes_them_home_after_the_norm() -> None:
    sizes = [sized(n < 2, 20) for n in range(3)]  # the last one is resident
    visits = round_visits([LayerPlan((0,)), LayerPlan((1,))])
    program = waiting(visits, sizes, lambda *_: True, num_gradient_buffers=2)
    assert str(program).split("\n")[-4:] == [
        "backward  b1 s1 g0",
        "hold      b1 g0",
        "backward  b0 s0 g1",
        "hold      b0 g1",
    ]
    assert program.nbytes("hold") == program.count("offload") == 0
    hold = program.operations[-1]
    assert (hold.lane, hold.reads) == (Lane.OFFLOAD, (("gradient_buffer", 1),))
    assert hold.writes == (("waiting", 0), ("squares", 0))
    layers = [LayerPlan((0,)), LayerPlan((1,))]
    spec = StepSpec(sizes=sizes, layers=layers, num_slots=2, num_gradient_buffers=2, tiers=("device",) * 3)
    norm, *ends = list[Any](update_program(spec, [0, 1, 2], held=[2, 0]))
    assert norm.reads == (("squares", 2), ("squares", 0), ("squares", 1))
    assert [str(operation) for operation in ends] == [
        "offload   b2",
        "update    b2",
        "offload   b0",
        "update    b0",
        "update    b1",
    ]
    assert [operation.staging for operation in ends] == [0, 0, 1, 1, -1]
    assert [operation.nbytes for operation in ends] == [20, 260, 20, 260, 260]
    assert ends[0].reads == (("resident_gradient", 2),)
    assert ends[2].reads == (("waiting", 0),)
    assert (ends[2].writes, ends[3].reads) == ((("staging", 1),), (("staging", 1), ("norm", 0)))


def test_sums_of_several_rounds_wait_too_in_fp32() -> None:
    """They are as large as complete ones. Nothing of them crosses the link."""
    sizes = [sized(True, 40)] * 2
    layers = [LayerPlan((0,)), LayerPlan((1,))]
    visits = round_visits(layers, Round(completes=False)) + round_visits(layers, Round(loads=True))
    program = waiting(visits, sizes, lambda *_: True)
    loads = [operation for operation in program.operations if operation.label == "load"]
    assert [(load.reads, load.nbytes) for load in loads] == [((("waiting", n),), 0) for n in (1, 0)]
    assert (program.count("hold"), program.count("offload")) == (4, 0)
    mixed = waiting(visits, sizes, lambda _, completes: completes)
    loads = [operation for operation in mixed.operations if operation.label == "load"]
    assert [(load.reads, load.nbytes) for load in loads] == [((("gradient", n),), 40) for n in (1, 0)]
    assert (mixed.count("hold"), mixed.count("offload")) == (2, 2)


MISSING_WAITS = {
    "held": (Cause(Lane.OFFLOAD, Lane.COMPUTE, "gradient_buffer"), "gradient_buffer 0"),
    "summed": (Cause(Lane.HOST, Lane.OFFLOAD, "squares"), "squares ."),
    "home": (Cause(Lane.HOST, Lane.OFFLOAD, "staging"), "staging 0"),
    "used": (Cause(Lane.OFFLOAD, Lane.HOST, "staging"), "staging 0"),
    "loaded": (Cause(Lane.FETCH, Lane.OFFLOAD, "waiting"), "waiting 3"),
    "resident": (Cause(Lane.OFFLOAD, Lane.COMPUTE, "resident_gradient"), "resident_gradient ."),
}


@pytest.mark.parametrize("name", MISSING_WAITS)
def test_a_missing_wait_is_found(name: str) -> None:
    cause, buffer = MISSING_WAITS[name]
    lanes = ForgetfulLanes(cause)
    num = 5 if name == "loaded" else 1  # with fewer than layers, compute has waited, and copies wait for it
    message = f"lane {cause.waiting.value} uses {buffer} without waiting"
    with pytest.raises(OrderingError, match=message):
        trained(lanes, make_model(FAMILIES["llama"]()), gradients="device", num_gradient_buffers=num)
    assert lanes.num_forgotten > 0


def test_offloads_need_not_wait_for_the_norm_and_updates_wait_for_theirs() -> None:
    """By the lanes' own record, on a machine with slow copies home."""
    lanes = EmulatedLanes(EmulatedMachine(d2h_bytes_per_s=2e6, jitter_s=0.0))
    _, _, engine, optimizer = start("llama_tied", device=lanes, gradients="device")
    for step in range(2):
        engine.forward_backward(make_batches(2, seed=step))
        optimizer.step()
    engine.sync()
    spans = lanes.take_record().spans
    offloads = {span.label: span for span in spans[len(spans) // 2 :] if span.label.startswith("offload")}
    updates = {span.label: span for span in spans[len(spans) // 2 :] if span.label.startswith("update")}
    assert len(offloads) == len(updates) == len(engine.host.layouts)
    for label, update in updates.items():
        assert update.start_s >= offloads[label.replace("update ", "offload")].end_s
    engine.detach()


# -- bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("resident_layers", "lockstep"), [(0, 2), (1, 1), (4, 1)])
def test_the_host_has_no_gradient_plane_and_the_device_has_what_was_planned(
    precision: str, resident_layers: int, lockstep: int
) -> None:
    settings: dict[str, Any] = {
        "precision": precision,
        "resident_layers": resident_layers,
        "lockstep": lockstep,
    }
    num = lockstep
    host, _ = trained("cpu", make_model(FAMILIES["llama"]()), num, **settings)
    engine, optimizer = trained("cpu", make_model(FAMILIES["llama"]()), num, **settings, gradients="device")
    layouts = engine.host.layouts
    choice = engine.choice
    away = [n for n in range(len(layouts)) if n not in engine.arrangement.residents]
    staging = NUM_GRADIENT_STAGING * max((padded(layouts[n].gradient_bytes) for n in away), default=0)
    gradients = sum(layout.gradient_bytes for layout in layouts)
    assert engine.host_bytes == host.host_bytes - gradients + staging
    planes = host_planes(
        engine.arrangement.binding.job,
        layouts,
        places_of(choice, engine.arrangement.binding.blocks, layouts),
        SumRoom(),
    )
    assert engine.host_bytes == sum(planes.values())
    sizes = pools.device_pools(
        residency_of(engine.arrangement.binding.blocks, layouts, engine.arrangement.residents),
        num_slots=choice.num_slots,
        num_gradient_buffers=choice.num_gradient_buffers,
        is_wide=lockstep > 1,
        waiting=places_of(choice, engine.arrangement.binding.blocks, layouts).on_device,
        optimizer=engine.arrangement.binding.job.optimizer,
    )
    assert engine.lanes.device_bytes == sum(sizes.values())
    streamed = [n for n, size in enumerate(engine.executor.spec.sizes) if size.is_streamed]
    assert sizes["waiting gradients"] == sum(layouts[n].gradient_bytes for n in streamed)
    assert engine.last_step.offload_bytes == sum(layouts[n].gradient_bytes for n in away)
    assert engine.last_step.offloads == len(streamed)
    engine.detach()
    assert optimizer.num_skipped == 0


def test_exact_clipping_takes_twelve_bytes_per_parameter() -> None:
    """Fifty layers, so that a few staging buffers weigh little."""
    model = make_model(deep_config(50))
    numel = sum(parameter.numel() for parameter in model.parameters())
    engine, _ = trained("cpu", model, 1, precision="bf16", gradients="device")
    assert 12.0 <= engine.host_bytes / numel < 12.3


# -- what is refused -----------------------------------------------------------------------------------------


def test_gradients_that_are_used_up_at_once_do_not_wait() -> None:
    message = "gradients=device lets gradients wait for the norm, and updates=immediate uses them up at once"
    _, _, engine, _ = start("llama", gradients="device", max_grad_norm=None)
    other = attach_plainly(make_model(FAMILIES["llama"]()), gradients="device")
    with pytest.raises(ConfigError, match=message):
        other.adamw(**HYPER, max_grad_norm=None, updates="immediate")
    assert other.choice.updates == "deferred"
    with pytest.raises(ConfigError, match=message):
        engine.reconfigure(replace(engine.choice, updates="immediate"))
    overrides = ["optim.updates=immediate", "optim.max_grad_norm=null", "memory.gradients=device"]
    with pytest.raises(ConfigError, match=r"memory\.gradients is device and optim\.updates is immediate"):
        build_config(apply_overrides({}, ["model.path=m", "data.path=a.txt", *overrides]))


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(ConfigError, match="gradients is 'disk'; use host, device, nvme or auto"):
        attach_plainly(make_model(FAMILIES["llama"]()), gradients="disk")


def test_drives_that_there_are_not_are_refused() -> None:
    for place in ("nvme", ("host", "device", "host", "nvme")):
        with pytest.raises(
            ConfigError, match=r"gradients is nvme, but there are no drives; .*gradients=host"
        ):
            attach_plainly(make_model(FAMILIES["llama"]()), gradients=place)
    with pytest.raises(ConfigError, match=r"memory\.gradients is nvme, but memory\.tiers names no drives"):
        build_config(apply_overrides({}, ["model.path=m", "data.path=a.txt", "memory.gradients=nvme"]))


def test_no_room_on_the_device_is_said_before_anything_is_allocated() -> None:
    limit = trained("cpu", make_model(FAMILIES["llama"]()))[0].lanes.device_bytes
    lanes = EmulatedLanes(EmulatedMachine(device_bytes=limit))
    sentence = r"device memory: .*waiting gradients.*the limit is .*use memory\.gradients=host"
    with pytest.raises(CapacityError, match=sentence):
        attach_plainly(make_model(FAMILIES["llama"]()), device=lanes, gradients="device")
    assert lanes.device_bytes == 0


def test_a_host_limit_that_only_a_plane_exceeds() -> None:
    """Refused with the option that fits, and trained with it."""
    model = make_model(deep_config(50))
    numel = sum(parameter.numel() for parameter in model.parameters())
    limit = int(12.5 * numel)
    with pytest.raises(CapacityError, match=r"host memory: .* use .*memory\.gradients=device"):
        attach_plainly(model, precision="bf16", host_limit=limit)
    engine = attach_plainly(model, precision="bf16", host_limit=limit, gradients="device")
    engine.adamw(**HYPER)
    assert engine.host_bytes <= limit
