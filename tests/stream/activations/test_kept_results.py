"""What attention returns is kept: its forward runs once, wherever the results wait, and no bit changes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from megatrain.errors import warn_once
from megatrain.model.selective import is_attention
from megatrain.store.drives import system as calls
from megatrain.stream.engine import Engine
from tests.products import every_pair
from tests.reference import attach_plainly, make_batches, make_model
from tests.store.disks import Counted
from tests.stream.activations.test_boundaries import (
    BOUNDARY,
    LAYERS,
    ROWS,
    TOKENS,
    LiveBoundaries,
    deep_start,
)
from tests.stream.activations.test_on_drives import tiers_in
from tests.stream.runs import assert_same_round, assert_same_steps, family_config, start


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "system", Counted())


class Kernels(TorchDispatchMode):
    """Counts the kernels of attention that run, forwards and backwards."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.forwards, self.backwards = 0, 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.forwards += is_attention(func)
        self.backwards += "attention" in func.name() and func.name().endswith("backward")
        return func(*args, **(kwargs or {}))


def shrink(engine: Engine) -> None:
    """Let the smallest tensors leave the device."""
    engine.arrangement.offloaded._min_bytes = 1
    if engine.arrangement.scratch is not None:
        engine.arrangement.scratch.chunk_bytes = 8192


def count(engine: Engine, batches: Sequence[Any]) -> tuple[int, int]:
    """Count the forwards and backwards of attention in a step."""
    with Kernels() as kernels:
        engine.forward_backward(batches)
    engine.zero_grad()
    return kernels.forwards, kernels.backwards


@every_pair(
    boundaries=["device", "host", "nvme"],
    device=["cpu", "checked", "emulated"],
    num_micro_batches=[1, 3],
    lockstep=[1, 2],
    precision=["fp32", "bf16"],
    fragments=[False, True],
)
def test_attention_runs_once_and_no_bit_changes(
    boundaries: str,
    device: str,
    num_micro_batches: int,
    lockstep: int,
    precision: str,
    fragments: bool,
    tmp_path: Path,
) -> None:
    _, reference, engine, optimizer = start(
        "llama",
        activations="keep_attention",
        boundaries=boundaries,
        tiers=tiers_in(tmp_path) if boundaries == "nvme" else None,
        device=device,
        lockstep=lockstep,
        precision=precision,
        fragments=fragments,
    )
    shrink(engine)
    assert_same_steps(engine, optimizer, reference, num_micro_batches=num_micro_batches)
    calls = num_micro_batches * len(engine.arrangement.layers)
    assert count(engine, make_batches(num_micro_batches)) == (calls, calls)
    engine.detach()


# -- what waits ----------------------------------------------------------------------------------------------


OUTPUT = BOUNDARY
"""Bytes of an output of attention: its heads are as wide as the hidden states."""


@pytest.mark.parametrize("lockstep", [1, 2])
def test_outputs_and_sums_wait_with_boundaries_and_nothing_else_does(lockstep: int) -> None:
    """All but the last layer's go out once and come back once, but for the newest, which is still there."""
    model, reference, engine, _ = deep_start("keep_attention", boundaries="host", lockstep=lockstep)
    shrink(engine)
    sums = ROWS * TOKENS * model.config.num_attention_heads * 4
    offloaded = engine.arrangement.offloaded
    for step in range(2):
        saved, restored = offloaded.saved_bytes, offloaded.restored_bytes
        assert_same_round(engine, reference, make_batches(lockstep, seed=step, rows=ROWS, tokens=TOKENS))
        each = BOUNDARY + OUTPUT + sums
        assert offloaded.saved_bytes - saved == lockstep * (LAYERS - 1) * each
        assert offloaded.restored_bytes - restored == (lockstep * (LAYERS - 1) - 1) * each
        assert not offloaded._visits
    assert offloaded.kept_bytes == 0


def test_outputs_leave_the_device() -> None:
    """All but those of the last layer, and of the one before, which are on their way."""
    live = {}
    for boundaries in ("device", "host"):
        model, _, engine, _ = deep_start("keep_attention", boundaries=boundaries)
        batch = make_batches(1, rows=ROWS, tokens=TOKENS)[0]
        engine.forward_backward([batch])
        engine.zero_grad()
        with LiveBoundaries() as made:
            loss = model(**batch).loss
            live[boundaries] = made.live
            loss.backward()
        engine.detach()
    assert live["device"] - live["host"] == 2 * (LAYERS - 2), "boundaries and outputs, of one size"


# -- together with other policies ----------------------------------------------------------------------------


@pytest.mark.parametrize("boundaries", ["device", "host"])
@pytest.mark.parametrize("lockstep", [1, 2])
def test_a_dropped_boundary_is_made_of_kept_attention(boundaries: str, lockstep: int) -> None:
    """A layer that runs again for the next one's input finds what it keeps, and finds it once more."""
    policies = ["keep_attention", "drop_boundary", "keep_attention", "drop_boundary"] * 2
    _, reference, engine, optimizer = deep_start(policies, boundaries=boundaries, lockstep=lockstep)
    shrink(engine)
    assert_same_steps(engine, optimizer, reference, num_micro_batches=2)
    kept, again = 2 * 4, 2 * 2 * 4  # layers of which attention runs once, and twice
    assert count(engine, make_batches(2)) == (kept + again, 2 * LAYERS)
    engine.detach()


def test_kept_attention_beside_other_policies() -> None:
    policies = ["recompute", "keep_attention", "offload", "keep_attention", "recompute_cheap", "keep"]
    _, reference, engine, optimizer = deep_start(
        [*policies, "keep_attention", "recompute"], boundaries="host"
    )
    shrink(engine)
    assert_same_steps(engine, optimizer, reference, num_micro_batches=2)
    assert count(engine, make_batches(2)) == (2 * (LAYERS + 2), 2 * LAYERS)
    engine.detach()


def frozen_attention(model: PreTrainedModel) -> None:
    """Train the second half of each layer: before the first of these, nothing wants a gradient."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)


@pytest.mark.parametrize("boundaries", ["device", "host"])
def test_attention_of_which_nothing_is_trained_is_kept_too(boundaries: str) -> None:
    _, reference, engine, optimizer = start(
        "llama", prepare=frozen_attention, activations="keep_attention", boundaries=boundaries
    )
    shrink(engine)
    assert_same_steps(engine, optimizer, reference, num_micro_batches=2)
    layers = len(engine.arrangement.layers)
    assert count(engine, make_batches(1)) == (layers, layers - 1)
    engine.detach()


def test_the_host_s_limit_leaves_results_on_the_device(caplog: pytest.LogCaptureFixture) -> None:
    _, reference, engine, _ = deep_start("keep_attention", boundaries="host")
    shrink(engine)
    engine.arrangement.offloaded._ring._limit = 3 * BOUNDARY
    batches = make_batches(1, rows=ROWS, tokens=TOKENS)
    assert_same_round(engine, reference, batches)
    assert engine.arrangement.offloaded.kept_bytes > 0
    assert "stay on the device" in caplog.text
    engine.detach()


# -- attention that cannot be kept ---------------------------------------------------------------------------


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is logged, though an earlier test has had it logged once."""
    warn_once.cache_clear()
    caplog.set_level(logging.WARNING)
    return caplog


def test_eager_attention_is_said_at_attach_to_run_twice(said: pytest.LogCaptureFixture) -> None:
    model = make_model(family_config("gemma2"))
    attach_plainly(model, activations="keep_attention").detach()
    (record,) = [record.getMessage() for record in said.records if "keep_attention" in record.getMessage()]
    assert record == (
        "activations=keep_attention keeps nothing of attention in layers of gemma2, which runs again in the "
        "backward: eager attention returns no log-sum-exp; activations=recompute costs the same"
    )


def test_a_math_path_is_said_at_attach_to_run_twice(said: pytest.LogCaptureFixture) -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        attach_plainly(make_model(family_config("llama")), activations="keep_attention").detach()
    assert "heads of 8 on cpu but its math path" in said.text


def test_attention_with_dropout_is_said_to_run_twice_by_the_step(said: pytest.LogCaptureFixture) -> None:
    _, reference, engine, _ = start(config=family_config("gpt2", dropout=True), activations="keep_attention")
    assert "keep_attention" not in said.text
    assert_same_round(engine, reference, make_batches(1), [3])
    assert said.text.count("dropout in it") == 1
    engine.detach()


def test_nothing_is_said_where_attention_is_kept(said: pytest.LogCaptureFixture) -> None:
    _, reference, engine, _ = start("llama", activations="keep_attention")
    assert_same_round(engine, reference, make_batches(1))
    assert "keep_attention" not in said.text
    engine.detach()
