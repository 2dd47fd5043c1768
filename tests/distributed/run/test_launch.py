"""What comes after ranks that have failed, and after a signal to their launcher."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatrain.distributed import launch
from megatrain.distributed.launch import Ended
from megatrain.train.commands.restarts import Restarts
from megatrain.train.records.directory import RunDirectory
from tests.distributed.processes import run_ranks


@pytest.mark.parametrize(
    ("codes", "code", "sizes"),
    [
        ([{1: -9}, {}], 0, [4, 2]),
        ([{0: 7, 1: -9, 2: 6}, {0: 7}, {}], 0, [4, 2, 1]),
        ([{2: 7, 0: 7, 3: 7}, {}], 0, [4, 2]),
        ([{0: 3, 1: 7}], 3, [4]),
        ([{0: 6}], 6, [4]),
        ([{0: 2, 1: -9}], 2, [4]),
        ([{1: -9}, {1: -15}, {0: -9}], 137, [4, 2, 1]),
    ],
    ids=str,
)
def test_fewer_go_on_after_ranks_that_were_lost_and_no_others(
    monkeypatch: pytest.MonkeyPatch, codes: list[dict[int, int]], code: int, sizes: list[int]
) -> None:
    begun: list[tuple[int, list[str]]] = []
    told: list[int] = []

    def ended(num_ranks: int, arguments: list[str], stop: object) -> Ended:
        begun.append((num_ranks, arguments))
        return Ended(codes[len(begun) - 1], {})

    monkeypatch.setattr(launch, "_launch", ended)
    found = launch.run_ranks(
        4, ["first"], again=lambda: ["again"], tell=lambda ended, left: told.append(left)
    )
    assert found == code
    assert begun == list(zip(sizes, [["first"], *[["again"]] * 9], strict=False))
    assert told == [*sizes[1:], *[0] * (code != 0)]


@pytest.mark.parametrize(
    ("codes", "code", "sizes"),
    [
        ([{1: -9}, {0: 7, 1: -11}, {}], 0, [4, 4, 4]),
        ([{0: 7, 1: 7}, {}], 0, [4, 4]),  # one hung
        ([{0: 1, 1: 7}, {}], 0, [4, 4]),  # what nobody foresaw
        ([{0: 4, 1: 7}], 4, [4]),  # bad data comes again
        ([{1: -9}] * 3 + [{}], 0, [4, 4, 4, 2]),  # no start is left: fewer go on
    ],
    ids=str,
)
def test_all_start_again_as_long_as_restarts_allow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, codes: list[dict[int, int]], code: int, sizes: list[int]
) -> None:
    begun: list[int] = []
    directory = RunDirectory(tmp_path)
    policy = Restarts(directory, 2)

    def ended(num_ranks: int, arguments: list[str], stop: object) -> Ended:
        begun.append(num_ranks)
        directory.metrics.write_text(f'{{"step": {len(begun)}}}\n')
        return Ended(codes[len(begun) - 1], {})

    monkeypatch.setattr(launch, "_launch", ended)
    found = launch.run_ranks(
        4, ["first"], again=lambda: ["again"], tell=lambda *_: None, restarts=policy.wants
    )
    assert (found, begun) == (code, sizes)


TRAPS = {
    "saves": "if [ $RANK = 0 ]; then trap 'touch done; exit 75' TERM; else trap '' TERM; fi",
    "loads": "",
    "hangs": "trap '' TERM",
}
"""What a rank does at the signal that the launcher sends."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("way", "signals", "code", "codes"),
    [
        ("saves", [signal.SIGINT], 75, {"0": 75}),
        ("saves", [signal.SIGHUP, signal.SIGHUP], 75, {"0": 75}),
        ("loads", [signal.SIGTERM], 143, {"0": -15, "1": -15}),
        ("hangs", [signal.SIGINT, signal.SIGINT], 130, {"0": -9, "1": -9}),
    ],
    ids=str,
)
def test_a_signal_to_the_launcher_ends_its_ranks_and_starts_no_others(
    tmp_path: Path, way: str, signals: list[int], code: int, codes: dict[str, int]
) -> None:
    sent: dict[str, Any] = {"root": str(tmp_path), "trap": TRAPS[way], "signals": [*map(int, signals)]}
    (told,) = run_ranks(tmp_path / "logs", 1, _launch_and_signal, **sent)
    assert told == {"code": code, "ended": [[codes, int(signals[-1]), 0]]}


def _launch_and_signal(ranks: Any, *, root: str, trap: str, signals: list[int]) -> dict[str, Any]:
    rank = Path(root, "rank")
    wait = "touch is$RANK; while [ ! -e done ]; do sleep 0.05; done"
    rank.write_text(f"#!/bin/sh\ncd {root}\n{trap}\n{wait}\n")
    rank.chmod(0o700)
    sys.executable = str(rank)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have it ignored

    def send() -> None:
        while not all(Path(root, f"is{number}").exists() for number in range(2)):
            time.sleep(0.01)
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(1.0)

    threading.Thread(target=send, daemon=True).start()
    ended: list[tuple[dict[int, int], int | None, int]] = []
    code = launch.run_ranks(
        2, [], again=list, tell=lambda found, left: ended.append((found.codes, found.signal, left))
    )
    return {"code": code, "ended": ended}
