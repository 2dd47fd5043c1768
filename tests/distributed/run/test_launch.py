"""Who trains of the processes that are started, and what comes after ranks that have failed."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatrain.distributed import launch
from megatrain.distributed.launch import Ended, Places
from megatrain.errors import ConfigError
from tests.distributed.processes import exit_codes, run_ranks


@pytest.mark.parametrize(
    ("num_processes", "num_local", "shards", "places"),
    [
        (3, 3, None, (1, 2)),
        (6, 6, 8, (1, 4)),
        (8, 8, 4, (1, 4)),
        (24, 8, None, (2, 8)),
        (24, 8, 8, (1, 8)),
        (12, 3, 64, (4, 2)),
        (7, 7, 1, (1, 1)),
    ],
)
def test_as_many_train_as_share_out_the_runs(
    num_processes: int, num_local: int, shards: int | None, places: tuple[int, int]
) -> None:
    found = Places.of(num_processes, num_local, shards)
    assert (found.num_nodes, found.local_size) == places
    numbers = [found.rank(*divmod(number, num_local)) for number in range(num_processes)]
    assert [number for number in numbers if number is not None] == list(range(found.size))


def test_nodes_with_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="a node has 3 of 5 ranks"):
        Places.of(5, 3, None)


def test_ranks_that_are_not_needed_wait_for_the_end_and_say_so(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    assert exit_codes(tmp_path / "logs", 1, _start, port=port) == [0]
    said = (tmp_path / "logs/errors").read_text()  # torch says there that the store ends with the first rank
    assert said.count("2 of 3 ranks train, a power of two; the others wait for their end\n") == 1
    assert said.count("ranks train") == 1


def _start(ranks: Any, *, port: int) -> list[int]:
    from megatrain.distributed.launch import join

    children = []
    for rank in range(3):
        child = os.fork()
        if child == 0:
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}
            os.environ |= {name: str(value) for name, value in environment.items()}
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            code = 1
            try:
                joined = join(os.environ, 30, None, lambda line: print(line, flush=True))
                assert joined is not None
                with joined:
                    assert joined.gather_values(rank) == [0, 1]
                code = 40 + rank
            except SystemExit as error:
                code = 42 + int(str(error))
            except BaseException as error:
                print(type(error), error, flush=True)
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [40, 41, 42]
    return codes


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
    ("rank", "changed", "said"),
    [
        (
            0,
            {"LOCAL_RANK": None, "MASTER_PORT": None},
            "WORLD_SIZE is 2 in the environment, without LOCAL_RANK, MASTER_PORT; start",
        ),
        (0, {}, "rank 0 does not meet the others at localhost:"),
        (1, {}, "rank 1 does not meet the others at localhost:.* within 2 s"),
    ],
)
def test_processes_that_cannot_meet_end_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, rank: int, changed: dict[str, Any], said: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        if rank == 0:
            taken.listen()
        names: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        names |= {"MASTER_ADDR": "localhost", "MASTER_PORT": taken.getsockname()[1], **changed}
        for name, value in names.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(ConfigError, match=said):
            launch.join(os.environ, 2, None, print)


TRAPS = {
    "saves": "if [ $RANK = 0 ]; then trap 'touch done; exit 75' TERM; else trap '' TERM; fi",
    "loads": "",
    "hangs": "trap '' TERM",
}
"""What a rank does at the signal that the launcher sends."""


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
