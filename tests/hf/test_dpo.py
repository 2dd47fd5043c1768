"""`StreamingDPOTrainer` runs TRL's own loss, and equals `trl.DPOTrainer` and a resident model bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.errors import ConfigError
from tests.families import VOCAB_SIZE
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

from datasets import Dataset  # noqa: E402

from megatrain.hf import StreamingDPOTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing[a-z_]*. is deprecated:FutureWarning"  # TRL sets it
)


def pairs(count: int = 14) -> Dataset:
    """Make preference pairs of random words."""
    generator = torch.Generator().manual_seed(0)

    def words(number: int) -> str:
        return " ".join(map(str, torch.randint(3, VOCAB_SIZE, (number,), generator=generator).tolist()))

    return Dataset.from_list(
        [
            {"prompt": words(4), "chosen": " " + words(4 + n % 3), "rejected": " " + words(3 + n % 5)}
            for n in range(count)
        ]
    )


def train_both(directory: Path, fields: dict[str, Any], **changes: Any) -> tuple[Any, Any]:
    """Train with TRL's own class on a resident copy, and with ours."""
    model = tiny()
    settings = {"bf16": False, "max_steps": 3, "gradient_accumulation_steps": 3, "warmup_steps": 0, **changes}
    shared = {
        "processing_class": tokenizer(),
        **{k: settings.pop(k)() for k in ("peft_config",) if k in settings},
    }
    theirs_at, ours_at = directory / "plain", directory / "ours"
    reference = plain(
        trl.DPOTrainer,
        model,
        arguments(theirs_at, trl.DPOConfig, **settings),
        train_dataset=pairs(),
        **shared,
    )
    reference.train()
    ours = StreamingDPOTrainer(
        model=model,
        args=arguments(ours_at, trl.DPOConfig, **settings),
        train_dataset=pairs(),
        megatrain=planned(model, **fields),
        **shared,
    )
    ours.train()
    return reference, ours


def assert_equal(reference: Any, ours: Any) -> None:
    """Assert that losses, rewards, margins and weights have the same bits."""
    theirs = logged(reference)
    assert {"loss", "rewards/margins", "rewards/accuracies", "logps/chosen"} <= theirs[0].keys()
    assert logged(ours) == theirs
    assert len({entry["loss"] for entry in theirs if "loss" in entry}) == 3
    assert norms_of(ours) == pytest.approx(norms_of(reference), rel=1e-6)
    assert_same_weights(weights(ours), weights(reference))


@pytest.mark.parametrize("lockstep", [3, pytest.param(1, marks=pytest.mark.parity)])
def test_full_training_equals_trl(lockstep: int, tmp_path: Path) -> None:
    """The reference is computed beforehand, on the streamed model."""
    fields = {"lockstep": lockstep, "outer_streams": True}
    assert_equal(*train_both(tmp_path, fields, precompute_ref_log_probs=True))


@pytest.mark.parametrize("lockstep", [3, pytest.param(1, marks=pytest.mark.parity)])
def test_an_adapter_s_training_equals_trl(lockstep: int, tmp_path: Path) -> None:
    """The reference is a pass of the same model with its adapters off, of one micro-batch at a time."""
    peft = pytest.importorskip("peft")

    def lora() -> Any:
        return peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")

    assert_equal(*train_both(tmp_path, {"lockstep": lockstep}, peft_config=lora))


def test_a_resident_reference_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, trl.DPOConfig, bf16=False)
    for reference in (None, tiny()):
        with pytest.raises(ConfigError, match=r"precompute_ref_log_probs=True.*peft_config"):
            StreamingDPOTrainer(
                model=tiny(),
                ref_model=reference,
                args=args,
                train_dataset=pairs(),
                processing_class=tokenizer(),
            )
