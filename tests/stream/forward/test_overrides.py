"""What would train an attached model past its engine works, or is refused before it has changed anything."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from transformers import PreTrainedModel, Trainer, TrainingArguments

from megatrain.errors import ConfigError, ModelError
from megatrain.stream.forward import overrides
from tests.families import FAMILIES, VOCAB_SIZE
from tests.reference import assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER

USE_OURS = r"use megatrain\.hf\.StreamingTrainer in place of Trainer.*engine\.adamw\(\.\.\.\)"


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_unchanged(model: PreTrainedModel, before: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter.detach(), before[name], name)


def arguments(directory: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(directory),
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        **changes,
    }


def make_rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB_SIZE, (12, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


MADE: dict[str, Callable[[PreTrainedModel], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "SGD": lambda model: torch.optim.SGD([model.lm_head.weight], lr=1.0),
    "of views": lambda model: torch.optim.SGD([model.lm_head.weight.detach()[:4]], lr=1.0),
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("is_before", [True, False])
def test_an_optimizer_of_torch_is_refused(is_before: bool, made: str) -> None:
    model = make_model(FAMILIES["llama"]())
    if is_before and made == "of views":
        pytest.skip("attach gives the parameters other memory, so these are views of nothing that is trained")
    optimizer = MADE[made](model) if is_before else None
    engine = attach_plainly(model)
    optimizer = optimizer or MADE[made](model)
    before = weights_of(model)
    model(**make_batches(1)[0]).loss.backward()
    with pytest.raises(ModelError, match=rf"is to train .*attached to an engine.*{USE_OURS}"):
        optimizer.step()
    assert_unchanged(model, before)
    engine.detach()
    model(**make_batches(1)[0]).loss.backward()
    optimizer.step()
    assert not torch.equal(model.lm_head.weight, before["lm_head.weight"]) or made == "of views"


def test_an_optimizer_of_other_weights_steps_beside_the_engine() -> None:
    model = make_model(FAMILIES["llama"]())
    engine = attach_plainly(model)
    ours = engine.adamw(**HYPER)
    extra = torch.nn.Linear(4, 4)
    theirs = torch.optim.SGD(extra.parameters(), lr=1.0)
    extra(torch.ones(4)).sum().backward()
    before = extra.weight.detach().clone()
    engine.forward_backward(make_batches(1))
    ours.step()
    theirs.step()
    assert not torch.equal(extra.weight, before)


def test_one_hook_is_left_and_nobody_watches_after_detach_or_when_the_engine_is_gone() -> None:
    attach_plainly(make_model(FAMILIES["llama"]())).detach()
    gc.collect()
    hooks, watching = len(_global_optimizer_pre_hooks), live()
    engine = attach_plainly(make_model(FAMILIES["llama"]()))
    assert live() == watching + 1
    engine.detach()
    assert live() == watching
    engine = attach_plainly(make_model(FAMILIES["llama"]()))
    assert live() == watching + 1
    del engine
    gc.collect()
    assert live() == watching
    assert len(_global_optimizer_pre_hooks) == hooks


def live() -> int:
    return sum(reference() is not None for reference in overrides._watching)


def test_an_engine_that_is_collected_within_a_step_of_another_optimizer_does_not_end_it() -> None:
    engines = [attach_plainly(make_model(FAMILIES["llama"]()))]

    def collect(*_: object) -> None:
        engines.clear()
        gc.collect()

    watching = live()
    extra = torch.nn.Linear(4, 4)
    theirs = torch.optim.SGD(extra.parameters(), lr=1.0)
    extra(torch.ones(4)).sum().backward()
    before = extra.weight.detach().clone()
    handle = register_optimizer_step_pre_hook(collect)
    try:
        theirs.step()
    finally:
        handle.remove()
    assert live() == watching - 1
    assert not torch.equal(extra.weight, before)


def test_trainer_without_our_optimizer_is_refused_in_its_first_step(tmp_path: Path) -> None:
    model = make_model(FAMILIES["llama"]())
    attach_plainly(model)
    before = weights_of(model)
    trainer = Trainer(model=model, args=TrainingArguments(**arguments(tmp_path)), train_dataset=make_rows())
    with pytest.raises(ModelError, match=rf"AdamW is to train .*{USE_OURS}"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert_unchanged(model, before)


def test_trainer_with_our_optimizer_is_refused_in_its_first_step(tmp_path: Path) -> None:
    """It would log a norm of 0 and could not save: the message says which class to use."""
    model = make_model(FAMILIES["llama"]())
    engine = attach_plainly(model)
    optimizer = engine.adamw(**HYPER, max_grad_norm=None, updates="immediate")
    before = weights_of(model)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**arguments(tmp_path)),
        train_dataset=make_rows(),
        optimizers=(optimizer, None),
    )
    with pytest.raises(
        ConfigError,
        match=r"cannot read a streamed step's norm.*use megatrain\.hf\.StreamingTrainer in place of Trainer",
    ):
        trainer.train()
    assert trainer.state.global_step == 0
    assert set(optimizer.steps.values()) == {0}
    assert_unchanged(model, before)


@pytest.mark.parametrize("ours", [True, False])
def test_accelerate_takes_our_optimizer_and_no_other(ours: bool) -> None:
    from accelerate import Accelerator

    model = make_model(FAMILIES["llama"]())
    engine = attach_plainly(model)
    before = weights_of(model)
    optimizer = engine.adamw(**HYPER) if ours else torch.optim.AdamW(model.parameters())
    prepared, wrapped = Accelerator(cpu=True).prepare(model, optimizer)
    prepared(**make_batches(1)[0]).loss.backward()
    if ours:
        wrapped.step()
        assert {engine.optimizer.steps[name] for name in engine.optimizer.steps} == {1}  # type: ignore[union-attr]
        engine.sync()
        assert not torch.equal(model.lm_head.weight, before["lm_head.weight"])
    else:
        with pytest.raises(ModelError, match=USE_OURS):
            wrapped.step()
        assert_unchanged(model, before)


def replace_forward(model: PreTrainedModel) -> None:
    """Do what TRL's `add_fused_lm_head` does: the head's weights are used outside of the model's forward."""

    def fused(input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        hidden = model.model(input_ids=input_ids).last_hidden_state
        return torch.nn.functional.cross_entropy(
            (hidden @ model.lm_head.weight.T)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )

    model.forward = fused


@pytest.mark.parametrize("updates", ["deferred", "immediate"])
def test_a_forward_that_goes_past_the_engine_is_refused_before_anything_is_updated(updates: str) -> None:
    model = make_model(FAMILIES["llama"]())
    engine = attach_plainly(model)
    optimizer = engine.adamw(**HYPER, max_grad_norm=None, updates=updates)
    replace_forward(model)
    before = weights_of(model)
    with pytest.raises(ModelError, match=rf"forward was replaced.*TRL.*{USE_OURS}"):
        model(**make_batches(1)[0]).backward()
    assert set(optimizer.steps.values()) == {0}
    assert_unchanged(model, before)
    with torch.no_grad():
        assert float(model(**make_batches(1)[0])) > 0
    engine.detach()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")  # TRL sets it
@pytest.mark.parametrize("ours", [True, False])
def test_sft_trainer_is_refused_before_its_first_step(ours: bool, tmp_path: Path) -> None:
    trl = pytest.importorskip(
        "trl", reason="TRL is not installed; its way of calling a model is tested above"
    )
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({str(number): number for number in range(VOCAB_SIZE)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="1", pad_token="2")
    model = make_model(FAMILIES["llama_tied"]())
    engine = attach_plainly(model)
    optimizer = engine.adamw(**HYPER, max_grad_norm=None, updates="immediate") if ours else None
    before = weights_of(model)
    rows = [{key: value.tolist() for key, value in row.items()} for row in make_rows()]
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**arguments(tmp_path, bf16=False)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        optimizers=(optimizer, None),
    )
    with pytest.raises((ModelError, ConfigError), match="StreamingSFTTrainer"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert_unchanged(model, before)
