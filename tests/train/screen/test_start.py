"""What a user reads before the first step: five lines, with the plan's numbers."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.config.plan import Pool
from megatrain.errors import CapacityError, ModelError
from megatrain.hardware import load_machine
from megatrain.model.profile import count as counting_code
from megatrain.model.profile.anatomy import Anatomy
from megatrain.train.caller import Caller
from megatrain.train.loop import train
from megatrain.train.planning import allocation, counting
from megatrain.train.planning.allocation import plan_training
from megatrain.train.planning.counting import PlannedModel
from megatrain.train.planning.plan_run import Planned
from megatrain.train.planning.run_machine import machine_for
from megatrain.train.run import prepare
from megatrain.train.screen.start import start_lines
from tests.train.project import make_config

NOON = datetime(2026, 2, 3, 12, 0)
GIB = 1 << 30


def planned_as(config: Config, *, device: bool = False, **changes: Any) -> Planned:
    """Plan a run, and say other numbers in the plan."""
    model = PlannedModel(config.model.path, None, lambda doing: None)
    planned = plan_training(config, model, machine_for(config))
    spec = load_machine("rtx-3090") if device else planned.request.spec
    request = replace(planned.request, spec=spec)
    return replace(planned, request=request, plan=replace(planned.plan, **changes))


def data_of(words: str, *, padding: float = 0.0, num_rows: int = 0) -> Any:
    """Stand in for the data of a run of 100 steps."""
    packed = SimpleNamespace(describe=lambda: words, padding=padding)
    return SimpleNamespace(packed=packed, num_steps=100, rows=range(num_rows))


def lines_of(
    config: Config, planned: Planned | None, first_step: int = 0, *, words: str = "5 documents", **data: Any
) -> list[str]:
    told: dict[str, Any] = {"evaluated": data.pop("evaluated", ())}
    found = data_of(words, **data)
    return list(start_lines(config, planned, found, first_step=first_step, now=NOON, **told))


def compares_answers(config: Config) -> Config:
    """Return the settings with a loss that has a reference."""
    return config.model_copy(update={"train": config.train.model_copy(update={"loss": "dpo"})})


def test_five_lines_say_what_in_which_steps_where_how_fast_and_whereto(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    planned = planned_as(
        config,
        pools=(Pool("ram", "working", 3 * GIB), Pool("ram", "moments", GIB // 2)),
        limits={"ram": 20 * GIB},
        tokens_per_s=12_345.6,
        step_s=36.0,
        bound="compute",
    )
    count = planned.request.anatomy.num_params
    assert lines_of(config, planned) == [
        f"training: {config.model.path} ({count / 1000:.1f} K parameters), from random weights, in fp32, on "
        "5 documents",
        "step: 128 tokens in 2 micro-batches of 2 x 32; 100 steps in all",
        "memory: 3.50 GiB of 20.00 GiB in RAM: FITS",
        "speed: about 12,346 tokens/s, 36 s a step (what takes longest: compute); 100 steps take "
        "1h 00m, until 13:00",
        f"results: in {config.out}, the model in {config.out}/hf at the end; a stop (Ctrl-C, SIGTERM, "
        "SIGUSR1) saves and ends within about 0m 36s",
    ]


def test_what_an_evaluation_and_a_reference_take_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections: dict[str, Any] = {"data": {"val_size": 0.1}, "eval": {"batches": 6}}
    config = make_config(tmp_path, train={"micro_batch_size": 2}, **sections)
    planned = planned_as(config, step_s=36.0)
    monkeypatch.setattr(Planned, "evaluation_s", lambda self, count: 0.9 * count)
    judged = compares_answers(config)
    _, _, _, speed, _ = lines_of(judged, planned, words="pairs", evaluated=[40, 3], num_rows=100)
    # 6 of 20 micro-batches, and 2; of the reference all 50, 20 and 2
    assert speed.endswith("; an evaluation takes 0m 07s; the reference, before the first step, 1m 05s")
    _, _, _, speed, _ = lines_of(config, planned, words="pairs", evaluated=[1])
    assert speed.endswith("; an evaluation takes less than a second")


def test_a_resumed_run_says_what_is_left(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    planned = planned_as(config, step_s=3600.0, tokens_per_s=1.0, bound="compute")
    _, _, _, speed, results = lines_of(config, planned, first_step=60)
    assert speed.endswith("; 40 steps take 1d 16h, until 2026-02-05 04:00")
    assert results.endswith("; going on from step 60 of 100")


def test_a_stop_may_have_to_finish_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, train={"micro_batch_size": 2}, data={"val_size": 0.1})
    planned = planned_as(config, step_s=36.0)
    monkeypatch.setattr(Planned, "evaluation_s", lambda self, count: 9.0 * count)
    for rows, most in ((9, "0m 45s"), (7, "0m 36s")):
        *_, results = lines_of(config, planned, evaluated=[rows])
        assert results.endswith(f"; a stop (Ctrl-C, SIGTERM, SIGUSR1) saves and ends within about {most}")


def test_a_run_that_is_beyond_its_steps_has_none_left(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    _, _, _, speed, _ = lines_of(config, planned_as(config, step_s=36.0, bound="compute"), first_step=148)
    assert speed.endswith("; no step is left")


def test_one_of_a_thing_is_not_several(tmp_path: Path) -> None:
    config = make_config(tmp_path, train={"micro_batch_size": 1})
    config = config.model_copy(update={"train": config.train.model_copy(update={"loss": "kto"})})
    _, step, _, speed, _ = lines_of(config, planned_as(config, step_s=36.0, bound="compute"), first_step=99)
    assert step == "step: 64 tokens in 2 micro-batches of 1 answer of 2 x 32; 100 steps in all"
    assert "; 1 step takes 0m 36s, until " in speed


def test_speed_is_said_without_much_padding_too(tmp_path: Path) -> None:
    """As steps are logged: a run of short pairs has a thirtieth of the tokens that it computes."""
    config = make_config(tmp_path)
    planned = planned_as(config, step_s=36.0, tokens_per_s=12_000.0, bound="compute")
    for padding, rate in (
        (0.04, "12,000 tokens/s, 36"),
        (0.75, "12,000 tokens/s (3,000 without padding), 36"),
    ):
        _, _, _, speed, _ = lines_of(config, planned, words="pairs", padding=padding)
        assert speed.startswith(f"speed: about {rate} s a step")


def test_every_tier_is_named(tmp_path: Path) -> None:
    config = make_config(tmp_path, train={"precision": "bf16"}, optim={"state": "int8"})
    pools = tuple(Pool(tier, "some", size * GIB) for tier, size in (("ram", 1), ("device", 2), ("nvme", 3)))
    planned = planned_as(config, device=True, pools=pools, limits={"ram": 4 * GIB, "nvme": 5 * GIB})
    training, _, memory, _, _ = lines_of(config, planned)
    assert memory == "memory: 1.00 GiB of 4.00 GiB in RAM, 2.00 GiB on rtx-3090, 3.00 GiB on drives: FITS"
    assert "in bf16 with fp32 masters, optimizer state: int8 (not exact), on" in training


def test_what_a_small_step_costs_is_said(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    planned = replace(planned_as(config), hint="a step is small")
    assert "faster: a step is small" in lines_of(config, planned)


def test_what_cannot_be_counted_is_said(tmp_path: Path) -> None:
    _, step, third, fourth = lines_of(
        make_config(tmp_path, model={"init": "pretrained"}, train={"loss": "dpo"}), None
    )
    assert step == "step: 256 tokens in 2 micro-batches of 2 pairs of 2 x 32; 100 steps in all"
    assert third == "memory and speed: not known before the first step, since this model cannot be counted"
    assert fourth.startswith("results: ")


def test_a_run_says_no_more_than_five_lines_before_its_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path, train={"steps": 1}, optim={"warmup_steps": 0}, log={"progress": "lines"})
    with caplog.at_level(logging.INFO, logger="megatrain"):
        train(config)
    names = [message.partition(" ")[0] for message in caplog.messages]
    assert names == ["training:", "step:", "memory:", "speed:", "results:", "step", "report:", "done:"]


def test_the_plan_is_said_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []

    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError(str(len(said)))

    monkeypatch.setattr("megatrain.train.engine.load", no_memory)
    with pytest.raises(CapacityError, match=r"\(5\)"):
        prepare(make_config(tmp_path), show=said.append)

    def uncountable(*_: object, **__: object) -> None:
        raise ModelError("no")

    said.clear()
    monkeypatch.setattr(allocation, "plan_training", uncountable)
    with pytest.raises(CapacityError, match=r"\(4\)"):
        prepare(make_config(tmp_path), show=said.append)
    with caplog.at_level(logging.DEBUG, logger="megatrain"), pytest.raises(CapacityError):
        prepare(make_config(tmp_path))
    details = [record.message for record in caplog.records if record.levelno == logging.DEBUG]
    assert any(message.startswith("matrix products: ") for message in details)


@pytest.fixture
def num_counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Types of the models that were counted; a run ends before it takes memory."""
    seen: list[str] = []
    count = counting_code.count_anatomy

    def counted(config: Any, **shape: Any) -> Anatomy:
        seen.append(config.model_type)
        return count(config, **shape)

    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(counting_code, "count_anatomy", counted)
    monkeypatch.setattr("megatrain.train.engine.load", no_memory)
    return seen


def plan_lines(config: Config, monkeypatch: pytest.MonkeyPatch, counts: Path | None) -> list[str]:
    """Return what a run says of its plan in a process that has counted nothing yet."""
    monkeypatch.setattr(counting, "_COUNTED", {})
    said: list[str] = []
    with pytest.raises(CapacityError):
        prepare(config, caller=Caller(counts=counts), show=said.append)
    return said


def parse_memory(line: str) -> list[str]:
    """Return what a plan takes where; how much there is changes from moment to moment."""
    return re.findall(r"[\d.]+ [KMG]iB", re.sub(r" of [\d.]+ GiB", "", line))


def test_a_run_finds_the_count_that_a_plan_has_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_counted: list[str]
) -> None:
    config = make_config(tmp_path, train={"device": "emulated"})
    said = plan_lines(config, monkeypatch, None)
    assert len(num_counted) == 1
    monkeypatch.setattr(counting, "_COUNTED", {})
    PlannedModel(config.model.path, tmp_path / "counts", lambda doing: None).count(config, "cpu")
    assert len(num_counted) == 2
    again = plan_lines(config, monkeypatch, tmp_path / "counts")
    assert parse_memory(again[1]) == parse_memory(said[1])
    assert len(num_counted) == 2


def test_a_run_keeps_its_count_unless_liger_has_changed_the_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_counted: list[str]
) -> None:
    config = make_config(tmp_path, train={"device": "emulated"})
    changed: list[str] = []
    with monkeypatch.context() as with_liger:
        with_liger.setattr("megatrain.train.planning.run_machine.uses_liger", lambda *_: True)
        with_liger.setattr("megatrain.train.planning.run_machine.apply_liger", changed.append)
        for _ in range(2):
            plan_lines(config, monkeypatch, tmp_path / "counts")
    assert len(changed) == len(num_counted) == 2
    for _ in range(2):
        plan_lines(config, monkeypatch, tmp_path / "counts")
    assert len(num_counted) == 3
