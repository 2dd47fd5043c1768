"""What surrounds a streaming trainer's steps is the plain one's: events, data without a length, drives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback

from megatrain import Choice, Tiers
from megatrain.errors import ConfigError
from megatrain.hf import MegatrainArguments, StreamingTrainer
from tests.hf.setups import arguments, assert_same_weights, logged, plain, planned, rows, tiny, weights


class Events(TrainerCallback):
    """Notes what it is called for, and at which step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda args, state, control, **_: self.seen.append((name, state.global_step))


def test_callbacks_are_called_for_the_same_events(tmp_path: Path) -> None:
    seen = []
    for kind in ("plain", "ours"):
        events, model = Events(), tiny()
        shared: dict[str, Any] = {
            "args": arguments(tmp_path / kind, eval_strategy="epoch", save_strategy="epoch"),
            "train_dataset": rows(),
            "eval_dataset": rows(4),
            "callbacks": [events],
        }
        if kind == "plain":
            plain(Trainer, model, **shared).train()
        else:
            StreamingTrainer(model=model, megatrain=planned(model, lockstep=2), **shared).train()
        seen.append(events.seen)
    assert ("on_substep_end", 2) in seen[0]
    assert ("on_save", 3) in seen[0]
    assert seen[1] == seen[0]


class Stream(IterableDataset[Any]):
    """Rows whose number nobody knows beforehand."""

    def __iter__(self) -> Iterator[Any]:
        return iter(rows(10))


def test_data_that_ends_within_a_step_goes_on_accumulating(tmp_path: Path) -> None:
    """5 micro-batches, 4 to a step: the fifth waits for the next epoch's, and its gradient stays."""
    results = []
    for kind in ("plain", "ours"):
        model = tiny()
        args = arguments(tmp_path / kind, max_steps=3)
        if kind == "plain":
            trainer = plain(Trainer, model, args, train_dataset=Stream())
        else:
            trainer = StreamingTrainer(
                model=model, args=args, train_dataset=Stream(), megatrain=planned(model, lockstep=4)
            )
        trainer.train()
        results.append((logged(trainer), weights(trainer)))
    assert results[1][0] == results[0][0]
    assert_same_weights(results[1][1], results[0][1])


def test_state_on_drives_is_saved_and_resumed(tmp_path: Path) -> None:
    """The checkpoint of a run whose moments are on a drive goes on in RAM, to the same bits."""
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "max_grad_norm": 0.5}

    def make(name: str, model: Any, **given: Any) -> Any:
        return StreamingTrainer(
            model=model,
            args=arguments(tmp_path / name, **settings),
            train_dataset=rows(),
            megatrain=MegatrainArguments(device="checked", **given),
        )

    tiers = Tiers(nvme=(tmp_path / "drive",), ram=1 << 30)
    moved = frozenset({("moments", "nvme"), ("remainder", "nvme")})
    choice = Choice(tiers=moved, blocks_in_ram=0, weights_in_ram=0).with_defaults(4)
    (tmp_path / "drive").mkdir()
    on_drives = make("drives", tiny(), tiers=tiers, choice=choice)
    assert on_drives.engine.choice.uses_drives
    on_drives.train()
    model = tiny(seed=5)
    in_ram = make("ram", model, choice=planned(model).choice)
    in_ram.train(resume_from_checkpoint=str(tmp_path / "drives/checkpoint-2"))
    assert_same_weights(weights(in_ram), weights(on_drives))
    on_drives.engine.detach()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seq_len": 0}, r"MegatrainArguments\(seq_len=0\): a row has at least 2 tokens"),
        ({"compile": "maybe"}, "compile is 'maybe'; use auto, on or off"),
        ({"activation_budget": 0.45}, "a budget of compiled layers is 1.0, 0.7, 0.5 or 0.3, not 0.45"),
        ({"shards": 3}, r"MegatrainArguments\(shards=3\)"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_a_model_is_loaded(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        MegatrainArguments(**given)


def test_rows_beyond_the_model_s_context_are_refused(tmp_path: Path) -> None:
    context = tiny().config.max_position_embeddings
    with pytest.raises(
        ConfigError, match=rf"seq_len={context + 1}\) is beyond the model's context of {context}"
    ):
        StreamingTrainer(
            model=tiny(),
            args=arguments(tmp_path),
            train_dataset=rows(),
            megatrain=MegatrainArguments(device="checked", seq_len=context + 1),
        )


def test_a_move_to_where_the_model_computes_is_none() -> None:
    from megatrain.errors import ModelError
    from tests.reference import attach_plainly

    model = tiny()
    attach_plainly(model)
    assert model.to("cpu") is model
    with pytest.raises(ModelError, match="owns its device and dtype"):
        model.to("meta")
    with pytest.raises(ModelError, match="owns its device and dtype"):
        model.to(torch.float64)
