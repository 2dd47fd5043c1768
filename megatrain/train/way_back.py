"""What a run says when an update has failed in the middle: from where the same command goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.checkpoint.load import find
from megatrain.errors import MegatrainError, TornStateError
from megatrain.train.records.directory import RunDirectory
from megatrain.train.resume.state_commits import find_commit
from megatrain.train.run import Run


@contextmanager
def way_back(run: Run, directory: RunDirectory) -> Iterator[None]:
    """Say of an error inside that has torn the state where to go on from: nothing of that state was saved.

    Raises:
        TornStateError: In place of that error.
    """
    try:
        yield
    except Exception as error:
        first = run.engine.arrangement.wholeness.cause
        if first is None:
            raise
        raise TornStateError.after(
            first,
            "so an update ended in the middle, and its state is lost; nothing of it was saved. Start the "
            "same command again, with checkpoint.resume=auto: it goes on from "
            f"{_newest(run, directory)}",
        ) from error


def _newest(run: Run, directory: RunDirectory) -> str:
    """Name what `auto` takes, if it is whole."""
    try:
        saved = next(iter(find(directory.checkpoints)), None)
        committed = find_commit(run.config, is_run=True)
    except MegatrainError:  # the command that goes on says what is wrong with it
        return "the newest checkpoint that is whole"
    step = 0 if saved is None else int(saved.name.partition("-")[2])
    if committed is not None and committed.step > step:
        return f"step {committed.step}, which is committed on the drives"
    return "the beginning, since nothing was saved before" if saved is None else str(saved)
