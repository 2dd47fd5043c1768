"""Every error that a user can cause, each with the exit code that the command line gives it.

A message is one sentence or two: what was wrong, where (file, row, key), what to do. Our own mistakes are
`AssertionError`s and end with exit code 1 and a traceback.
"""

from __future__ import annotations


class MegatrainError(Exception):
    """Base of every error that a user can cause."""

    exit_code = 2


class ConfigError(MegatrainError):
    """A flag, a configuration key or a combination of them that cannot run."""


class ModelError(MegatrainError):
    """A model or model directory that cannot be read, or cannot be trained exactly."""


class OutputError(MegatrainError):
    """An output directory that cannot be written, or holds files that are not ours."""


class CheckpointError(MegatrainError):
    """A checkpoint that is missing, damaged, or does not belong to this run."""


class CapacityError(MegatrainError):
    """A run that does not fit: names the pool, the need, the limit and the way out."""

    exit_code = 3


class DataError(MegatrainError):
    """Training data that cannot be read or used: names the file and the row."""

    exit_code = 4


class TornStateError(MegatrainError):
    """State of which some parameters have had an update that others have not: an operation has failed."""

    exit_code = 6

    @classmethod
    def after(cls, first: BaseException, way_out: str) -> TornStateError:
        """Say what has failed first, and what to do; an error of the user's keeps its exit code."""
        is_ours = isinstance(first, MegatrainError)
        error = cls(f"{first if is_ours else f'{type(first).__name__}: {first}'}; {way_out}")
        error.exit_code = first.exit_code if isinstance(first, MegatrainError) else cls.exit_code
        return error


class DivergedError(MegatrainError):
    """A run whose gradients stayed non-finite for too many steps in a row."""

    exit_code = 5
