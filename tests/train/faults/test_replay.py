"""A step whose loss jumps is run again: injected faults of the machine are told from data."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.errors import ConfigError, HardwareError
from megatrain.stream.engine import Engine
from megatrain.train.faults.replay import Replay, Verdict
from megatrain.train.loop import train
from megatrain.train.run import Run, prepare
from tests.train.project import make_config, write_model_with_experts
from tests.train.test_loop import assert_same_runs, rows_of, state_of

NUM_CASES = 20


class Faulty:
    """Computes a step with one flipped bit of a weight, in the calls that are named, and puts it back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls: set[int], seed: int = 0) -> None:
        self.num_calls, self._calls, self._chance = 0, calls, random.Random(seed)
        forward_backward = Run.forward_backward

        def call(run: Run, *args: Any) -> Any:
            self.num_calls += 1
            if self.num_calls not in self._calls:
                return forward_backward(run, *args)
            # a checkpoint that is being written would have the bit
            run.engine.arrangement.guard.wait_for(range(len(run.engine.host.blocks)))
            block = run.engine.host.blocks[self._chance.randrange(3)]  # a layer
            entry = self._chance.choice(block.layout.trained)
            weight = block.weight(entry).view(-1).view(torch.int32)
            index, bit = self._chance.randrange(len(weight)), self._chance.randrange(18, 27)
            weight[index] ^= 1 << bit
            run.engine.executor.invalidate()
            try:
                return forward_backward(run, *args)
            finally:
                weight[index] ^= 1 << bit
                run.engine.executor.invalidate()

        monkeypatch.setattr(Run, "forward_backward", call)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return prepare(make_config(tmp_path_factory.mktemp("begun"), memory={"watch": "off", "fragments": False}))


@pytest.mark.parametrize(
    ("calls", "verdict"),
    [
        (set(), Verdict.DATA),
        ({2}, Verdict.HARDWARE),
        ({3}, Verdict.HARDWARE),
        ({2, 3}, Verdict.HARDWARE),
        ({1}, Verdict.TRANSIENT),
    ],
    ids=["data", "second", "third", "both", "first"],
)
def test_verdicts_of_20_cases_each(
    begun: Run, monkeypatch: pytest.MonkeyPatch, calls: set[int], verdict: Verdict
) -> None:
    """The first call is the step itself. Dropout and the data are other ones in each case."""
    for seed in range(NUM_CASES):
        with monkeypatch.context() as patch:
            faulty = Faulty(patch, calls, seed)
            batches, seeds = next(begun.loader), begun.micro_batch_seeds()
            begun.step += 1
            replay = Replay(begun, batches, seeds)
            loss = float(begun.forward_backward(batches, seeds)[0])
            state = torch.get_rng_state()
            assert replay.judge(loss, loss / 2) is verdict, (seed, calls)
            assert faulty.num_calls == 3
            assert torch.get_rng_state().equal(state)
    begun.step = 0


@pytest.mark.usefixtures("jump_at_5")
def test_data_that_jump_are_skipped_to_the_bits_of_skip(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(make_config(tmp_path, "skip", train={"steps": 7, "on_spike": "skip"}))
    train(make_config(tmp_path, "replay", train={"steps": 7, "on_spike": "replay"}))
    left, right = state_of(tmp_path / "skip"), state_of(tmp_path / "replay")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], tensor) for name, tensor in right.items())
    rows = rows_of(tmp_path / "replay")
    assert [row["skipped"] for row in rows] == [False] * 4 + [True, False, False]
    assert [row.get("replay") for row in rows] == [None] * 4 + ["data", None, None]
    assert "did so in two more runs of the step, bit for bit: look at its rows" in caplog.text


@pytest.mark.usefixtures("jump_at_5")
@pytest.mark.parametrize(
    ("calls", "words"),
    [({6}, "gave different bits"), pytest.param({5}, "others than the first", marks=pytest.mark.parity)],
)
def test_a_machine_that_computes_wrong_ends_the_run_which_then_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: set[int], words: str
) -> None:
    train(make_config(tmp_path, "whole", train={"steps": 7, "on_spike": "replay"}))
    config = make_config(tmp_path, train={"steps": 7, "on_spike": "replay"})
    with monkeypatch.context() as patch:
        Faulty(patch, calls)
        with pytest.raises(HardwareError, match=rf"step 5: .*{words}.*the machine computes wrong") as caught:
            train(config)
    assert caught.value.exit_code == 10
    newest = tmp_path / "run/checkpoints/step-00000004"
    assert f"the newest that is saved, {newest}, is from before that: the same command goes on" in str(
        caught.value
    )
    train(config)
    assert_same_runs(tmp_path / "run", tmp_path / "whole")


@pytest.mark.usefixtures("jump_at_5")
def test_where_a_step_has_no_form_that_repeats_nothing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(engine: Engine) -> Any:
        raise ConfigError("this kernel never repeats")

    monkeypatch.setattr(Engine, "repeating", refuse)
    train(make_config(tmp_path, train={"steps": 7, "on_spike": "replay"}))
    rows = rows_of(tmp_path / "run")
    assert [row["skipped"] for row in rows] == [False] * 4 + [True, False, False]
    assert rows[4]["replay"] == "unknown"
    assert "step 5 cannot be run again to the same bits: this kernel never repeats" in caplog.text
    assert "cannot be told, since the step has no form that repeats its bits" in caplog.text


@pytest.mark.usefixtures("jump_at_5")
def test_an_operation_without_such_a_form_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward_backward, calls = Run.forward_backward, []

    def call(run: Run, *args: Any) -> Any:
        calls.append(torch.are_deterministic_algorithms_enabled())
        if calls[-1]:
            raise RuntimeError("put_ does not have a deterministic implementation, but you set it")
        return forward_backward(run, *args)

    monkeypatch.setattr(Run, "forward_backward", call)
    train(make_config(tmp_path, train={"steps": 6, "on_spike": "replay"}))
    assert calls == [False] * 5 + [True, False]
    assert rows_of(tmp_path / "run")[4]["replay"] == "unknown"
    assert "put_ does not have a deterministic implementation" in caplog.text


def test_without_a_jump_no_bit_is_another(tmp_path: Path) -> None:
    train(make_config(tmp_path, "warn"))
    train(make_config(tmp_path, "replay", train={"on_spike": "replay"}))
    assert_same_runs(tmp_path / "replay", tmp_path / "warn")
    assert not any("replay" in row for row in rows_of(tmp_path / "replay"))


@pytest.mark.usefixtures("jump_at_5")
def test_replays_are_not_counted_as_tokens_of_experts(tmp_path: Path) -> None:
    make_config(tmp_path, "none")  # the corpus too
    write_model_with_experts(tmp_path / "model")
    for policy in ("skip", "replay"):
        train(make_config(tmp_path, policy, train={"steps": 6, "on_spike": policy}))
    left, right = (rows_of(tmp_path / name) for name in ("skip", "replay"))
    assert [row["experts"] for row in left] == [row["experts"] for row in right]
    counts = [(tmp_path / name / "experts.json").read_text() for name in ("skip", "replay")]
    assert counts[0] == counts[1]
