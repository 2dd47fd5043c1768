"""The checkpoint of the last whole step when an error ends a trainer's training.

An error in a step leaves the state that the step before has left, unless an update ended in the middle; the
engine knows which. What the failed step has drawn and counted meanwhile is not saved, so a trainer that
resumes goes on to the bits of one that has never failed. The checkpoint is the plain trainer's, written as
any other: it is whole before the error reaches the caller.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, get_last_checkpoint

from megatrain import files
from megatrain.checkpoint.rng import encode_rng, restore_rng
from megatrain.config.choice import Updates
from megatrain.errors import MegatrainError, exhausted_memory, first_line
from megatrain.train.out_of_memory import let_go

if TYPE_CHECKING:
    from megatrain.distributed.alone import Alone
    from megatrain.distributed.ranks import Ranks

_log = logging.getLogger(__name__)

_WAY = "trainer.train(resume_from_checkpoint=True) goes on from there"


@dataclass(frozen=True, slots=True)
class _Position:
    """Where a training is between two steps."""

    step: int
    num_issued: int
    """The steps whose changes the engine had issued."""
    flos: float
    num_input_tokens: int
    rng: Mapping[str, Any]
    callbacks: Sequence[tuple[ExportableState, dict[str, Any]]]
    """The callbacks that have a state in checkpoints, each with that state."""


class LastStep:
    """Knows the last whole step of a trainer, and saves it where an error ends the training."""

    def __init__(self, trainer: Any, ranks: Ranks | Alone) -> None:
        """Know of no step yet."""
        self._trainer, self._ranks = trainer, ranks
        self._begun: int | None = None
        self._noted: _Position | None = None
        self._saved: int | None = None
        self._torn: Path | None = None
        """The checkpoint that a save has begun to write and not ended."""

    @property
    def _is_wanted(self) -> bool:
        """Whether the trainer saves at all, alone, and no trial of a search."""
        trainer = self._trainer
        saves = trainer.args.save_strategy != SaveStrategy.NO
        return saves and self._ranks.size == 1 and trainer.hp_search_backend is None

    @contextmanager
    def rescued(self) -> Iterator[None]:
        """Save the last whole step if an error ends the training inside, and say where; the error goes on.

        After whatever ends it, no checkpoint is left that was not written to its end.
        """
        self._begun = self._noted = self._saved = self._torn = None
        try:
            yield
        except BaseException as error:
            has_trained = self._begun is not None and self._trainer.state.global_step > self._begun
            if isinstance(error, Exception) and has_trained and self._is_wanted:
                _log.warning("an error ends the training (%s): %s", first_line(error), self._save(error))
            elif self._ranks.size == 1:
                self._remove_torn()
            raise

    def begin(self) -> None:
        """Take note that a step begins, which is the first one or not."""
        if self._begun is None:
            self._begun = self._trainer.state.global_step

    def note(self) -> None:
        """Note where the training is, between two steps: one that fails draws numbers, and counts."""
        if self._is_wanted:
            self._noted = self._now()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Take note that the newest step is saved inside."""
        if self._trainer.hp_search_backend is None:  # the trials of a search have directories of their own
            self._torn = self._path(self._trainer.state.global_step)
        yield
        self._torn, self._saved = None, self._trainer.state.global_step

    def leave(self) -> None:
        """Take note that the model is the best one from now on, and no longer that of the last step."""
        self._begun = None

    # -- inside ---------------------------------------------------------------------------------------------

    def _now(self) -> _Position:
        trainer = self._trainer
        return _Position(
            step=trainer.state.global_step,
            num_issued=trainer.engine.arrangement.integrity.num_issued,
            flos=trainer.state.total_flos + float(trainer.current_flos),
            num_input_tokens=trainer.state.num_input_tokens_seen,
            rng=encode_rng(),
            callbacks=[
                (each, deepcopy(each.state()))
                for each in trainer.callback_handler.callbacks
                if isinstance(each, ExportableState)
            ],
        )

    def _path(self, step: int) -> Path:
        return Path(self._trainer._get_output_dir(trial=None)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"

    def _whole(self) -> _Position | None:
        """Return the position of the state that the engine has; None: it is not known to be that of any.

        Raises:
            TornStateError: The state is torn.
        """
        engine = self._trainer.engine
        engine.settle()
        num_held = engine.arrangement.integrity.num_held
        now = self._now()
        noted = self._noted or now
        if noted.step < now.step:  # a callback has raised at the end of a step, before it was noted
            noted = now
        return noted if noted.num_issued == num_held and noted.step == now.step else None

    def _save(self, error: Exception) -> str:
        """Save the last whole step, unless that is done, and say what is saved."""
        trainer = self._trainer
        if trainer.engine.choice.updates == Updates.IMMEDIATE.value:
            return self._not_saved("with updates=immediate nothing is saved")
        if exhausted_memory(error) is not None:
            let_go(error)
        try:
            whole = self._whole()
            if whole is None:
                return self._not_saved("what the engine holds is not the step that the trainer is at")
            path = self._path(whole.step)
            if self._saved != whole.step or not path.exists():  # the limit may have removed it
                self._write(whole)
        except Exception as failed:
            is_ours = isinstance(failed, MegatrainError)
            why = str(failed).partition("; ")[0] if is_ours else f"{type(failed).__name__}: {failed}"
            return self._not_saved(f"what was trained since could not be saved ({why})")
        if trainer.args.save_only_model:
            return f"the model of step {whole.step} is saved in {path}, and nothing else (save_only_model)"
        return f"step {whole.step} is saved in {path}; {_WAY}"

    def _write(self, whole: _Position) -> None:
        """Save a step as the trainer would, but do not push it, as `on_save` is not called either."""
        trainer, now = self._trainer, encode_rng()
        trainer.state.total_flos, trainer.current_flos = whole.flos, 0
        trainer.state.num_input_tokens_seen = whole.num_input_tokens
        restore_rng(whole.rng)
        with ExitStack() as around:
            around.callback(restore_rng, now)
            around.enter_context(mock.patch.object(trainer, "_push_from_checkpoint"))
            for callback, state in whole.callbacks:
                around.enter_context(mock.patch.object(callback, "state", return_value=state))
            trainer._save_checkpoint(trainer.model, trial=None)

    def _not_saved(self, why: str) -> str:
        self._remove_torn()
        out = self._path(0).parent
        newest = get_last_checkpoint(str(out)) if out.is_dir() else None
        return f"{why}; " + (f"the newest checkpoint is {newest}" if newest else "there is no checkpoint")

    def _remove_torn(self) -> None:
        """Remove the checkpoint that a save has left torn: a resume would take it by its name."""
        torn, self._torn = self._torn, None
        if torn is None or not torn.exists():
            return
        try:
            files.remove_tree(torn, first=TRAINER_STATE_NAME)
        except MegatrainError as error:
            _log.warning("%s was not written to its end, and stays; do not resume from it: %s", torn, error)
        else:
            _log.warning("%s was not written to its end, and is removed", torn)
