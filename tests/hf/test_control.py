"""Ranks do what the callbacks of the first one say, at the same time, and are told where they do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback, TrainerControl
from transformers.trainer_callback import CallbackHandler

from megatrain.errors import ConfigError
from megatrain.hf.control import FirstDecides
from megatrain.hf.ranks import ReadBatches
from tests.distributed.threads import Turns

INSIDE: dict[str, dict[str, Any]] = {"on_log": {"logs": {}}, "on_evaluate": {"metrics": {}}, "on_save": {}}
"""Events of the end of a step, which ranks agree after, and what they are given."""


def callbacks_of(ranks: Any, event: str, flag: str) -> Any:
    """Return a trainer of one rank, whose callback sets a flag on the first one alone."""

    def called(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        setattr(control, flag, ranks.rank == 0)

    callback = type("Flagging", (TrainerCallback,), {event: called})()
    handler = CallbackHandler([callback], None, None, None, None)
    return SimpleNamespace(callback_handler=handler, control=TrainerControl())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("event", ["on_train_begin", "on_step_begin", "on_substep_end", "on_step_end"])
def test_what_is_set_in_the_middle_of_a_step_waits_for_its_end(event: str) -> None:
    """Trainer looks after each micro-batch: rank 0 used to leave a step in which the others went on."""

    def run(ranks: Any) -> list[bool]:
        trainer = callbacks_of(ranks, event, "should_training_stop")
        decides = FirstDecides(ranks, trainer)
        with decides.training():
            call = getattr(trainer.callback_handler, event)
            trainer.control = call(None, None, trainer.control)
            seen = [trainer.control.should_training_stop]
            with decides.together():
                seen.append(trainer.control.should_training_stop)
            return seen

    assert Turns(2).run(run) == [[False, True]] * 2


@pytest.mark.parametrize("event", INSIDE)
def test_what_is_set_at_the_end_of_a_step_is_set_on_all_ranks(event: str) -> None:
    """By `on_log`, a save that rank 0 alone made; by `on_evaluate`, its early end."""

    def run(ranks: Any) -> list[bool]:
        trainer = callbacks_of(ranks, event, "should_training_stop")
        decides = FirstDecides(ranks, trainer)
        with decides.training(), decides.together():
            before = trainer.control.should_training_stop
            call = getattr(trainer.callback_handler, event)
            trainer.control = call(None, None, trainer.control, **INSIDE[event])
            trainer.control = trainer.callback_handler.on_prediction_step(None, None, trainer.control)
        assert "call_event" not in vars(trainer.callback_handler)
        return [before, trainer.control.should_training_stop]

    assert Turns(2).run(run) == [[False, True]] * 2


@pytest.mark.parametrize(
    ("step", "steps", "rows", "said"),
    [
        (4, 9, 1, r"rank 1 is at another step than rank 0 at step 3: "),
        (3, 5, 1, r"rank 1 would take 5 steps, in place of 9, and has other data than rank 0 at step 3: "),
        (3, 9, 2, r"rank 1 has read other batches than rank 0 at step 3: "),
    ],
    ids=str,
)
def test_ranks_that_do_other_things_are_told_in_what(step: int, steps: int, rows: int, said: str) -> None:
    def run(ranks: Any) -> str:
        own = (step, steps, rows) if ranks.rank == 1 else (3, 9, 1)
        read = ReadBatches(ranks, [{"input_ids": torch.arange(own[2])}])
        with pytest.raises(ConfigError) as caught:
            read.require_same(*own[:2])
        return str(caught.value).replace("at step 4", "at step 3")

    first, second = Turns(2).run(run)
    assert first == second
    assert said in first


def test_a_rank_that_is_elsewhere_in_the_script_is_told() -> None:
    def run(ranks: Any) -> None:
        if ranks.rank == 1:
            ranks.gather_values(["predictions"], "orders")
            return
        with pytest.raises(ConfigError, match=r"rank 1 does something else than .* on all of them"):
            ReadBatches(ranks).require_same(3, 9)

    Turns(2).run(run)
