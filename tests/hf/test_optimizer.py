"""The optimizer of a trainer: rates of groups, clipping that changes, a second trainer; what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from megatrain.errors import CheckpointError, ConfigError
from megatrain.hf import StreamingTrainer
from megatrain.hf.streaming import Streaming
from tests.hf.setups import (
    Padded,
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


def groups(model: Any) -> list[dict[str, Any]]:
    """Make three: the embedding at a tenth of the rate, the first layers with other betas, and the rest."""
    inside = model.model
    first = [p for layer in inside.layers[:2] for p in layer.parameters()]
    embedding = [inside.embed_tokens.weight]
    taken = {id(parameter) for parameter in first + embedding}
    return [
        {"params": embedding, "lr": 1e-3, "weight_decay": 0.0},
        {"params": first, "betas": (0.8, 0.9), "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if id(p) not in taken], "lr": 3e-2, "eps": 1e-6},
    ]


def exact(model: Any) -> torch.optim.AdamW:
    return Padded(groups(model), lr=5e-3)


def of_torch(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups(model), lr=5e-3)


class Plain(Trainer):
    """Makes its optimizer with each training."""

    def create_optimizer(self, model: Any = None) -> Any:
        """Make torch's."""
        self.optimizer = (of_torch if isinstance(self, Streaming) else exact)(self.model)
        return self.optimizer


class Overriding(StreamingTrainer):
    """Makes its optimizer as subclasses of Trainer do."""

    def create_optimizer(self, model: Any = None) -> Any:
        """Make torch's."""
        self.optimizer = of_torch(self.model)
        return self.optimizer


def test_groups_have_rates_of_their_own_and_are_resumed(tmp_path: Path) -> None:
    """Bitwise torch's AdamW with these groups, given, and made by a method of the trainer."""
    settings = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 1}
    data: dict[str, Any] = {"train_dataset": rows()}
    reference = Plain(model=tiny(), args=arguments(tmp_path / "plain"), **data)
    reference.train()
    expected = copy.deepcopy(weights(reference))
    model = tiny()
    given = StreamingTrainer(
        model=model,
        args=arguments(tmp_path / "given", **settings),
        optimizers=(of_torch(model), None),
        megatrain=planned(model, lockstep=2),
        **data,
    )
    given.train()
    assert_same_weights(weights(given), expected)
    assert [group["initial_lr"] for group in given.optimizer.param_groups] == [1e-3, 5e-3, 3e-2]
    made = tiny()
    trainer = Overriding(
        model=made, args=arguments(tmp_path / "made", num_train_epochs=1), megatrain=planned(made), **data
    )
    trainer.train()
    assert_same_weights(weights(trainer), expected)
    trainer.train()  # the method makes another one, whose moments begin anew
    reference.train()
    assert_same_weights(weights(trainer), weights(reference))
    again = tiny(seed=4)
    resumed = Overriding(
        model=again, args=arguments(tmp_path / "given", **settings), megatrain=planned(again), **data
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "given/checkpoint-2"))
    assert_same_weights(weights(resumed), expected)
    other = tiny()
    fewer = StreamingTrainer(
        model=other, args=arguments(tmp_path / "given", **settings), megatrain=planned(other), **data
    )
    with pytest.raises(CheckpointError, match=r"has groups of \[1, 18, 20\] parameters, and this one of"):
        fewer.train(resume_from_checkpoint=str(tmp_path / "given/checkpoint-2"))


def test_a_class_with_arguments_is_made_as_the_plain_trainer_makes_it(tmp_path: Path) -> None:
    """Decay by its names; rates as the class is told."""
    model = tiny()
    kwargs = {"lr": 2e-2, "betas": (0.7, 0.8), "eps": 1e-7}
    ours = StreamingTrainer(
        model=model,
        args=arguments(tmp_path, max_steps=2, learning_rate=1.0),
        train_dataset=rows(),
        optimizer_cls_and_kwargs=(torch.optim.AdamW, dict(kwargs)),
        megatrain=planned(model),
    )
    ours.train()
    reference = Trainer(
        model=tiny(),
        args=arguments(tmp_path, max_steps=2, learning_rate=1.0),
        train_dataset=rows(),
        optimizer_cls_and_kwargs=(Padded, dict(kwargs)),
    )
    reference.train()
    assert_same_weights(weights(ours), weights(reference))


class Named(Trainer):
    """Says which optimizer it wants, and leaves the making to the plain class."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
        """Return torch's class with a rate of its own."""
        return Padded, {"lr": 3e-2, "betas": (0.7, 0.8)}


class StreamingPlain(Streaming, Plain):
    """Stands before a class that makes its optimizer."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
        """Of nobody: `create_optimizer` makes it."""
        raise AssertionError


class StreamingNamed(StreamingTrainer):
    """Names torch's own."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
        """Return torch's class with a rate of its own."""
        return torch.optim.AdamW, {"lr": 3e-2, "betas": (0.7, 0.8)}


@pytest.mark.parametrize(("kind", "resident"), [(StreamingPlain, Plain), (StreamingNamed, Named)])
def test_an_optimizer_that_a_class_makes_or_names_is_taken(kind: Any, resident: Any, tmp_path: Path) -> None:
    """Also where `Streaming` stands before the class, so that its own methods come first."""
    model = tiny()
    settings: dict[str, Any] = {"args": arguments(tmp_path, max_steps=2), "train_dataset": rows()}
    ours = kind(model=model, megatrain=planned(model), **settings)
    reference = resident(model=tiny(), **settings)
    for trainer in (ours, reference):
        trainer.train()
    assert_same_weights(weights(ours), weights(reference))


def test_rates_of_lora_plus_are_those_of_its_groups(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install 'megatrain[lora]'")
    from peft.optimizers import create_loraplus_optimizer

    trained = []
    for kind in ("plain", "ours"):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(tiny(), config)
        cls = Padded if kind == "plain" else torch.optim.AdamW
        optimizer = create_loraplus_optimizer(model, optimizer_cls=cls, lr=1e-3, loraplus_lr_ratio=16.0)
        assert {group["lr"] for group in optimizer.param_groups} == {1e-3, 1.6e-2, 1e-6}
        given: dict[str, Any] = {
            "model": model,
            "args": arguments(tmp_path / kind, max_steps=2),
            "train_dataset": rows(),
            "optimizers": (optimizer, None),
        }
        trainer = (
            Trainer(**given)
            if kind == "plain"
            else StreamingTrainer(megatrain=planned(model, lockstep=2), **given)
        )
        trainer.train()
        trained.append(weights(trainer))
    assert_same_weights(trained[1], trained[0])


class Sgd(StreamingTrainer):
    """Makes an optimizer that no streamed model is trained by."""

    def create_optimizer(self, model: Any = None) -> Any:
        """Make it."""
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        return self.optimizer


def with_moments(model: Any) -> torch.optim.AdamW:
    optimizer = of_torch(model)
    optimizer.state[model.lm_head.weight] = {"step": 1}
    return optimizer


def scheduled(model: Any) -> tuple[Any, Any]:
    optimizer = of_torch(model)
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (Sgd, lambda model: {}, "the trainer names SGD; a streamed model is trained by AdamW of its engine"),
        (
            StreamingTrainer,
            lambda model: {"optimizers": (torch.optim.SGD(model.parameters()), None)},
            "optimizers names SGD; .*torch.optim.AdamW with groups",
        ),
        (
            StreamingTrainer,
            lambda model: {"optimizer_cls_and_kwargs": (torch.optim.Adam, {"lr": 1.0})},
            "optimizer_cls_and_kwargs names Adam;",
        ),
        (
            StreamingTrainer,
            lambda model: {"optimizers": (with_moments(model), None)},
            "has trained, with moments",
        ),
        (StreamingTrainer, lambda model: {"optimizers": scheduled(model)}, "changes the rates of a AdamW"),
        (
            StreamingTrainer,
            lambda model: {"optimizers": (torch.optim.AdamW(tiny().parameters()), None)},
            r"group 0 of parameters has a parameter that is none of the model's \(Parameter\)",
        ),
        (
            StreamingTrainer,
            lambda model: {"optimizers": (torch.optim.AdamW(model.parameters(), amsgrad=True), None)},
            "amsgrad=True; use amsgrad=False",
        ),
    ],
)
def test_other_optimizers_are_refused_by_name_and_nothing_is_trained(
    kind: Any, given: Any, says: str, tmp_path: Path
) -> None:
    model = tiny()
    before = {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises(ConfigError, match=says):
        kind(
            model=model,
            args=arguments(tmp_path),
            train_dataset=rows(),
            megatrain=planned(model),
            **given(model),
        ).train()
    assert_same_weights(dict(model.named_parameters()), before)


def test_a_second_trainer_trains_the_same_object(tmp_path: Path) -> None:
    """A cell of a notebook that is run again: weights go on, moments begin anew, as with the plain class."""
    expected = tiny()
    for learning_rate in (1e-2, 3e-3):
        args = arguments(tmp_path / "plain", max_steps=2, learning_rate=learning_rate)
        reference = plain(Trainer, expected, args, train_dataset=rows())
        reference.train()
        expected = reference.model
    model, trainers = tiny(), []
    for lockstep, learning_rate in ((2, 1e-2), (4, 3e-3)):
        args = arguments(tmp_path / "ours", max_steps=2, learning_rate=learning_rate)
        trainer = StreamingTrainer(
            model=model, args=args, train_dataset=rows(), megatrain=planned(model, lockstep=lockstep)
        )
        trainers.append(trainer)
        trainer.train()
        assert trainer.engine.choice.lockstep == lockstep
    assert_same_weights(weights(trainers[1]), weights(reference))
    with pytest.raises(ConfigError, match="another trainer has taken it; make a new trainer"):
        trainers[0].train()


def test_trainers_that_are_made_before_either_trains_take_turns(tmp_path: Path) -> None:
    model = tiny()
    first, second = (
        StreamingTrainer(
            model=model,
            args=arguments(tmp_path, max_steps=2),
            train_dataset=rows(seed=seed),
            eval_dataset=rows(3),
            megatrain=planned(model),
        )
        for seed in (0, 1)
    )
    first.train()
    assert first.engine is not second.engine
    loss = first.evaluate()["eval_loss"]
    second.train()
    assert second.evaluate()["eval_loss"] != loss
    assert logged(first)[0]["loss"] != logged(second)[0]["loss"]
    final = second.evaluate()["eval_loss"]
    assert first.evaluate()["eval_loss"] == final, "of the model as it is now"
    second.train()  # which has its moments still
    second.engine.detach()
    assert second.evaluate()["eval_loss"] == pytest.approx(first.evaluate()["eval_loss"], rel=1e-6)


def test_the_optimizer_of_an_engine_that_the_user_has_made_is_gone_on_with_or_named(tmp_path: Path) -> None:
    model = tiny()
    engine = attach_plainly(model)
    optimizer = engine.adamw(lr=1e-2, max_grad_norm=None)
    assert engine.optimizer is optimizer
    args = arguments(tmp_path, max_steps=2)
    with pytest.raises(ConfigError, match=r"optimizers=\(engine.optimizer, None\).*engine.detach\(\)"):
        StreamingTrainer(model=model, args=args, train_dataset=rows())
    trainer = StreamingTrainer(model=model, args=args, train_dataset=rows(), optimizers=(optimizer, None))
    assert trainer.engine is engine
    trainer.train()
    assert set(optimizer.steps.values()) == {2}
    ids = rows(1)[0]["input_ids"][None]
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 19)
    engine.detach()
    assert model(input_ids=ids, labels=ids).loss.item() > 0


class Clip(TrainerCallback):
    """Clips to less from a step on."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            args.max_grad_norm = 0.2


def test_clipping_follows_the_arguments(tmp_path: Path) -> None:
    """Changed by a callback, and between two trainings: to less, and to none."""
    found = []
    for kind in ("ours", "plain"):
        model = tiny()
        args = arguments(tmp_path / kind, max_steps=2, max_grad_norm=0.5)
        if kind == "ours":
            trainer: Any = StreamingTrainer(
                model=model, args=args, train_dataset=rows(), callbacks=[Clip()], megatrain=planned(model)
            )
        else:
            trainer = plain(Trainer, model, args, train_dataset=rows(), callbacks=[Clip()])
        norms, states = [], []
        for clip in (None, 0.1, 0.0):
            trainer.args.max_grad_norm = trainer.args.max_grad_norm if clip is None else clip
            trainer.callback_handler.callbacks = [
                callback
                for callback in trainer.callback_handler.callbacks
                if clip is None or not isinstance(callback, Clip)
            ]
            trainer.train()
            norms += norms_of(trainer)
            states.append(copy.deepcopy(weights(trainer)))
            if kind == "ours":
                expected = 0.2 if clip is None else clip or None
                assert trainer.optimizer.optimizer.max_grad_norm == expected
        found.append((states, norms))
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)
    assert len(found[0][1]) == 6
    assert min(found[0][1]) > 0.5
    for ours, theirs in zip(found[0][0], found[1][0], strict=True):
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=0, atol=2e-6)
