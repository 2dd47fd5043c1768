"""Plays runs in forks of this process, which has imported all that takes seconds."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.training.random_search.run import Differs, NoModel, Refused, RefusedLate, play
from benchmarks.training.random_search.settings import Settings, draw


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a run."""

    kind: str
    what: str = ""
    """In words, where it is not equal."""
    counts: dict[str, int] = field(default_factory=dict)
    """Of its events."""
    cpu_s: float = 0.0


def each_played(seeds: Sequence[int], jobs: int, limit_s: float) -> Iterator[tuple[int, Outcome]]:
    """Play the runs of seeds, so many at a time, and yield what comes of each, in order."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(seeds, pool.map(lambda seed: played(draw(seed), limit_s), seeds), strict=True)


def played(settings: Settings, limit_s: float) -> Outcome:
    """Play a run in a fork."""
    with tempfile.TemporaryDirectory(prefix="random-search-") as directory:
        place = Path(directory)
        child = os.fork()
        if child == 0:
            _play_in_child(settings, place)
        stop = time.monotonic() + limit_s
        while True:
            ended, status, used = os.wait4(child, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > stop:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return Outcome(kind="hung", what=f"after {limit_s:g} s", cpu_s=limit_s)
            time.sleep(0.02)
        cpu_s = used.ru_utime + used.ru_stime
        answer = place / "outcome.json"
        if not answer.exists():
            return Outcome(kind="failed", what=f"the process ended with status {status}", cpu_s=cpu_s)
        found: dict[str, Any] = json.loads(answer.read_text())
    return Outcome(**{**found, "cpu_s": cpu_s})


def _play_in_child(settings: Settings, place: Path) -> None:
    """Play a run, leave its outcome in a file, and end."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    outcome = _outcome(settings, place)
    (place / "outcome.json").write_text(json.dumps(asdict(outcome)))
    os._exit(0)


def _outcome(settings: Settings, place: Path) -> Outcome:
    try:
        return Outcome(kind="equal", counts=dict(play(settings, place)))
    except NoModel as error:
        return Outcome(kind="no model", what=str(error))
    except Refused as error:
        return Outcome(kind="refused", what=str(error))
    except RefusedLate as error:
        return Outcome(kind="refused late", what=str(error))
    except Differs as error:
        return Outcome(kind="differs", what=str(error))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(frame.filename).name}:{frame.lineno}"
        return Outcome(kind="failed", what=f"{type(error).__name__} at {at}: {error}")
