"""The trainers of DPO and KTO run TRL's own losses, and equal its own with a resident model bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.errors import ConfigError
from megatrain.model.sequence.range import row_range
from megatrain.plan.program.step import step_program
from tests.families import VOCAB_SIZE
from tests.hf.setups import (
    arguments,
    assert_equal,
    assert_same_weights,
    planned,
    tiny,
    tokenizer,
    train_both,
    weights,
)

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl peft")
peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")

from datasets import Dataset  # noqa: E402

from megatrain.hf import StreamingDPOTrainer, StreamingKTOTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing[a-z_]*. is deprecated:FutureWarning"  # TRL sets it
)

KINDS: dict[str, tuple[Any, Any, Any]] = {
    "dpo": (trl.DPOTrainer, StreamingDPOTrainer, trl.DPOConfig),
    "kto": (trl.KTOTrainer, StreamingKTOTrainer, trl.KTOConfig),
}
LOGGED = {"loss", "rewards/margins", "logps/chosen", "entropy", "num_tokens"}
parity = pytest.mark.parity


def rows(kind: str, count: int = 14) -> Dataset:
    """Make preference pairs of random words, or completions that are wanted or not."""
    generator = torch.Generator().manual_seed(0)

    def words(number: int) -> str:
        return " " + " ".join(map(str, torch.randint(3, VOCAB_SIZE, (number,), generator=generator).tolist()))

    pairs = [
        {"prompt": words(4), "chosen": words(4 + n % 3), "rejected": words(3 + n % 5)} for n in range(count)
    ]
    if kind == "dpo":
        return Dataset.from_list(pairs)
    wanted = [n % 3 != 1 for n in range(count)]
    return Dataset.from_list(
        [
            {"prompt": row["prompt"], "completion": row["chosen" if label else "rejected"], "label": label}
            for row, label in zip(pairs, wanted, strict=True)
        ]
    )


def lora(**fields: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **fields)


def data(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "train_dataset": rows(kind),
        "eval_dataset": rows(kind, 4),
        "processing_class": tokenizer(),
        **more,
    }


SETTINGS: dict[str, Any] = {
    "bf16": False,
    "warmup_steps": 0,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "per_device_eval_batch_size": 2,
}
"""14 rows are 7 micro-batches: steps of 4 and 3, in KTO with one, two or no completions that are wanted."""


@pytest.mark.parametrize(
    ("kind", "lockstep"),
    [("kto", 4), *(pytest.param(kind, n, marks=parity) for kind in KINDS for n in (1, 2, 3))],
)
def test_full_training_equals_trl_and_resumes(kind: str, lockstep: int, tmp_path: Path) -> None:
    """The reference is computed beforehand, on the streamed model."""
    settings = {**SETTINGS, "precompute_ref_log_probs": True, "save_strategy": "steps", "save_steps": 1}
    fields = {"lockstep": lockstep, "outer_streams": True}
    reference, ours = train_both(KINDS[kind], tmp_path, tiny(), fields, data(kind), **settings)
    assert_equal(reference, ours, LOGGED)
    assert ours.state.global_step == 2
    again = tiny()
    _, trainer, config = KINDS[kind]
    resumed = trainer(
        model=again,
        args=arguments(tmp_path / "ours", config, **settings),
        megatrain=planned(again, lockstep=2),
        **data(kind),
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours/checkpoint-1"))
    assert_same_weights(weights(resumed), weights(reference))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "loss_type", "lockstep", "num_before"),
    [
        ("dpo", "sigmoid", 4, 1),
        ("kto", "kto", 4, 3),
        pytest.param("kto", "apo_zero_unpaired", 2, 1, marks=parity),
        *(pytest.param("dpo", "sigmoid", n, 1, marks=parity) for n in (1, 2)),
        *(pytest.param("kto", "kto", n, 3, marks=parity) for n in (1, 2)),
    ],
)
def test_an_adapter_s_training_equals_trl(
    kind: str, loss_type: str, lockstep: int, num_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is the base, whose passes the program foresees: nothing is improvised."""
    monkeypatch.delattr("megatrain.stream.execute.executor.Executor._improvise")
    fields = {"lockstep": lockstep, "outer_streams": True}
    given = data(kind, peft_config=lora())
    settings = {**SETTINGS, "loss_type": loss_type}
    reference, ours = train_both(KINDS[kind], tmp_path, tiny(), fields, given, **settings)
    assert_equal(reference, ours, LOGGED)
    sizes = [min(lockstep, 3 - first) for first in range(0, 3, lockstep)]  # of the last step
    spec = ours.engine.executor.spec
    program = step_program(spec, [[1] * size for size in sizes], num_passes_before=num_before)
    assert ours.engine.last_step.fetch_bytes == program.nbytes("fetch") + program.nbytes("load")
    assert (
        ours._megatrain.batch(
            ours.args, row_range(ours.model.config), ours._num_passes_before
        ).num_passes_before
        == num_before
    )


def trained_before() -> Any:
    """Make a model with an adapter that is not the identity: TRL keeps a copy of it, named `ref`."""
    torch.manual_seed(1)
    return peft.get_peft_model(tiny(), lora(lora_dropout=0.2, init_lora_weights=False))


@parity
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_its_own_reference(kind: str, tmp_path: Path) -> None:
    reference, ours = train_both(
        KINDS[kind], tmp_path, trained_before(), {"lockstep": 4}, data(kind), **SETTINGS
    )
    assert_equal(reference, ours, LOGGED)
    assert any(".ref." in name for name in weights(ours))


@pytest.mark.parametrize("kind", [pytest.param("dpo", marks=parity), "kto"])
def test_dropout_is_the_same_in_any_lockstep(kind: str, tmp_path: Path) -> None:
    """That of the reference `ref` too, which has masks of its own."""
    found = []
    _, trainer, config = KINDS[kind]
    for lockstep in (1, 3):
        model = trained_before()
        settings = {**SETTINGS, "eval_strategy": "no", "disable_dropout": False, "max_steps": 1}
        ours = trainer(
            model=model,
            args=arguments(tmp_path, config, **settings),
            megatrain=planned(model, lockstep=lockstep),
            **data(kind),
        )
        ours.train()
        found.append((ours.state.log_history[0]["loss"], weights(ours)))
    assert found[0][0] == found[1][0]
    assert_same_weights(found[1][1], found[0][1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_resident_reference_is_refused(kind: str, tmp_path: Path) -> None:
    _, trainer, config = KINDS[kind]
    args = arguments(tmp_path, config, bf16=False)
    model = tiny()
    for reference in (None, copy.deepcopy(model)):
        words = rf"{trainer.__name__} would.*precompute_ref_log_probs=True in {config.__name__}.*peft_config"
        with pytest.raises(ConfigError, match=words):
            trainer(model=model, ref_model=reference, args=args, **data(kind))
