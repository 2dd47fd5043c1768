"""All errors that a user can cause, each with the exit code that the command line gives it.

A message is one sentence or two: the fault, its place (file, row, key), and the way out. Our own mistakes are
`AssertionError`s and end with exit code 1 and a traceback. A refusal of the operating system becomes an error
of ours in `os_errors`, at the operation, which knows the path.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
from collections.abc import Iterable, Iterator

_ON_DEVICE = re.compile(r"CUDA error: out of memory|CUDA out of memory|XPU out of memory")
_PLACE = re.compile(r"^\[enforce fail at [^\]]*\][^.]*\. ")
_SMALLER = "close what else takes memory, or use a smaller model, shorter sequences or fewer rows at a time"

NO_TENSOR = (RuntimeError, TypeError, ValueError, OverflowError)
"""The errors of torch about a tensor of a file that it cannot make, such as an empty one of a huge shape."""

_NUMBER = re.compile(r"\(os error ([0-9]+)\)|: [^:]+ \(([0-9]+)\)$")
"""The number of an error of the system, in the words of Rust and of torch."""


class MegatrainError(Exception):
    """The base of every error that a user can cause."""

    exit_code = 2

    is_told = False
    """Whether another process of the run reports it, since one sentence is enough."""


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


class GivenUpError(CapacityError):
    """A step of several ranks for which the device of one had no room: all of them have given it up."""

    def __init__(self, rank: int, reason: str) -> None:
        """Say it; every rank raises it.

        Args:
            rank: The rank whose device had no room.
            reason: What its device, or torch, says.
        """
        super().__init__(
            f"the device of rank {rank} had no room for a step ({reason}), so all ranks have given it up, "
            "and the state is that of the step before; use fewer micro-batches together (lockstep), or "
            "close what else takes memory there"
        )
        self.rank, self.reason = rank, reason


class DataError(MegatrainError):
    """Training data that cannot be read or used: names the file and the row."""

    exit_code = 4


class TornStateError(MegatrainError):
    """An operation has failed, and some parameters of the state have had an update that others have not."""

    exit_code = 6

    @classmethod
    def after(cls, first: BaseException, way_out: str) -> TornStateError:
        """Return the error that says what failed first and what to do; a user's error keeps its exit code."""
        if exhausted_memory(first) is not None:
            first = as_ours(first) or first
        is_ours = isinstance(first, MegatrainError)
        error = cls(f"{first if is_ours else f'{type(first).__name__}: {first}'}; {way_out}")
        if isinstance(first, MegatrainError):
            error.exit_code, error.is_told = first.exit_code, first.is_told
        return error


class WearError(MegatrainError):
    """A run that would use up the rated endurance of its drives: names the day, and the ways out."""

    exit_code = 9


class CallbackError(MegatrainError):
    """A callback of the run has raised; what was trained is saved."""


class HardwareError(MegatrainError):
    """The machine has changed or computed a value by itself: what was trained since cannot be trusted."""

    exit_code = 10

    def __init__(self, message: str, *, since: int) -> None:
        """Say it.

        Args:
            message: The fault, and the place where it was noticed.
            since: The first step whose checkpoint may have the wrong value; those of earlier steps do not.
        """
        super().__init__(message)
        self.since = since


class RankError(MegatrainError):
    """Another process of a run that has several has ended, or does not answer."""

    exit_code = 7


class HangError(MegatrainError):
    """A step, an evaluation or a save makes no progress any more: the device, a driver or a drive hangs."""

    exit_code = 8


class DivergedError(MegatrainError):
    """A run whose gradients stayed non-finite for too many steps in a row."""

    exit_code = 5


def is_text(given: str) -> bool:
    """Return whether a string can be written as UTF-8; Python hides bytes that cannot in its arguments."""
    try:
        given.encode()
    except UnicodeEncodeError:
        return False
    return True


@functools.cache
def warn_once(log: logging.Logger, text: str) -> None:
    """Log a warning, unless this process has logged the same one before."""
    log.warning("%s", text)


def one_of(names: Iterable[str]) -> str:
    """Return names as the end of a sentence that says which to use: `a, b or c`. There is at least one."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def os_error_of(error: BaseException) -> OSError | None:
    """Return the error of the operating system that is behind another one; None if there is none.

    safetensors and tokenizers raise classes of their own, with `(os error 28)` in the text, and torch a
    RuntimeError that ends with the system's words; transformers puts an error without a number before the one
    that it met.
    """
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.errno is not None:
            return behind
        found = _NUMBER.search(str(behind))
        if found is not None:
            number = int(found[1] or found[2])
            if os.strerror(number) in found.string:
                return OSError(number, os.strerror(number))
        behind = behind.__cause__ or (behind.__context__ if isinstance(behind, OSError) else None)
    return error if isinstance(error, OSError) else None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without torch's place in C++, or its class."""
    lines = _PLACE.sub("", str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def exhausted_memory(error: BaseException) -> str | None:
    """Return the memory that an error reports as used up, `host` or `device`; None for any other error.

    Python, numpy and torch each have an error of their own for it, and torch's for the host is a RuntimeError
    that has it in its text.
    """
    if isinstance(error, GivenUpError):  # of another process, perhaps
        return None
    text = str(error)
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__) or _ON_DEVICE.search(text):
        return "device"
    is_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if isinstance(error, MemoryError) or is_system or "DefaultCPUAllocator" in text:
        return "host"
    return None


def as_ours(error: BaseException) -> MegatrainError | None:
    """Return an error as one of ours, which is shown as its sentence; None if it was not foreseen.

    Where files could not be closed after an error of ours either, that error is returned.
    """
    if isinstance(error, MegatrainError):
        return error
    exhausted = exhausted_memory(error)
    if exhausted is not None:
        return CapacityError(f"{exhausted} memory ran out ({first_line(error)}); {_SMALLER}")
    refused = os_error_of(error)
    if refused is None:
        return None
    before = error.__context__
    while before is not None and not isinstance(before, MegatrainError):
        before = before.__context__
    return before or MegatrainError(os_sentence("use", refused.filename or "a file", refused))


def os_error_behind(error: BaseException, path: str | os.PathLike[str]) -> OSError | None:
    """Return the system's error behind one of a library that reads a directory; None if there is none.

    Some libraries report an unreadable file as missing, so the directory is looked at here.
    """
    found = os_error_of(error)
    if found is not None and found.errno not in (None, errno.ENOENT):
        return found
    try:
        os.stat(path)
    except FileNotFoundError:
        pass
    except OSError as refused:
        return refused
    return None


def is_full(error: BaseException) -> bool:
    """Return whether an error says that a disk is full, or that the user has all of it that is allowed.

    That of another process comes in its words alone.
    """
    found = os_error_of(error)
    if found is not None:
        return found.errno in (errno.ENOSPC, errno.EDQUOT)
    return any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))


def os_sentence(action: str, path: object, error: OSError) -> str:
    """Return the sentence about a failed action on a path, with the reason and the way out."""
    cause = error.strerror or " ".join(str(error).split()) or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        advice = "free some space there, or write to another directory"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = "give this user the right to it, or name another path"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        advice = "allow more open files (ulimit -n)"
    elif error.errno == errno.ELOOP:
        cause = "it is a symbolic link, and links are not followed here"
        advice = "put the file itself there"
    else:
        advice = "check this path and its disk, or name another path"
    return f"megatrain cannot {action} {path}: {cause}; {advice}"


@contextlib.contextmanager
def os_errors(action: str, path: object, kind: type[MegatrainError] = OutputError) -> Iterator[None]:
    """Turn an error of the operating system into one of ours: what cannot be done, why, and what to do."""
    try:
        yield
    except MegatrainError:
        raise
    except Exception as error:
        found = os_error_of(error)
        exhausted = exhausted_memory(found or error)
        if exhausted is not None:  # it says nothing of the path
            raise CapacityError(
                f"{exhausted} memory ran out, trying to {action} {path}; {_SMALLER}"
            ) from error
        if found is None:
            raise
        raise kind(os_sentence(action, path, found)) from error
