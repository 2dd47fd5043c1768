"""`StreamingSFTTrainer` runs TRL's own loss, and equals `trl.SFTTrainer` and a resident model bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer

from megatrain.errors import ConfigError, ModelError
from megatrain.hf.model.checkpoints import read_weights
from tests.families import FAMILIES, VOCAB_SIZE
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
from tests.reference import attach_plainly, make_model

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl peft")

from datasets import Dataset  # noqa: E402

from megatrain.hf import MegatrainArguments, StreamingSFTTrainer  # noqa: E402
from megatrain.stream.forward.attention import choose_attention  # noqa: E402


def prompts(count: int = 22) -> Dataset:
    """Make rows of different lengths, of which the first tokens are a prompt."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(count):
        ids = torch.randint(3, VOCAB_SIZE, (9 + number % 7,), generator=generator).tolist()
        found.append({"input_ids": ids, "labels": [-100] * 3 + ids[3:]})
    return Dataset.from_list(found)


KINDS = (trl.SFTTrainer, StreamingSFTTrainer, trl.SFTConfig)
LOGGED = {"loss", "entropy", "mean_token_accuracy", "num_tokens"}


def assert_both_equal(
    directory: Path, model: Any, fields: dict[str, Any], data: dict[str, Any] | None = None, **changes: Any
) -> Trainer:
    """Train with TRL's own class and with ours; return the former."""
    data = {"train_dataset": prompts(), "processing_class": tokenizer()} if data is None else data
    reference, ours = train_both(KINDS, directory, model, fields, data, bf16=False, **changes)
    assert_equal(reference, ours, LOGGED)
    return reference


parity = pytest.mark.parity

HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("llama", {}),
    "tied": ("llama_tied", {}),
    "tied resident": ("llama_tied", {"resident_layers": 4, "outer_resident": True}),
    "untied resident": ("llama", {"resident_layers": 4, "outer_resident": True}),
    "streamed": ("llama", {"outer_streams": True}),
    "with a bias, streamed": ("phi", {"outer_streams": True}),
}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")  # TRL sets it
@pytest.mark.parametrize(
    ("head", "lockstep"),
    [("tied", 3), ("with a bias, streamed", 3)]
    + [pytest.param(head, 1, marks=parity) for head in HEADS]
    + [
        pytest.param(head, 3, marks=parity) for head in HEADS if head not in ("tied", "with a bias, streamed")
    ],
)
def test_equals_trl_with_every_head(head: str, lockstep: int, tmp_path: Path) -> None:
    family, fields = HEADS[head]
    model = make_model(FAMILIES[family]())
    assert_both_equal(tmp_path, model, {**fields, "lockstep": lockstep})


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*label_smoothing_factor. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "fields", [{"lockstep": 3, "outer_streams": True}, pytest.param({"lockstep": 1}, marks=parity)]
)
def test_equals_trl_with_a_second_pass_in_each_loss(fields: dict[str, Any], tmp_path: Path) -> None:
    """With label smoothing, TRL's loss runs the model once with gradients and once without."""
    assert_both_equal(tmp_path, tiny(), fields, label_smoothing_factor=0.1)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*label_smoothing_factor. is deprecated:FutureWarning")
@parity
def test_a_second_pass_is_foreseen_once_it_was_seen(tmp_path: Path) -> None:
    """From the second step on, no visit is improvised."""
    model = tiny()
    args = arguments(tmp_path, trl.SFTConfig, bf16=False, label_smoothing_factor=0.1)
    ours = StreamingSFTTrainer(
        model=model,
        args=args,
        train_dataset=prompts(16),
        processing_class=tokenizer(),
        megatrain=planned(model, lockstep=2),
    )
    improvised: list[int] = []
    improvise = ours.engine.executor._improvise

    def note(*given: Any, **named: Any) -> Any:
        improvised.append(ours.state.global_step)
        return improvise(*given, **named)

    ours.engine.executor._improvise = note  # type: ignore[method-assign]
    ours.train()
    assert ours.state.global_step == 2
    assert set(improvised) == {0}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")
def test_an_attached_model_is_taken_as_it_is(tmp_path: Path) -> None:
    """TRL replaces its forward after attach; after detach, TRL's goes on by itself."""
    model = tiny()
    engine = attach_plainly(model, lockstep=2)
    args = arguments(tmp_path, trl.SFTConfig, bf16=False, max_steps=2)
    ours = StreamingSFTTrainer(model=model, args=args, train_dataset=prompts(), processing_class=tokenizer())
    ours.train()
    with torch.no_grad():
        batch = {"input_ids": torch.tensor([[3, 4, 5, 6]]), "labels": torch.tensor([[3, 4, 5, 6]])}
        streamed = model(**batch, fused_lm_head=True).loss
        assert torch.equal(model(**batch).logits, model(input_ids=batch["input_ids"]).logits)
        engine.detach()
        assert torch.equal(model(**batch, fused_lm_head=True).loss, streamed)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")
def test_trl_s_default_of_bf16_is_mapped_or_refused(tmp_path: Path) -> None:
    model = tiny()
    args = arguments(tmp_path, trl.SFTConfig, max_steps=1)
    assert args.bf16
    data = {"train_dataset": prompts(), "processing_class": tokenizer()}
    ours = StreamingSFTTrainer(model=model, args=args, megatrain=planned(model), **data)
    ours.train()
    assert ours.engine.host.precision.value == "bf16"
    other = tiny()
    attach_plainly(other)
    with pytest.raises(ConfigError, match=r"bf16 is True \(TRL's default is True\)"):
        StreamingSFTTrainer(model=other, args=args, **data)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("bf16", [True, pytest.param(False, marks=parity)])
def test_an_adapter_s_run_resumes_to_the_same_bits(bf16: bool, tmp_path: Path) -> None:
    """In bf16 the remainders of the adapter's masters are in `state/`, beside what peft saves."""
    peft = pytest.importorskip("peft")

    def make(name: str) -> Any:
        settings = {"bf16": bf16, "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.5}
        model = tiny()
        return StreamingSFTTrainer(
            model=model,
            args=arguments(tmp_path / name, trl.SFTConfig, **settings),
            train_dataset=prompts(),
            processing_class=tokenizer(),
            peft_config=peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
            megatrain=planned(model, lockstep=2),
        )

    whole, resumed = make("whole"), make("resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert resumed.state.global_step == whole.state.global_step == 3
    assert_same_weights(dict(resumed.engine.named_masters()), dict(whole.engine.named_masters()))
    assert len(resumed._streamed.steps) < len(weights(resumed))


def test_an_adapter_that_is_not_finite_is_not_resumed(tmp_path: Path) -> None:
    """It was read without a word, and every loss was logged as 0."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = min(tensors)
    tensors[name][0, :3] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    engine = attach_plainly(model)
    before = dict(engine.named_masters())
    with pytest.raises(ModelError, match=rf"{name} has 3 of 128 values that are not finite"):
        read_weights(model, str(tmp_path), engine.host, reads=True)
    assert_same_weights(dict(engine.named_masters()), before)


STORIES = Path(__file__).parents[3] / "shared/data/stories260K/hf"
GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k/train.jsonl"


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.skipif(not STORIES.exists() or not GSM8K.exists(), reason=f"needs {STORIES} and {GSM8K}")
def test_a_pretrained_model_on_gsm8k_equals_trl(tmp_path: Path) -> None:
    """A few steps of `benchmarks/training/trl_curves.py`, with evaluation, a save and a resume in between."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = Dataset.from_json(str(GSM8K), cache_dir=str(tmp_path / "cache")).select(range(44))
    rows = rows.rename_columns({"question": "prompt", "answer": "completion"})
    reader = AutoTokenizer.from_pretrained(STORIES)
    data = {"train_dataset": rows.select(range(40)), "eval_dataset": rows.select(range(40, 44))}
    settings = {
        "max_steps": 3,
        "max_length": 128,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": 1e-3,
    }
    model = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32)
    data["processing_class"] = reader
    reference = assert_both_equal(tmp_path, model, {"lockstep": 2}, data, **settings)
    again = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32)
    resumed = StreamingSFTTrainer(
        model=again,
        args=arguments(tmp_path / "ours", trl.SFTConfig, bf16=False, **settings),
        megatrain=planned(again, lockstep=1),
        **data,
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours/checkpoint-2"))
    assert_same_weights(weights(resumed), weights(reference))


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("compiles", "asked", "length"),
    [("on", None, 64), ("on", 8, 16), ("off", None, 15), ("auto", None, 15), ("off, on Hopper", None, 64)],
)
def test_rows_are_even_where_something_is_made_for_each_length(
    compiles: str, asked: int | None, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 9 to 15 tokens; what is added has no label and is masked. On a CPU `auto` does not compile.

    On Hopper cuDNN attends, and makes a plan for each length of rows.
    """
    if "Hopper" in compiles:
        order = choose_attention((9, 0))

        def attention_of(device: torch.device, *, repeats: bool | None = None) -> object:
            return order if repeats is None else None  # the model is attached to the CPU

        monkeypatch.setattr("megatrain.stream.forward.attention.attention_of", attention_of)
    trainer = StreamingSFTTrainer(
        make_model(FAMILIES["llama_tied"]()),
        arguments(tmp_path, trl.SFTConfig, bf16=False, pad_to_multiple_of=asked, max_length=64),
        train_dataset=prompts(),
        processing_class=tokenizer(),
        megatrain=MegatrainArguments(device="cpu", compile=compiles.partition(",")[0]),
    )
    monkeypatch.undo()
    batches = list(trainer.get_train_dataloader())
    assert max(batch["input_ids"].shape[1] for batch in batches) == length
    for batch in batches:
        is_added = batch["attention_mask"] == 0
        assert (batch["labels"][is_added] == -100).all()
        assert int((~is_added).sum()) <= batch["input_ids"].shape[0] * 15
    trainer.engine.detach()
