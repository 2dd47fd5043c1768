"""Trainers that count micro-batches, as GRPO does, are found by what their methods do, and run one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Seq2SeqTrainer, Trainer

from megatrain import Choice
from megatrain.errors import ConfigError
from megatrain.hf import MegatrainArguments, StreamingTrainer
from megatrain.hf.counting import what_counts
from megatrain.hf.streaming import Streaming
from tests.hf.setups import (
    arguments,
    assert_same_weights,
    logged,
    plain,
    planned,
    rows,
    tiny,
    tokenizer,
    weights,
)
from tests.reference import attach_plainly

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing[a-z_]*. is deprecated:FutureWarning"  # TRL sets it
)


class Alternating(Trainer):
    """Trains on half of every other micro-batch, which it counts."""

    seen = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Count."""
        loss = super().training_step(*args, **kwargs)
        self.seen += 1
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Look at the count."""
        if self.seen % 2:
            inputs = {name: value[:1] for name, value in inputs.items()}
        return super().compute_loss(model, inputs, *args, **kwargs)


class StreamingAlternating(Streaming, Alternating):
    """The same, streamed."""


class Noting(Trainer):
    """Keeps what nobody looks at between two micro-batches."""

    total = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Keep it."""
        loss = super().training_step(*args, **kwargs)
        self.newest = loss
        self.total += 1
        return loss


class Smoothing(Trainer):
    """Scales each loss by the one before it."""

    before = 1.0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Look once at what is set once."""
        outputs = super().compute_loss(*args, **kwargs)
        scaled = outputs / self.before
        self.before = outputs.item()
        return scaled


def test_what_a_class_counts_is_found_in_its_methods() -> None:
    assert what_counts(StreamingAlternating) == "Alternating.training_step sets seen"
    assert what_counts(Smoothing) == "Smoothing.compute_loss sets before"
    for kind in (Trainer, Noting, StreamingTrainer, Seq2SeqTrainer):
        assert what_counts(kind) is None
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'megatrain[trl]'")
    from megatrain.hf import StreamingDPOTrainer, StreamingKTOTrainer, StreamingSFTTrainer

    ours = (StreamingSFTTrainer, StreamingDPOTrainer, StreamingKTOTrainer)
    for kind in (*ours, trl.SFTTrainer, trl.DPOTrainer, trl.KTOTrainer, trl.RewardTrainer):
        assert what_counts(kind) is None
    for kind in (trl.GRPOTrainer, trl.RLOOTrainer):
        assert what_counts(kind) == f"{kind.__name__}.training_step sets _step"


def test_a_class_that_counts_runs_one_by_one_or_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With what is open decided for it, it equals the plain class; in lockstep it would not."""
    model = tiny()
    reference = plain(Alternating, model, arguments(tmp_path / "plain"), train_dataset=rows())
    reference.train()
    args = arguments(tmp_path / "ours")
    everything = planned(model).choice
    open_choice = replace(everything, lockstep=Choice().lockstep)
    ours = StreamingAlternating(
        model=model,
        args=args,
        train_dataset=rows(),
        megatrain=MegatrainArguments(choice=open_choice, device="checked"),
    )
    assert caplog.text.count("they pass the model one after the other") == 1
    assert ours.engine.choice.lockstep == 1
    ours.train()
    assert logged(ours) == logged(reference)
    assert_same_weights(weights(ours), weights(reference))
    for asked in (planned(tiny(), lockstep=2), replace(planned(tiny()), shards=2)):
        with pytest.raises(ConfigError, match=r"Alternating.training_step sets seen.*Choice\(lockstep=1\)"):
            StreamingAlternating(model=tiny(), args=args, train_dataset=rows(), megatrain=asked)
    attached = tiny()
    attach_plainly(attached, lockstep=2)
    with pytest.raises(ConfigError, match="was attached with lockstep=2; attach it with lockstep=1"):
        StreamingAlternating(model=attached, args=args, train_dataset=rows())


@pytest.mark.parametrize("name", ["GRPO", pytest.param("RLOO", marks=pytest.mark.parity)])
def test_trainers_that_generate_equal_trl_s_one_by_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same completions, drawn from the same seeds here; groups are not cut, and tokens counted."""
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'megatrain[trl]'")
    from datasets import Dataset

    theirs, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    kind = type("Own", (Streaming, theirs), {})
    generate, shuffle = (
        theirs._generate_single_turn,
        f"trl.trainer.{name.lower()}_trainer.shuffle_sequence_dict",
    )

    def seeded(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(self.state.global_step)
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(theirs, "_generate_single_turn", seeded)
    monkeypatch.setattr(shuffle, lambda batch: batch)
    prompts = [{"prompt": " ".join(str(3 + (7 * n + k) % 90) for k in range(3))} for n in range(8)]
    settings: dict[str, Any] = {
        "max_completion_length": 3,
        "num_generations": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 2,
        "bf16": False,
        "beta": 0.0,
        "warmup_steps": 0,
    }
    given: dict[str, Any] = {
        "train_dataset": Dataset.from_list(prompts),
        "reward_funcs": lambda completions, **_: [float(n % 3) for n, _ in enumerate(completions)],
        "processing_class": tokenizer(),
    }
    model = tiny()
    with pytest.raises(ConfigError, match=rf"{name}Trainer.training_step sets _step.*lockstep=4"):
        kind(
            model=tiny(),
            args=arguments(tmp_path, config, **settings),
            megatrain=planned(tiny(), lockstep=4),
            **given,
        )
    reference = plain(theirs, model, arguments(tmp_path / "plain", config, **settings), **given)
    reference.train()
    ours = kind(
        model=model, args=arguments(tmp_path / "ours", config, **settings), megatrain=planned(model), **given
    )
    ours.train()
    left_out = ("step_time", "profiling")
    found, expected = (
        [{k: v for k, v in entry.items() if not k.startswith(left_out)} for entry in logged(one)]
        for one in (ours, reference)
    )
    assert found == expected
    assert [entry["num_tokens"] for entry in found[:2]] == sorted(
        {entry["num_tokens"] for entry in found[:2]}
    )
    assert found[0]["num_tokens"] > 0
    assert_same_weights(weights(ours), weights(reference))
    assert any((value != dict(tiny().named_parameters())[n]).any() for n, value in weights(ours).items())
