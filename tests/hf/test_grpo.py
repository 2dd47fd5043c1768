"""Trainers of TRL that generate, over a streamed model: their bits, in lockstep, one generation a step."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.errors import ConfigError
from megatrain.hf.batches.steps import StepGroup
from tests.hf.setups import (
    arguments,
    assert_same_weights,
    logged,
    norms_of,
    plain,
    planned,
    tiny,
    tokenizer,
    weights,
)

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'megatrain[trl]'")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")

from megatrain.hf import StreamingGRPOTrainer, StreamingRLOOTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing[a-z_]*. is deprecated:FutureWarning"  # TRL sets it
)
parity = pytest.mark.parity
KINDS = {
    "grpo": (trl.GRPOTrainer, StreamingGRPOTrainer, trl.GRPOConfig),
    "rloo": (trl.RLOOTrainer, StreamingRLOOTrainer, trl.RLOOConfig),
}
SETTINGS: dict[str, Any] = {
    "max_completion_length": 3,
    "num_generations": 2,
    "per_device_eval_batch_size": 2,
    "max_steps": 3,
    "bf16": False,
    "warmup_steps": 0,
}
"""A step has four micro-batches of two completions: four prompts."""


def prompts(count: int) -> Any:
    words = [" ".join(str(3 + (7 * n + k) % 90) for k in range(3 + n % 2)) for n in range(count)]
    return datasets.Dataset.from_list([{"prompt": text} for text in words])


def rewarded(completions: list[str], **_: Any) -> list[float]:
    """Differ within every group, which is two completions of a prompt."""
    return [float(n % 2) + 0.1 * n for n, _ in enumerate(completions)]


def given(**more: Any) -> dict[str, Any]:
    return {
        "train_dataset": prompts(16),
        "eval_dataset": prompts(2),
        "reward_funcs": rewarded,
        "processing_class": tokenizer(),
        **more,
    }


def without_times(trainer: Any) -> list[dict[str, float]]:
    left_out = ("step_time", "profiling")
    return [{k: v for k, v in entry.items() if not k.startswith(left_out)} for entry in logged(trainer)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "beta", "is_lora", "lockstep", "more"),
    [
        ("grpo", 0.0, False, 4, {"eval_strategy": "steps", "eval_steps": 2}),
        ("grpo", 0.04, True, 4, {}),
        ("grpo", 0.04, False, 2, {"steps_per_generation": 2}),
        pytest.param("grpo", 0.0, True, 3, {"num_iterations": 2}, marks=parity),
        pytest.param("grpo", 0.04, False, 1, {"steps_per_generation": 8}, marks=parity),
        pytest.param("rloo", 0.05, True, 4, {}),
        pytest.param("rloo", 0.0, False, 2, {}, marks=parity),
    ],
)
def test_equals_trl_in_lockstep(
    kind: str,
    beta: float,
    is_lora: bool,
    lockstep: int,
    more: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each draws its own completions, from the same random numbers; the program foresees every pass."""
    monkeypatch.delattr("megatrain.stream.execute.executor.Executor._improvise")
    theirs, our, config = KINDS[kind]
    generate, drawn = theirs._generate_single_turn, []

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = generate(self, *args, **kwargs)
        drawn.append(found[0] if isinstance(found, tuple) else found)
        return found

    monkeypatch.setattr(theirs, "_generate_single_turn", noted)
    model = tiny()
    model.save_pretrained(tmp_path / "model")
    model.config._name_or_path = str(tmp_path / "model")  # from where TRL loads a reference
    adapter = {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")}
    settings = {**SETTINGS, "beta": beta, **more}
    both = given(**(adapter if is_lora else {}))
    reference = plain(theirs, model, arguments(tmp_path / "plain", config, **settings), **both)
    reference.train()
    expected, drawn = drawn, []
    fields = {"lockstep": lockstep, "outer_streams": True}
    args = arguments(tmp_path / "ours", config, **settings)
    ours = our(model=model, args=args, megatrain=planned(model, **fields), **both)
    ours.train()
    assert drawn == expected
    assert len({tuple(map(tuple, each)) for each in drawn}) == len(drawn) > 1
    assert without_times(ours) == without_times(reference)
    assert "kl" in logged(ours)[0] or not beta
    assert len(norms_of(ours)) == 3
    assert all(norm > 0 for norm in norms_of(ours))
    assert norms_of(ours) == pytest.approx(norms_of(reference), rel=1e-6)
    assert_same_weights(weights(ours), weights(reference))
    assert ours._step == reference._step


def test_what_cannot_be_done_while_weights_stream_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny()
    args = arguments(tmp_path, trl.GRPOConfig, **SETTINGS, beta=0.0)
    args.use_vllm = True
    with pytest.raises(ConfigError, match=r"use_vllm=True: .* let the streamed model generate"):
        StreamingGRPOTrainer(model=model, args=args, megatrain=planned(model), **given())
    model.save_pretrained(tmp_path / "model")
    model.config._name_or_path = str(tmp_path / "model")
    caplog.set_level(logging.WARNING)
    args = arguments(tmp_path, trl.GRPOConfig, **SETTINGS, beta=0.04)
    StreamingGRPOTrainer(model=model, args=args, megatrain=planned(model), **given())
    assert "beta=0.04 holds a second, resident model as the reference" in caplog.text


def test_several_processes_are_refused() -> None:
    """Each would draw completions of its own."""
    trainer: Any = StreamingGRPOTrainer.__new__(StreamingGRPOTrainer)
    trainer._ranks = SimpleNamespace(size=2)
    with pytest.raises(ConfigError, match="StreamingGRPOTrainer trains in one process"):
        trainer._require_same()


def test_what_fills_up_a_step_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch stands in for those that a step's runs lack, with the inputs that it has."""
    numbers = []

    def noted(self: Any, batch: Any) -> dict[str, Any]:
        numbers.append(self._step)
        return {"of": batch}

    monkeypatch.setattr(trl.GRPOTrainer, "_prepare_inputs", noted)
    trainer = StreamingGRPOTrainer.__new__(StreamingGRPOTrainer)
    trainer._step = 8
    group = StepGroup([["a"], ["b"], ["c"]], num_runs=4)
    assert trainer._passes_before(group) == []
    assert numbers == [8, 9, 10]
    assert [inputs["of"] for inputs in group.inputs] == [["a"], ["b"], ["c"], ["c"]]
    assert (trainer._step, trainer._step_after) == (8, 11)
    assert trainer._prepare_inputs(group.inputs[0]) is group.inputs[0]
