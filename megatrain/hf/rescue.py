"""The checkpoint of the last whole step when an error ends a trainer's training.

An error in a step leaves the state that the step before has left, unless an update ended in the middle; the
engine knows which. What the failed step has drawn and counted meanwhile is not saved, so a trainer that
resumes goes on to the bits of one that has never failed. The checkpoint is the plain trainer's, written as
any other: it is whole before the error reaches the caller.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer import TRAINER_STATE_NAME
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


@dataclass(frozen=True, slots=True)
class _Position:
    """Where a training is between two steps."""

    step: int
    num_issued: int
    """The steps whose changes the engine had issued."""
    flos: float
    num_input_tokens: int
    rng: Mapping[str, Any]


class LastStep:
    """Knows the last whole step of a trainer, and saves it where an error ends the training."""

    def __init__(self, trainer: Any, ranks: Ranks | Alone) -> None:
        """Know of no step yet."""
        self._trainer, self._ranks = trainer, ranks
        self._begun: int | None = None
        self._noted: _Position | None = None
        self._saved: int | None = None

    @property
    def _is_wanted(self) -> bool:
        """Whether the trainer saves at all, alone, and no trial of a search."""
        trainer = self._trainer
        saves = trainer.args.save_strategy != SaveStrategy.NO
        return saves and self._ranks.size == 1 and trainer.hp_search_backend is None

    @contextmanager
    def rescued(self) -> Iterator[None]:
        """Save the last whole step if an error ends the training inside, and say where; the error goes on."""
        self._begun = self._noted = self._saved = None
        try:
            yield
        except Exception as error:
            if self._begun is not None and self._trainer.state.global_step > self._begun and self._is_wanted:
                _log.warning("an error ends the training (%s): %s", first_line(error), self._save(error))
            raise

    def begin(self) -> None:
        """Take note that a step begins, which is the first one or not."""
        if self._begun is None:
            self._begun = self._trainer.state.global_step

    def note(self) -> None:
        """Note where the training is, between two steps: one that fails draws numbers, and counts."""
        if self._is_wanted:
            self._noted = self._now()

    def saved(self) -> None:
        """Take note that the newest step is saved."""
        self._saved = self._trainer.state.global_step

    # -- inside ---------------------------------------------------------------------------------------------

    def _now(self) -> _Position:
        trainer = self._trainer
        return _Position(
            step=trainer.state.global_step,
            num_issued=trainer.engine.arrangement.integrity.num_issued,
            flos=trainer.state.total_flos + float(trainer.current_flos),
            num_input_tokens=trainer.state.num_input_tokens_seen,
            rng=encode_rng(),
        )

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
        out = Path(trainer._get_output_dir(trial=None))
        if trainer.engine.choice.updates == Updates.IMMEDIATE.value:
            return _not_saved("with updates=immediate nothing is saved", out)
        if exhausted_memory(error) is not None:
            let_go(error)
        try:
            whole = self._whole()
            if whole is None:
                return _not_saved("what the engine holds is not the step that the trainer is at", out)
            path = out / f"{PREFIX_CHECKPOINT_DIR}-{whole.step}"
            if self._saved != whole.step:
                self._write(whole, path)
        except Exception as failed:
            is_ours = isinstance(failed, MegatrainError)
            why = str(failed).partition("; ")[0] if is_ours else f"{type(failed).__name__}: {failed}"
            return _not_saved(f"what was trained since could not be saved ({why})", out)
        return f"step {whole.step} is saved in {path}; {_WAY}"

    def _write(self, whole: _Position, path: Path) -> None:
        trainer, is_new = self._trainer, not path.exists()
        now = encode_rng()
        trainer.state.total_flos, trainer.current_flos = whole.flos, 0
        trainer.state.num_input_tokens_seen = whole.num_input_tokens
        restore_rng(whole.rng)
        try:
            trainer._save_checkpoint(trainer.model, trial=None)
        except BaseException:
            if is_new and path.exists():  # a resume would take it by its name
                files.remove_tree(path, first=TRAINER_STATE_NAME)
            raise
        finally:
            restore_rng(now)


_WAY = "trainer.train(resume_from_checkpoint=True) goes on from there"


def _not_saved(why: str, out: Path) -> str:
    newest = get_last_checkpoint(str(out)) if out.is_dir() else None
    return f"{why}; " + (f"the newest checkpoint is {newest}" if newest else "there is no checkpoint")
