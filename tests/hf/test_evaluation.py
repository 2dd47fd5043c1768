"""Evaluations and references: many batches pass together, each layer is fetched once for all, bits stay."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback

from megatrain.hf import StreamingTrainer
from tests.hf.setups import arguments, logged, plain, planned, rows, tiny, tokenizer

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing[a-z_]*. is deprecated:FutureWarning"  # TRL sets it
)

NUM_LAYERS = 4


class Counted:
    """Counts right tokens, batch by batch; says at the last batch how many there were."""

    def __init__(self) -> None:
        self.right = 0
        self.seen: list[bool] = []

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, float]:
        logits, labels = (torch.as_tensor(np.asarray(part)) for part in prediction)
        self.right += int((logits[:, :-1].argmax(-1) == labels[:, 1:]).sum())
        self.seen.append(compute_result)
        return {"right": self.right} if compute_result else {}


class Steps(TrainerCallback):
    """Counts predictions as the loop comes to them."""

    def __init__(self) -> None:
        self.count = 0

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self.count += 1


class Stream(IterableDataset[Any]):
    """Rows whose number nobody knows beforehand."""

    def __iter__(self) -> Iterator[Any]:
        return iter(rows(7, seed=1))


def both(directory: Path, ours: Any = StreamingTrainer, theirs: Any = Trainer, **given: Any) -> list[Any]:
    """Make a plain trainer and ours, with four micro-batches of 2 x 64 tokens in a round."""
    settings = given.pop("settings", {"per_device_eval_batch_size": 1})
    data = given.pop("eval_dataset", rows(7, seed=1))
    model, make = tiny(), given.pop("metrics", lambda: None)
    args = arguments(directory, **settings)
    reference = plain(theirs, model, args, eval_dataset=data, compute_metrics=make(), **given)
    args = arguments(directory, **settings)
    streamed = planned(model, lockstep=4)
    return [
        reference,
        ours(model=model, args=args, eval_dataset=data, compute_metrics=make(), megatrain=streamed, **given),
    ]


def evaluated(trainer: Any, **given: Any) -> dict[str, float]:
    found = trainer.evaluate(**given)
    left_out = ("runtime", "per_second", "preparation_time")
    return {name: value for name, value in found.items() if not any(word in name for word in left_out)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("settings", "metrics"),
    [
        ({}, lambda: None),
        ({"batch_eval_metrics": True}, Counted),
        ({"eval_accumulation_steps": 2, "include_for_metrics": ["loss"]}, lambda: right_tokens),
    ],
)
def test_seven_batches_fetch_each_layer_once(settings: dict[str, Any], metrics: Any, tmp_path: Path) -> None:
    """Before, they fetched each of four layers seven times; 7 x 16 tokens are fewer than a round has."""
    reference, ours = both(tmp_path, settings={"per_device_eval_batch_size": 1, **settings}, metrics=metrics)
    steps = Steps()
    ours.add_callback(steps)
    before = ours.engine.counts.fetches
    assert evaluated(ours) == evaluated(reference)
    assert ours.engine.counts.fetches - before == NUM_LAYERS < 7 * NUM_LAYERS
    assert steps.count == 7
    if metrics is Counted:
        assert ours.compute_metrics.seen == reference.compute_metrics.seen == [False] * 6 + [True]


def right_tokens(prediction: Any) -> dict[str, float]:
    logits, labels, losses = prediction
    right = float((np.argmax(logits, -1)[:, :-1] == labels[:, 1:]).sum())
    return {"right": right, "loss": float(losses.sum())}


def test_predictions_of_a_stream_and_of_several_sets_are_the_plain_ones(tmp_path: Path) -> None:
    """The last batch of each has fewer rows; every group has the tokens of a round, or one batch."""
    for data in (Stream(), {"a": rows(7, seed=1), "b": rows(3, seed=2)}):
        reference, ours = both(tmp_path, eval_dataset=data, settings={"per_device_eval_batch_size": 2})
        assert evaluated(ours) == evaluated(reference)
    theirs, found = (each.predict(rows(5, seed=3)) for each in (reference, ours))
    assert np.array_equal(found.predictions, theirs.predictions)
    assert np.array_equal(found.label_ids, theirs.label_ids)
    assert found.predictions.shape == (5, 16, 128)


class Gathering(Trainer):
    """Takes its own metrics of each row, as accelerate says for those of an evaluation."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.training:
            found = self.accelerator.gather_for_metrics(inputs["input_ids"][:, 0])
            self.__dict__.setdefault("gathered", []).append(len(found))
        return super().compute_loss(model, inputs, *args, **kwargs)


class StreamingGathering(StreamingTrainer, Gathering):
    """The same, streamed."""


def test_metrics_of_a_batch_have_all_its_rows_though_the_last_one_has_fewer(tmp_path: Path) -> None:
    """The last batch, of one row, was read already: of three rows, each batch had one."""
    settings = {"per_device_eval_batch_size": 3}
    reference, ours = both(tmp_path, StreamingGathering, Gathering, settings=settings)
    assert evaluated(ours) == evaluated(reference)
    assert sorted(ours.gathered) == sorted(reference.gathered) == [1, 3, 3]


class Drawing(Trainer):
    """Predicts with noise, of which each batch draws its own."""

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        assert loss is not None
        return loss + torch.rand(()), logits, labels


class StreamingDrawing(StreamingTrainer, Drawing):
    """The same, streamed."""


def test_predictions_that_draw_are_made_one_by_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """So each batch has the numbers that it would have had."""
    reference, ours = both(tmp_path, StreamingDrawing, Drawing)
    found = []
    for trainer in (reference, ours):
        torch.manual_seed(3)
        found.append([evaluated(trainer), evaluated(trainer), float(torch.rand(()))])
    assert found[1] == found[0]
    assert found[0][0] != found[0][1]
    assert caplog.text.count("one by one from now on: they draw random numbers") == 1


class SwitchingMode(Trainer):
    """Adds what the model says in another mode, which it changes between two passes."""

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        assert loss is not None
        model.train()
        with torch.no_grad():
            other = model(**inputs).loss
        model.eval()
        return loss + other, logits, labels


class StreamingSwitchingMode(StreamingTrainer, SwitchingMode):
    """The same, streamed."""


def test_predictions_that_change_the_mode_are_made_one_by_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference, ours = both(tmp_path, StreamingSwitchingMode, SwitchingMode)
    assert evaluated(ours) == evaluated(reference)
    assert caplog.text.count("they change the model's mode or adapters") == 1


def test_an_evaluation_in_training_changes_no_bit_and_fetches_each_layer_once(tmp_path: Path) -> None:
    """With dropout, whose masks would differ had the evaluation left its random state behind."""
    from tests.reference import make_model
    from tests.stream.runs import family_config

    found = []
    for strategy in ("no", "steps"):
        model = make_model(family_config("gpt2", dropout=True))
        args = arguments(tmp_path, max_steps=2, eval_strategy=strategy, eval_steps=1)
        trainer = StreamingTrainer(
            model=model,
            args=args,
            train_dataset=rows(),
            eval_dataset=rows(5, seed=1),
            megatrain=planned(model, lockstep=2),
        )
        trainer.train()
        found.append([entry["loss"] for entry in logged(trainer) if "loss" in entry])
    assert len(found[0]) == 2
    assert found[0] == found[1]


def test_references_of_many_pairs_fetch_each_layer_once(tmp_path: Path) -> None:
    """Those of DPO and KTO, computed before the first step: TRL's own numbers, in a few passes."""
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl peft")
    from megatrain.hf import StreamingDPOTrainer, StreamingKTOTrainer
    from tests.hf.test_preferences import rows as answers

    for kind, own, theirs, config in (
        ("dpo", StreamingDPOTrainer, trl.DPOTrainer, trl.DPOConfig),
        ("kto", StreamingKTOTrainer, trl.KTOTrainer, trl.KTOConfig),
    ):
        model = tiny()
        data: dict[str, Any] = {"train_dataset": answers(kind, 22), "processing_class": tokenizer()}
        settings: dict[str, Any] = {
            "bf16": False,
            "precompute_ref_log_probs": True,
            "precompute_ref_batch_size": 2,
        }
        reference = theirs(
            model=copy.deepcopy(model), args=arguments(tmp_path / kind, config, **settings), **data
        )
        ours = own(
            model=model,
            args=arguments(tmp_path / kind, config, **settings),
            megatrain=planned(model, lockstep=4),
            **data,
        )
        names = {"ref_chosen_logps", "ref_rejected_logps", "ref_logps", "ref_KL_logps"}
        names &= set(reference.train_dataset.column_names)
        assert len(names) == 2
        for name in names:
            assert ours.train_dataset[name][:] == reference.train_dataset[name][:]
            assert len(set(ours.train_dataset[name])) > 20
        num_passes = 1 if kind == "dpo" else 2  # of each group
        assert 11 * NUM_LAYERS > 3 * num_passes * NUM_LAYERS >= ours.engine.counts.fetches
