"""`StreamingTrainer` equals `transformers.Trainer` with the resident model, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback

import megatrain
from megatrain.errors import CheckpointError, ConfigError
from megatrain.hf import MegatrainArguments, StreamingTrainer
from megatrain.model.tiles.tiled import Tiled
from tests.families import VOCAB_SIZE
from tests.hf.setups import (
    arguments,
    assert_same_weights,
    logged,
    norms_of,
    plain,
    planned,
    rows,
    tiny,
    weights,
)
from tests.reference import attach_plainly


def right_tokens(prediction: Any) -> dict[str, float]:
    logits, labels = prediction
    return {"right": float((np.argmax(logits, -1)[:, :-1] == labels[:, 1:]).sum())}


def make(directory: Path, *, model: Any = None, fields: Any = None, **changes: Any) -> Any:
    model = tiny() if model is None else model
    kwargs = {
        key: changes.pop(key)
        for key in ("callbacks", "compute_metrics", "compute_loss_func")
        if key in changes
    }
    return StreamingTrainer(
        model=model,
        args=arguments(directory, **changes),
        train_dataset=rows(),
        eval_dataset=rows(5, seed=1),
        megatrain=planned(model, **(fields or {})),
        **kwargs,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"lockstep": 3, "activations": "recompute"},
        pytest.param({}, marks=pytest.mark.parity),
        pytest.param({"lockstep": 4, "updates": "immediate"}, marks=pytest.mark.parity),
    ],
)
def test_equals_the_plain_trainer_with_evaluation(fields: dict[str, Any], tmp_path: Path) -> None:
    """Steps of 4, 4 and 3 micro-batches: losses, metrics and weights have the same bits."""
    settings = {"eval_strategy": "steps", "eval_steps": 1}
    reference = plain(
        Trainer,
        tiny(),
        arguments(tmp_path / "plain", **settings),
        train_dataset=rows(),
        eval_dataset=rows(5, seed=1),
        compute_metrics=right_tokens,
    )
    reference.train()
    ours = make(tmp_path / "ours", fields=fields, compute_metrics=right_tokens, **settings)
    ours.train()
    assert ours.state.global_step == 3
    theirs = logged(reference)
    assert sum("eval_right" in entry for entry in theirs) == 3
    assert logged(ours) == theirs
    assert norms_of(ours) == pytest.approx(norms_of(reference), rel=1e-6)
    assert_same_weights(weights(ours), weights(reference))


def test_clips_by_the_true_norm(tmp_path: Path) -> None:
    """Bitwise against a reference that is clipped by our norms, which are torch's within rounding."""
    ours = make(tmp_path / "ours", max_grad_norm=0.3, fields={"lockstep": 2})
    ours.train()
    norms = norms_of(ours)
    assert len(norms) == 3
    assert min(norms) > 0.3
    data = {"train_dataset": rows(), "eval_dataset": rows(5, seed=1)}
    clipped = plain(Trainer, tiny(), arguments(tmp_path / "plain", max_grad_norm=0.3), norms, **data)
    clipped.train()
    assert logged(ours) == logged(clipped)
    assert_same_weights(weights(ours), weights(clipped))
    by_torch = plain(Trainer, tiny(), arguments(tmp_path / "torch", max_grad_norm=0.3, max_steps=1), **data)
    by_torch.train()
    assert norms[0] == pytest.approx(norms_of(by_torch)[0], rel=1e-6)


def test_another_length_of_tiles_is_told_at_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def trainer(tile_tokens: int | None, seed: int = 0) -> Any:
        model = tiny(seed=seed)
        made = StreamingTrainer(
            model=model,
            args=arguments(tmp_path / "run", save_strategy="steps", save_steps=2),
            train_dataset=rows(),
            megatrain=replace(planned(model), tile_tokens=tile_tokens),
        )
        assert isinstance(model.model.norm.__dict__.get("forward"), Tiled) is (tile_tokens is not None)
        return made

    whole = trainer(3)
    whole.train()
    saved = str(tmp_path / "run/checkpoint-2")
    resumed = trainer(3, seed=9)
    resumed.train(resume_from_checkpoint=saved)
    assert not [record for record in caplog.records if "tile_tokens" in record.getMessage()]
    assert_same_weights(dict(resumed.engine.named_masters()), dict(whole.engine.named_masters()))
    trainer(None).train(resume_from_checkpoint=saved)
    assert [record.getMessage() for record in caplog.records if "tile_tokens" in record.getMessage()] == [
        f"{saved} was trained with tile_tokens=3, and goes on with 0: sums will round otherwise; "
        "MegatrainArguments(tile_tokens=3) goes on to the same bits"
    ]
    with pytest.raises(ConfigError, match="a tile has at least 1 token"):
        MegatrainArguments(tile_tokens=-1)


class Interrupt(TrainerCallback):
    """Ends a run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.parity)])
def test_a_resumed_run_is_the_uninterrupted_one(precision: str, tmp_path: Path) -> None:
    """From a checkpoint within an epoch; two more steps would show any bit of a moment that is lost."""
    settings = {"save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.5}
    settings["gradient_accumulation_steps"] = 2
    settings["bf16"] = precision == "bf16"
    whole = make(tmp_path / "whole", **settings)
    whole.train()
    begun = make(tmp_path / "cut", callbacks=[Interrupt(4)], **settings)
    begun.train()
    assert begun.state.global_step == 4
    resumed = make(tmp_path / "cut", model=tiny(seed=9), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut/checkpoint-4"))
    assert logged(resumed)[:-1] == logged(whole)[:-1]
    assert_same_weights(dict(resumed.engine.named_masters()), dict(whole.engine.named_masters()))
    assert resumed._streamed.steps == whole._streamed.steps


def test_the_best_model_comes_back(tmp_path: Path) -> None:
    """The best is here that of the highest loss, so an early one; its weights are those that are left."""
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best_is = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    ours = make(tmp_path, **best_is, **settings)
    ours.train()
    best = ours.state.best_model_checkpoint
    losses = [entry["eval_loss"] for entry in ours.state.log_history if "eval_loss" in entry]
    assert best == str(tmp_path / f"checkpoint-{1 + losses.index(max(losses))}")
    assert losses.index(max(losses)) < 2
    loaded = megatrain.load(best)
    assert_same_weights(weights(ours), {name: p.detach() for name, p in loaded.named_parameters()})
    assert ours.evaluate()["eval_loss"] == max(losses)


def test_a_loss_of_the_user_s_and_label_smoothing_are_normalised_as_they_say(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum").sqrt() / num_items_in_batch

    for changes in ({"compute_loss_func": loss}, {"label_smoothing_factor": 0.2}):
        own = {key: value for key, value in changes.items() if key == "compute_loss_func"}
        args = {"max_steps": 2, **{key: value for key, value in changes.items() if key not in own}}
        reference = plain(Trainer, tiny(), arguments(tmp_path / "plain", **args), train_dataset=rows(), **own)
        reference.train()
        ours = make(tmp_path / "ours", fields={"lockstep": 2}, **args, **own)
        ours.train()
        assert logged(ours) == logged(reference)
        assert_same_weights(weights(ours), weights(reference))


def test_dropout_is_the_same_in_any_lockstep(tmp_path: Path) -> None:
    from tests.stream.runs import family_config

    def train(lockstep: int) -> dict[str, torch.Tensor]:
        from tests.reference import make_model

        model = make_model(family_config("gpt2", dropout=True))
        trainer = make(tmp_path / str(lockstep), model=model, fields={"lockstep": lockstep}, max_steps=2)
        trainer.train()
        return weights(trainer)

    one = train(1)
    assert_same_weights(train(4), one)


class HooksLater(TrainerCallback):
    """Puts a hook on the gradient of a weight when training begins, as the plain trainer lets one do."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weight = kwargs["model"].model.layers[2].mlp.up_proj.weight
        weight.register_hook(lambda grad: grad.sign() * 1e-3)


def test_hooks_on_gradients_leave_all_but_new_tokens_alone(tmp_path: Path) -> None:
    """The usual recipe: the embedding's gradient is masked; a callback's hook makes it that of a sign."""
    trained = []
    for kind in ("plain", "ours"):
        model = tiny("llama_tied")
        args = arguments(tmp_path / kind, max_steps=2, weight_decay=0.0)
        given: dict[str, Any] = {"train_dataset": rows(), "callbacks": [HooksLater()]}
        if kind == "plain":
            trainer = plain(Trainer, model, args, **given)
        else:
            trainer = StreamingTrainer(model=model, args=args, megatrain=planned(model, lockstep=3), **given)
        mask = torch.zeros(VOCAB_SIZE, 1)
        mask[-30:] = 1
        trainer.model.get_input_embeddings().weight.register_hook(lambda grad, mask=mask: grad * mask)
        trainer.train()
        trained.append(weights(trainer))
    assert_same_weights(trained[1], trained[0])
    embedding, before = (
        trained[1]["model.embed_tokens.weight"],
        tiny("llama_tied").get_input_embeddings().weight,
    )
    changed = (embedding != before).any(1)
    assert not changed[:-30].any()
    assert changed[-30:].all()


class Looks(TrainerCallback):
    """Looks at gradients before each update, where they are."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        found = self.engine.named_gradients() if self.engine else ((name, p.grad) for name, p in named)
        self.seen.append({name: grad.clone() for name, grad in found})


def test_gradients_are_there_before_an_update_and_a_line_says_where(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    looks = Looks(), Looks()
    ours = make(tmp_path, max_steps=2, callbacks=[looks[0]], fields={"lockstep": 2})
    looks[0].engine = ours.engine
    ours.train()
    plain(
        Trainer, tiny(), arguments(tmp_path, max_steps=2), train_dataset=rows(), callbacks=[looks[1]]
    ).train()
    assert len(looks[0].seen) == 2
    for one, other in zip(looks[0].seen, looks[1].seen, strict=True):
        assert_same_weights(one, other)
    said = [message for message in caplog.messages if "on_pre_optimizer_step" in message]
    assert len(said) == 1
    assert "Looks" in said[0]
    assert "trainer.engine.named_gradients() yields them" in said[0]


def test_a_checkpoint_that_is_not_there_is_said(tmp_path: Path) -> None:
    missing = tmp_path / "checkpoint-7"
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*checkpoint-7; give resume_from"):
        make(tmp_path).train(resume_from_checkpoint=str(missing))


def test_a_step_that_is_filled_up_for_shards_refuses_hooks(tmp_path: Path) -> None:
    """Its last micro-batch would be seen twice."""
    model = tiny()
    model.lm_head.weight.register_hook(lambda grad: grad)
    settings = replace(planned(model), shards=2)
    trainer = StreamingTrainer(
        model=model, args=arguments(tmp_path), train_dataset=rows(6), megatrain=settings
    )
    with pytest.raises(
        ConfigError, match=r"lm_head.weight has a hook.*of 3 micro-batches, is filled up to 4"
    ):
        trainer.train()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"optim": "adafactor"}, "optim is adafactor.*use optim='adamw_torch'"),
        ({"optim": "adamw_bnb_8bit"}, "MegatrainArguments\\(optimizer_state='int8'\\)"),
        ({"torch_compile": True}, "MegatrainArguments\\(compile='on'\\)"),
        ({"auto_find_batch_size": True}, "the plan fits the batch"),
        (
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}},
            "every_n_layers.*activations=",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        make(tmp_path, **changes)


def test_bf16_is_the_precision_of_the_engine(tmp_path: Path) -> None:
    """It is not autocast, and an engine of another precision is refused."""
    trainer = make(tmp_path, bf16=True, max_steps=1)
    assert trainer.engine.host.precision.value == "bf16"
    assert trainer.accelerator.mixed_precision == "no"
    trainer.train()
    model = tiny()
    attach_plainly(model)
    with pytest.raises(ConfigError, match=r"bf16 is True.*attached with precision='fp32'"):
        StreamingTrainer(model=model, args=arguments(tmp_path, bf16=True), train_dataset=rows())


def test_gradient_checkpointing_is_left_to_the_engine(tmp_path: Path) -> None:
    trainer = make(tmp_path, activation_checkpointing=True, max_steps=1)
    trainer.train()
    assert not any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules())


@pytest.mark.parametrize("most_bytes", [None, "20KB"])
def test_tensors_that_the_model_has_no_place_for_are_saved(
    most_bytes: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`megatrain.load` says that they are exported as they are; save_pretrained knows nothing of them."""
    source, out = tmp_path / "source", tmp_path / "out"
    tiny().save_pretrained(source)
    others = {"mtp.0.weight": torch.randn(3, 5).bfloat16(), "mtp.numbers": torch.arange(4)}
    file = source / "model.safetensors"
    save_file({**load_file(file), **others}, file, {"format": "pt"})
    if most_bytes is not None:
        save = PreTrainedModel.save_pretrained
        monkeypatch.setattr(
            PreTrainedModel, "save_pretrained", partialmethod(save, max_shard_size=most_bytes)
        )
    settings: dict[str, Any] = {"train_dataset": rows(), "megatrain": planned(tiny())}
    args = arguments(out, max_steps=1, save_strategy="steps", save_steps=1)
    trainer = StreamingTrainer(model=str(source), args=args, **settings)
    trainer.train()
    trainer.save_model(str(out))
    for place in (out / "checkpoint-1", out):
        trainer.save_model(str(place))  # over what is there
        resident = AutoModelForCausalLM.from_pretrained(place)
        assert_same_weights(dict(resident.named_parameters()), weights(trainer))
        export = megatrain.load(place).__dict__["_megatrain_untouched"]
        assert dict(export.values()).keys() == others.keys()
        for key, value in export.values():
            assert torch.equal(value, others[key]), key
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-1"))


def test_a_checkpoint_of_a_plain_trainer_is_refused(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    reference = plain(Trainer, tiny(), arguments(tmp_path, **settings), train_dataset=rows())
    reference.train()
    with pytest.raises(CheckpointError, match="saved by a plain trainer"):
        make(tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
