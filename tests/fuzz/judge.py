"""Gives many odd inputs to a reader, and says which of them end otherwise than in a sentence.

A reader may return, or raise a `MegatrainError`. It may not raise anything else, take more than five seconds
of the processor or a GiB of memory, open a file outside of the roots, connect to anything, or start a
process. What Python does is seen by an audit hook; code in Rust and C++ opens files unseen, so tests put a
file there which must not be read. Every input follows from its seed, which a failure names.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, NoReturn

import pytest

from megatrain.errors import MegatrainError

LONGEST_S = 5.0
"""The longest time of the processor for one input."""
MOST_BYTES = 2**30
"""The most memory that inputs may take beside what the process had, libraries that are loaded included."""
_LONGEST_SENTENCE = 50_000
_REPORTED = 5
_OWN = Path(__file__).parents[2]
_FACTS = ("/proc", "/sys", "/usr/share/zoneinfo")
_CODE = tuple(
    os.path.realpath(path) + os.sep
    for path in {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, str(_OWN), *_FACTS}
)
"""The places of code and of the machine's facts, which any reader may look at."""
_FORBIDDEN = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "socket.connect",
    "pickle.find_class",
)
_CHANGES = ("open", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate")


class Hang(BaseException):
    """An input that takes too long."""


def counts(sample: int, soak: int) -> Any:
    """Parametrise a test by its number of inputs: a sample for every run, and all for `make soak`.

    The number of the latter is multiplied by the environment's MEGATRAIN_FUZZ, such as 0.1 or 10.
    """
    times = float(os.environ.get("MEGATRAIN_FUZZ", "1"))
    every = pytest.param(int(soak * times), marks=[pytest.mark.soak, pytest.mark.timeout(0)], id="all")
    return pytest.mark.parametrize("num", [pytest.param(sample, id="sample"), every])


def attack(num: int, one: Callable[[Random], object], *roots: Path) -> int:
    """Run `one` with the random numbers of each of `num` seeds; return how many of them were refused.

    Args:
        num: The number of inputs.
        one: Makes an input from random numbers, and reads it.
        roots: The directories in which files may be opened.

    Raises:
        Failed: An input had another end than it may have; of each place in code one is shown, with its seed.
    """
    __tracebackhide__ = True
    bad: dict[str, str] = {}
    num_refused = 0
    before_bytes = _most_bytes()
    first = int(os.environ.get("MEGATRAIN_FUZZ_SEED", "0"))
    with _watched(roots) as seen, _ends_hangs():
        for seed in range(first, first + num):
            random, began_s = Random(seed), time.process_time()
            faults = []
            try:
                signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
                one(random)
            except MegatrainError as refused:
                num_refused += 1
                said = str(refused)
                if not said or "Traceback" in said or len(said) > _LONGEST_SENTENCE:
                    faults.append(f"this is no sentence: {said[:300]!r} ({len(said)} characters)")
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                bad.setdefault(f"{type(error)} {place.filename}:{place.lineno}", _told(seed, error))
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            took_s = time.process_time() - began_s
            if (taken := _most_bytes() - before_bytes) > MOST_BYTES:
                faults.append(f"{taken >> 20:,} MiB of memory were taken")
                before_bytes += taken
            if took_s > LONGEST_S:
                faults.append(f"it took {took_s:.1f} s")
            for fault in [*faults, *seen]:
                bad.setdefault(fault, f"seed {seed}: {fault}")
            seen.clear()
            if len(bad) >= _REPORTED:
                break
    if bad:
        pytest.fail(
            "\n".join([f"of {seed - first + 1} inputs some ended badly:", *bad.values()]), pytrace=False
        )
    return num_refused


def _most_bytes() -> int:
    """Return the most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _told(seed: int, error: BaseException) -> str:
    return f"seed {seed}: " + "".join(traceback.format_exception(error, limit=-4, chain=False))


_active: list[tuple[tuple[str, ...], list[str]]] = []
"""The roots and the list of what was seen, while inputs are read."""
_is_hooked = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _active:
        return
    roots, seen = _active[-1]
    if event in _FORBIDDEN:
        seen.append(f"{event} {args[:2]}"[:300])
    elif event in _CHANGES and isinstance(args[0], (str, bytes, os.PathLike)):
        path = os.path.realpath(os.fsdecode(args[0]))
        if not path.startswith(roots) and path != os.devnull:
            seen.append(f"{event} {path} outside of {roots[0]}")


@contextmanager
def _watched(roots: tuple[Path, ...]) -> Iterator[list[str]]:
    global _is_hooked
    if not _is_hooked:
        sys.addaudithook(_hook)  # it stays as long as the process
        _is_hooked = True
    seen: list[str] = []
    _active.append(((*(os.path.realpath(root) + os.sep for root in roots), *_CODE), seen))
    try:
        yield seen
    finally:
        _active.pop()


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise Hang(f"more than {LONGEST_S:g} s of the processor")


@contextmanager
def _ends_hangs() -> Iterator[None]:
    before = signal.signal(signal.SIGPROF, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGPROF, before)
