"""Sign-SGD: the bits of a plain loop in torch, streamed, on ranks and on drives; in 8, 6 or 4 bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import megatrain
from megatrain.config import build_config
from megatrain.config.choice import Choice, StepBatch
from megatrain.config.optimizers.registry import OPTIMIZERS, find
from megatrain.errors import CheckpointError, ConfigError
from megatrain.hardware.machines import load_machine
from megatrain.optim.pool import WorkerPool
from megatrain.optim.updates import RangePlanes, RangeStep, kernels_of
from megatrain.plan.cost.rates import Rates, bytes_per_update
from megatrain.plan.memory.host_pools import host_pools
from megatrain.plan.search.request import Request
from megatrain.store.placement import Tiers
from megatrain.stream.engine import Engine
from megatrain.train.loop import train
from megatrain.train.planning.plan_run import plan_run
from tests.distributed.cases import cut_at
from tests.distributed.threads import RankLanes, ThreadRanks, Turns
from tests.families import FAMILIES
from tests.plan.anatomies import llama_like
from tests.products import every_pair
from tests.reference import (
    Resident,
    assert_same_bits,
    attach_plainly,
    make_batches,
    make_model,
    round_half_up,
)
from tests.searches import planned_for_a_moment
from tests.stream.runs import assert_same_round
from tests.train.project import make_config, train_until
from tests.train.test_loop import assert_same_runs

STATES = {"fp32": 4, "bf16": 2, "none": 0}
"""Bytes of the momentum per parameter, by format."""
RATE, BETA, DECAY = 1e-2, 0.9, 0.1


def settings_of(state: str) -> dict[str, Any]:
    return {"lr": RATE, "weight_decay": DECAY, **({} if state == "none" else {"betas": (BETA,)})}


class PlainSigns(torch.optim.Optimizer):
    """The published algorithm on fp32 masters, with a decoupled decay; the oracle."""

    def __init__(self, groups: list[dict[str, Any]], dtype: torch.dtype | None) -> None:
        super().__init__(groups, {"lr": RATE})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for master in group["params"]:
                if master.grad is None:
                    continue
                mean = master.grad
                if self._dtype is not None:
                    kept = self.state[master].setdefault(
                        "momentum", torch.zeros_like(master, dtype=self._dtype)
                    )
                    mean = BETA * kept.float() + (1 - BETA) * mean
                    kept.copy_(mean)
                master.mul_(1 - RATE * group["weight_decay"]).add_(mean.sign(), alpha=-RATE)


def start(
    state: str,
    *,
    precision: str = "bf16",
    prepare: Callable[[PreTrainedModel], object] | None = None,
    max_grad_norm: float | None = 0.5,
    updates: str = "deferred",
    **settings: Any,
) -> tuple[Resident, Engine, Any]:
    """Make a model twice, resident and attached, to be trained by sign-SGD."""
    model = make_model(FAMILIES["llama_tied"]())
    if prepare is not None:
        prepare(model)
    reference = Resident(model, precision=precision)
    groups = [
        {"params": group["params"], "weight_decay": DECAY if group["weight_decay"] else 0.0}
        for group in reference.optimizer.param_groups
    ]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "none": None}[state]
    reference.optimizer = PlainSigns(groups, dtype)  # type: ignore[assignment]
    given = {"device": "checked", "precision": precision, "optimizer": "signsgd", "optimizer_state": state}
    engine = attach_plainly(model, **(given | settings))
    optimizer = engine.make_optimizer(max_grad_norm=max_grad_norm, updates=updates, **settings_of(state))
    return reference, engine, optimizer


def assert_same_masters(engine: Engine, reference: Resident) -> None:
    masters = dict(engine.named_masters())
    for name in reference.masters:
        assert_same_bits(masters[name], reference.master(name), name)


def whole_state(engine: Engine) -> dict[str, Tensor]:
    """Copy masters and momentum of all parameters, wherever they live."""
    engine.settle()
    found = dict(engine.named_masters())
    for number in range(len(engine.host.layouts)):
        with engine.host.borrow(number) as block:
            found |= {name: tensor.clone() for name, tensor in block.optimizer_tensors().items()}
    return found


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name


# -- the kernels ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_equal_the_loop(state: str, split: bool, dtype: torch.dtype) -> None:
    """Zeros of both signs, denormals, infinities and NaNs among them; on the host, and by torch."""
    generator = torch.Generator().manual_seed(0)
    optimizer, numel = find("signsgd", state), 64 * 37 + 5
    odd = torch.tensor([0.0, -0.0, float("nan"), 1e-42, float("inf")])
    master, gradient, before = (torch.randn(numel, generator=generator) for _ in range(3))
    master[:5], gradient[5:10], before[5:7] = odd, odd, 0.0
    working, remainder = master.clone(), None
    if split:
        working = round_half_up(master)
        high = working.view(torch.int16).to(torch.int32) << 16
        remainder = (master.view(torch.int32) - high).to(torch.int16)
    gradient = gradient.to(dtype)
    planes = {name: before.to(getattr(torch, plane.element)) for name, plane in optimizer.planes.items()}
    step = RangeStep(hyper=optimizer.defaults() | settings_of(state), count=1, grad_scale=0.37)
    mean = gradient.float() * torch.tensor(0.37)
    for plane in planes.values():
        mean = BETA * plane.float() + (1 - BETA) * mean
    expected = master.clone().mul_(1 - RATE * DECAY).add_(mean.sign(), alpha=-RATE)
    pool, kernels = WorkerPool(2), kernels_of(optimizer)
    for update in (
        lambda ranges: kernels.update_on_host(pool, ranges),
        lambda ranges: kernels.update_on_device(torch.device("cpu"), ranges),
    ):
        found = RangePlanes(
            working=working.clone(),
            remainder=None if remainder is None else remainder.clone(),
            gradient=gradient,
            state={name: plane.clone() for name, plane in planes.items()},
        )
        update([(step, found)])
        master = found.working
        if found.remainder is not None:
            high = found.working.view(torch.int16).to(torch.int32) << 16
            master = (high + found.remainder).view(torch.float32)
        assert_equal(master, expected)
        for plane in found.state.values():
            assert_equal(plane, mean.to(plane.dtype))
    pool.close()


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Assert the same bits, signs of zeros too, but for those of NaNs."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(actual.signbit() & ~actual.isnan(), expected.signbit() & ~expected.isnan())


# -- a model that streams ------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@every_pair(
    state=list(STATES),
    precision=["bf16", "fp32"],
    updates=["deferred", "immediate", "serial"],
    way=["plain", "resident", "fragments", "threads"],
)
def test_streamed_equals_the_plain_loop(state: str, precision: str, updates: str, way: str) -> None:
    """Losses, gradients and masters after each step, whether a block is updated on the host or the device."""
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "resident": {"resident_layers": 2},
        "fragments": {"fragments": True, "num_slots": 3},
        "threads": {"device": "emulated", "resident_layers": 4},
    }
    clip = None if updates == "immediate" else 0.5
    reference, engine, optimizer = start(
        state, precision=precision, max_grad_norm=clip, updates=updates, **ways[way]
    )
    for step in range(3):
        batches = make_batches(1, seed=step)
        if updates == "immediate":
            expected = reference.forward_backward(batches, [step])
            assert_same_bits(engine.forward_backward(batches, seeds=[step]), expected)
        else:
            assert_same_round(engine, reference, batches, [step])
        stats = optimizer.step()
        assert stats.grad_norm == pytest.approx(reference.norm(), rel=1e-6)
        reference.step(stats.grad_norm, clip)
        assert_same_masters(engine, reference)
    engine.detach()


def test_several_micro_batches_and_frozen_parts_equal_the_loop() -> None:
    def freeze(model: PreTrainedModel) -> None:
        model.requires_grad_(False)
        for part in (model.model.layers[1], model.model.layers[2].mlp.down_proj):
            part.requires_grad_(True)

    reference, engine, optimizer = start("bf16", prepare=freeze, num_micro_batches=3, lockstep=3)
    for step in range(2):
        assert_same_round(engine, reference, make_batches(3, seed=step), [0, 1, 2])
        reference.step(optimizer.step().grad_norm, 0.5)
        assert_same_masters(engine, reference)
    assert engine.host.plane_bytes["momentum"] == 2 * sum(layout.num_state for layout in engine.host.layouts)
    engine.detach()


def test_a_skipped_step_changes_nothing_and_clipping_only_the_momentum() -> None:
    _, engine, optimizer = start("fp32")
    batches = make_batches(1, seed=0)
    engine.forward_backward(batches)
    optimizer.step()
    before = whole_state(engine)
    handle = engine.model.lm_head.register_forward_hook(lambda *call: call[-1] * float("inf"))
    engine.forward_backward(batches)
    assert optimizer.step().skipped
    handle.remove()
    assert_same_state(whole_state(engine), before)
    assert optimizer.num_skipped == 1
    assert set(optimizer.steps.values()) == {1}
    engine.detach()


# -- bytes and plans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_host_bytes_are_those_of_the_table(state: str) -> None:
    _, engine, optimizer = start(state, max_grad_norm=None, updates="immediate")
    engine.forward_backward(make_batches(1))
    optimizer.step()
    elements = sum(layout.num_state for layout in engine.host.layouts)
    kept = ("working", "remainder", "momentum")
    nbytes = sum(size for name, size in engine.host.plane_bytes.items() if name in kept)
    assert nbytes == (4 + STATES[state]) * elements
    engine.detach()


def test_a_plan_knows_the_smaller_state_and_the_seconds_of_an_update() -> None:
    anatomy, batch = llama_like(), StepBatch(micro_batch_size=1, seq_len=1024, num_micro_batches=2)
    spec, choice = load_machine("h100"), Choice(updates="immediate").with_defaults(4)
    masters = sum(layer.num_params for layer in anatomy.layers)
    totals = {}
    for formats in OPTIMIZERS.values():
        for optimizer in formats:
            pools = host_pools(anatomy, choice, batch, optimizer)
            totals[optimizer.name, optimizer.state] = sum(pool.nbytes for pool in pools)
            request = Request(
                spec=spec,
                anatomy=anatomy,
                batch=batch,
                optimizer_name=optimizer.name,
                state=optimizer.state,
            )
            assert request.rates.optimizer == optimizer
    adamw, bf16, none = (totals[key] for key in (("adamw", "fp32"), ("signsgd", "bf16"), ("signsgd", "none")))
    assert adamw - bf16 > 6 * masters
    assert bf16 - none > 2 * masters
    rates = {state: Rates(spec, "bf16", find("signsgd", state)) for state in STATES}
    assert [bytes_per_update(find("signsgd", state)) for state in STATES] == [18, 14, 10]
    usual = Rates(spec, "bf16").update_s(26)
    for state, nbytes in {"fp32": 18, "bf16": 14, "none": 10}.items():  # memory bounds it
        assert rates[state].update_s(nbytes) == pytest.approx(usual * nbytes / 26)


def test_formats_and_names_are_refused_where_they_do_not_belong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the optimizer's state is 'int8'; use fp32, bf16 or none"):
        attach_plainly(make_model(FAMILIES["llama"]()), optimizer="signsgd", optimizer_state="int8")
    with pytest.raises(
        ConfigError, match=r"optim.state is int8 and optim.name is signsgd, whose state is kept in"
    ):
        make_config(tmp_path, optim={"name": "signsgd", "state": "int8"})
    with pytest.raises(
        ConfigError, match=r"optim.state is none, but state on drives .* is kept in fp32 or bf16"
    ):
        megatrain.load(
            config=FAMILIES["llama"](),
            tiers=Tiers(nvme=(tmp_path,)),
            optimizer="signsgd",
            optimizer_state="none",
        )
    engine = attach_plainly(make_model(FAMILIES["llama"]()), optimizer="signsgd", optimizer_state="bf16")
    with pytest.raises(ConfigError, match=r"the optimizer is adamw, but memory was planned for signsgd"):
        engine.adamw()
    with pytest.raises(ConfigError, match="signsgd has no eps; it takes lr, weight_decay, betas"):
        engine.make_optimizer(eps=1e-8)
    with pytest.raises(ConfigError, match=r"betas is \(1.0,\); the first is the decay of the momentum"):
        engine.make_optimizer(betas=(1.0,))
    engine.detach()


# -- ranks and drives ----------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("shape", "state", "resident_layers"),
    [((2, 1), "bf16", 0), ((2, 1), "none", 4), ((4, 2), "fp32", 0), ((4, 2), "bf16", 4)],
)
def test_ranks_have_the_bits_of_one(shape: tuple[int, int], state: str, resident_layers: int) -> None:
    def run(ranks: ThreadRanks | None) -> tuple[list[float], dict[str, Tensor]]:
        rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        own = slice(rank * 4 // size, (rank + 1) * 4 // size)
        batch = StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=4, num_runs=4)
        engine = attach_plainly(
            make_model(FAMILIES["llama"]()),
            device="cpu" if ranks is None else RankLanes(ranks.turns, rank),
            batch=batch,
            ranks=ranks,
            precision="bf16",
            optimizer="signsgd",
            optimizer_state=state,
            resident_layers=resident_layers,
        )
        optimizer = engine.make_optimizer(max_grad_norm=0.5, **settings_of(state))
        losses = []
        for step in range(2):
            losses.append(float(engine.forward_backward(make_batches(4, seed=step)[own])))
            optimizer.step()
        return losses, whole_state(engine)

    with cut_at(320):
        losses, alone = run(None)
        for told, found in Turns(*shape).run(run):
            assert told == pytest.approx(losses, rel=1e-6)  # sums of losses, which nothing depends on
            assert_same_state(found, alone)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_state_on_drives_has_the_bits_of_ram_and_is_found_again(tmp_path: Path, state: str) -> None:
    config = FAMILIES["llama"]()
    kind: dict[str, Any] = {"optimizer": "signsgd", "optimizer_state": state, "precision": "bf16"}

    def begin(tiers: Tiers | None) -> tuple[Engine, Any]:
        model = megatrain.load(config=config, tiers=tiers, **kind)
        engine = attach_plainly(model.train(), tiers=tiers, **kind)
        return engine, engine.make_optimizer(max_grad_norm=0.5, **settings_of(state))

    def take(engine: Engine, optimizer: Any, *steps: int) -> list[float]:
        losses = []
        for step in steps:
            losses.append(float(engine.forward_backward(make_batches(1, seed=step), seeds=[step])))
            optimizer.step()
        return losses

    tiers = Tiers(nvme=(tmp_path / "drive",), ram=1 << 30, blocks_in_ram=2, weights_in_ram=4)
    plain, last = begin(None)
    expected = take(plain, last, 0, 1, 2)
    engine, optimizer = begin(tiers)
    assert take(engine, optimizer, 0, 1) == expected[:2]
    engine.commit(2, {}, finish=lambda: {"steps": dict(optimizer.steps)})
    take(engine, optimizer, 7)  # what comes after the commit is forgotten
    engine.close()
    resumed, again = begin(replace(tiers, resumes=True))
    again.steps = dict.fromkeys(again.steps, 2)
    assert take(resumed, again, 2) == expected[2:]
    assert_same_state(whole_state(resumed), whole_state(plain))
    assert resumed.executor.counts.drive_read_bytes > 0
    resumed.close()
    other = {**kind, "optimizer": "adamw", "optimizer_state": "fp32"}
    with pytest.raises(CheckpointError):
        megatrain.load(config=config, tiers=replace(tiers, resumes=True), **other)


# -- whole runs ----------------------------------------------------------------------------------------------


def test_a_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """From a configuration, stopped and with a resident layer from then on."""
    settings: dict[str, Any] = {
        "train": {"steps": 6, "precision": "bf16"},
        "optim": {"name": "signsgd", "state": "bf16", "lr": 1e-3, "warmup_steps": 0},
        "checkpoint": {"every": 2},
    }
    train(make_config(tmp_path, "whole", **settings))
    train_until(make_config(tmp_path, "parts", **settings), 3)
    train(make_config(tmp_path, "parts", **settings, memory={"resident_blocks": 1}))
    assert_same_runs(tmp_path / "parts", tmp_path / "whole")
    other = settings | {
        "optim": settings["optim"] | {"name": "adamw"},
        "train": {"steps": 8, "precision": "bf16"},
    }
    with pytest.raises(CheckpointError, match=r"trained with optim.name=signsgd, not adamw"):
        train(make_config(tmp_path, "whole", **other))


def test_a_plan_of_the_command_shows_it(tmp_path: Path) -> None:
    config = make_config(tmp_path, optim={"name": "signsgd", "state": "bf16", "warmup_steps": 0})
    raw = config.model_dump(mode="json")
    with planned_for_a_moment():
        plans = {
            name: plan_run(
                {**raw, "optim": {**raw["optim"], **changes}}, load_machine("cpu-laptop"), source="test"
            )
            for name, changes in {"signsgd": {}, "adamw": {"name": "adamw", "state": "fp32"}}.items()
        }
    planes = {name: planned.plan.host_planes for name, planned in plans.items()}
    assert planes["signsgd"]["momentum"] == planes["adamw"]["exp_avg"] // 2
    assert build_config(raw).optimizer == find("signsgd", "bf16")
