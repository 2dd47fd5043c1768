"""Ranks that are stopped, hang or end are named, and the others end. What ranks run here imports little."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore

from megatrain.distributed.ranks import Ranks
from megatrain.distributed.watch import Watch
from megatrain.errors import ConfigError, RankError
from megatrain.train.records.json_lines import read_rows
from tests.distributed.processes import exit_codes
from tests.forks import run_script


def fail(ranks: Any, *, rank: int, how: str) -> None:
    """Meet twice, between which a rank fails; the others get the SIGTERM of a launcher then, and know why."""
    ranks.watch.doing("at step 3")
    ranks.meet("norm")
    time.sleep(1)  # each has beaten since
    if ranks.rank == rank:
        if how == "error":
            raise ConfigError("there is no such thing")
        if how == "memory":
            torch.empty(1 << 60, dtype=torch.uint8)
        if how == "hang":
            threading.Event().wait()
        if how == "silence":
            ranks.watch.__dict__["_store"] = Silent()
            threading.Event().wait()
        os.kill(os.getpid(), signal.Signals[how])
    try:
        ranks.meet("norm")
    except RankError:
        os.kill(os.getpid(), signal.SIGTERM)
        raise


class Silent:
    """A store whose machine is lost: what is asked of it is never answered."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: threading.Event().wait()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("size", "rank", "how", "code", "said"),
    [
        (2, 1, "SIGSTOP", -9, "is stopped or lost: it has been silent for "),
        (2, 0, "SIGSTOP", -9, "is stopped or lost: it has been silent for "),
        (2, 1, "silence", 7, "is stopped or lost: it has been silent for "),
        (2, 1, "hang", 7, "hangs: rank 0 waits for it in the norm of the gradient since "),
        (4, 1, "SIGKILL", -9, "has ended; it was last at step 3"),
        (2, 0, "error", 2, "rank 0: there is no such thing"),
        (2, 0, "memory", 3, "rank 0: host memory ran out (DefaultCPUAllocator: can't allocate memory: "),
    ],
    ids=str,
)
def test_a_rank_that_fails_is_named_once_and_the_others_end(
    tmp_path: Path, size: int, rank: int, how: str, code: int, said: str
) -> None:
    nodes = 2 if how == "silence" else 1  # of each one rank says what all of them find
    codes = exit_codes(tmp_path / "logs", size, fail, num_nodes=nodes, timeout_s=3, rank=rank, how=how)
    assert codes.pop(rank) == code
    assert codes == [RankError.exit_code] * (size - 1)
    text = (tmp_path / "logs/errors").read_text()
    says = how in ("error", "memory")  # by itself
    assert text.count(f"rank {rank} (process ") == (not says), text
    assert text.count(said) == 1
    assert ("last at step 3" in text) == (not says)
    assert ("(parallel.timeout is 3)" in text) == (how in ("SIGSTOP", "hang", "silence"))
    own = "has not answered for 3 s (parallel.timeout is 3): its machine, or the network to it, is lost. The"
    assert text.count(f"error: the store where ranks meet {own} same command") == (how == "silence")


def test_a_first_rank_at_work_ends_too_and_leaves_its_last_words(tmp_path: Path) -> None:
    codes = exit_codes(tmp_path / "logs", 2, _work, timeout_s=3, words=str(tmp_path / "words"))
    assert codes == [RankError.exit_code, -9]
    said = (tmp_path / "words").read_text()
    assert "rank 1 (process " in said
    assert "was last evaluating step 7. The same command goes on" in said
    assert f"error: {said}" in (tmp_path / "logs/errors").read_text()


def _work(ranks: Any, *, words: str, how: str = "SIGSTOP") -> None:
    def write(text: str) -> None:
        Path(words).write_text(text)
        threading.Event().wait()  # the directory was on a drive of the machine that is lost

    ranks.watch.doing("evaluating step 7")
    ranks.watch.last_words = write
    ranks.meet()
    time.sleep(1)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.Signals[how])
    threading.Event().wait()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("how", "codes"), [("hangs", [7, 7]), ("is slow", [0, 0])])
def test_a_save_may_take_any_time_as_long_as_something_moves(
    tmp_path: Path, how: str, codes: list[int]
) -> None:
    """Also where others wait for its next block, as those of another node do."""
    assert exit_codes(tmp_path / "logs", 2, _save, timeout_s=3, how=how) == codes
    text = (tmp_path / "logs/errors").read_text()
    assert text.count("rank 0 (process ") == (how == "hangs")
    if how == "hangs":
        assert "hangs: nothing has moved for " in text
        assert "(parallel.timeout is 3), and it was last saving step 4. The same command" in text


def _save(ranks: Any, *, how: str) -> None:
    threading.Thread(target=_look_around, daemon=True).start()
    ranks.meet("spread")
    if ranks.rank == 0:
        with ranks.watch.moving("saving step 4"):
            for _ in range(25):
                time.sleep(0.2)  # a write to a slow disk
            if how == "hangs":
                threading.Event().wait()
    ranks.meet("spread")


def _look_around() -> None:
    """Do what threads of Gloo do, of which a run has about ten."""
    while True:
        time.sleep(0.005)


def test_a_rank_that_is_killed_while_the_first_one_works_is_found_at_once(tmp_path: Path) -> None:
    """Long before it has been silent for the timeout."""
    codes = exit_codes(tmp_path / "logs", 2, _work_alone, timeout_s=600, words=str(tmp_path / "words"))
    assert codes == [RankError.exit_code, -9]
    assert "has ended; it was last evaluating step 7. The same" in (tmp_path / "words").read_text()


def _work_alone(ranks: Any, *, words: str) -> None:
    _work(ranks, words=words, how="SIGKILL")


def test_waiting_for_an_order_is_no_hang(tmp_path: Path) -> None:
    assert exit_codes(tmp_path / "logs", 2, _wait_for_an_order, timeout_s=1) == [0, 0]


def _wait_for_an_order(ranks: Any) -> None:
    if ranks.rank == 0:
        time.sleep(3)
    assert ranks.tell("go" if ranks.rank == 0 else None) == "go"


def test_a_rank_that_has_done_its_part_is_not_lost(tmp_path: Path) -> None:
    """Whoever is at work yet, such as the first one at an export, outlives its silence."""
    assert exit_codes(tmp_path / "logs", 2, _work_on, timeout_s=1) == [0, 0]


def _work_on(ranks: Any) -> None:
    if ranks.rank == 1:
        ranks.watch.close()
    time.sleep(3)


@contextmanager
def two_watches(late_s: float = 0.0) -> Iterator[list[Watch]]:
    """Lend the watches of two ranks of this process, of which the second is made so much later."""
    store = HashStore()
    watches = [Watch(store, 0, 2, _TIMEOUT_S)]
    first = threading.Thread(target=watches[0].begin)
    first.start()
    time.sleep(late_s)
    assert first.is_alive()
    watches.append(Watch(store, 1, 2, _TIMEOUT_S))
    watches[1].begin()
    first.join()
    try:
        yield watches
    finally:
        for watch in watches:
            watch.close()


_TIMEOUT_S = 1.0


def test_a_step_that_a_rank_gives_up_is_known_to_the_others_as_long_as_they_are_at_it() -> None:
    with two_watches() as (first, second):
        for watch in (first, second):
            watch.begin_step()
        assert not second.has_given_up
        first.give_up()
        assert first.has_given_up
        until = time.monotonic() + 60
        while not second.has_given_up and time.monotonic() < until:
            time.sleep(0.01)
        assert second.has_given_up
        second.end_step()  # an evaluation may follow
        assert not second.has_given_up
        second.begin_step()
        assert not second.has_given_up


def wait_for(watch: Watch, seconds: float) -> None:
    """Wait in a meeting to which nobody comes."""
    with watch.waiting("caller"):
        look_for(watch, seconds)


def look_for(watch: Watch, seconds: float) -> None:
    """Look so long whether a rank is missing."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        watch.look()
        time.sleep(0.02)


def test_a_rank_that_prepares_keeps_others_waiting_and_one_in_a_step_does_not() -> None:
    """As one that plans while others want to make shared memory; after a step a script may prepare again."""
    with two_watches() as (first, second):
        wait_for(first, 2.5 * _TIMEOUT_S)
        second.doing("between two trainings", prepares=True)
        with second.moving("evaluating step 4"):
            pass
        wait_for(first, 2.5 * _TIMEOUT_S)
        second.doing("at step 5")
        with pytest.raises(RankError, match=r"rank 1 .* hangs: .* meeting of all ranks .* last at step 5"):
            wait_for(first, 8 * _TIMEOUT_S)


def test_a_rank_may_come_as_late_as_it_likes() -> None:
    """As one whose script tokenises before it makes a trainer."""
    with two_watches(late_s=2.5 * _TIMEOUT_S) as watches:
        for watch in watches:
            watch.look()


def test_a_rank_that_falls_silent_while_it_prepares_is_named() -> None:
    with two_watches() as (first, second):
        second.doing("reading")
        second.doing("planning", prepares=True)
        time.sleep(_TIMEOUT_S / 2)  # it has beaten since
        second.__dict__["_beat"] = lambda: None
        with pytest.raises(RankError, match=r"rank 1 .* silent for .* was last planning"):
            wait_for(first, 8 * _TIMEOUT_S)


def test_a_stop_of_all_ranks_is_none_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a laptop that sleeps, or a job that a scheduler suspends: the clock goes on, unseen."""
    monotonic, stopped_s = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + stopped_s[0])
    with two_watches() as (first, second):
        second.doing("at step 5")
        until_s = monotonic() + 0.8 * _TIMEOUT_S
        with first.waiting("caller"):
            while monotonic() < until_s:
                if not stopped_s[0] and monotonic() > until_s - 0.6 * _TIMEOUT_S:
                    stopped_s[0] = 1000.0
                first.look()
                time.sleep(0.02)
        with second.waiting("caller"):
            pass
        first.look()


def test_what_all_have_come_to_and_does_not_end_is_named() -> None:
    """As where the network between them is cut, but not the one to the store."""
    with two_watches() as watches, ThreadPoolExecutor() as threads:
        for watch in watches:
            watch.doing("at step 5")
        waits = [threads.submit(wait_for, watch, 12 * _TIMEOUT_S) for watch in watches]
        said = r"^a meeting of all ranks does not end on rank \d, and all ranks have come to it since \d"
        for wait in waits:
            with pytest.raises(RankError, match=said):
                wait.result()


def test_a_rank_that_does_not_come_to_where_a_device_waits_is_named() -> None:
    """The thread that has launched it goes on."""
    with two_watches() as (first, second):
        second.doing("at step 5")
        for lane, is_done in (("norm", True), ("gather", False)):
            with first.waiting(lane):
                pass
            first.launched(lane, lambda is_done=is_done: is_done)  # type: ignore[misc]
        with pytest.raises(RankError, match=r"rank 1 .* hangs: rank 0 waits for it in weights that ranks ga"):
            look_for(first, 12 * _TIMEOUT_S)


_ENDS = """
import sys
from tests.distributed.run.test_watch import end_by_itself
end_by_itself(sys.argv[1])
"""


def test_python_ends_though_a_group_still_waits_for_a_lost_rank(tmp_path: Path) -> None:
    """The thread of a group of Gloo waits for ever, and a group that is destroyed waits for its thread."""
    done = run_script(_ENDS, tmp_path / "store", after="tests.distributed.runs")
    assert (done.returncode, done.stdout) == (RankError.exit_code, "True\n"), done.stderr


def end_by_itself(store: str) -> None:
    """Be rank 0, which ends as Python ends, while rank 1 does not come any more."""
    first = os.getpid()
    rank = 0 if os.fork() else 1
    meeting = FileStore(store, 2)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=2)
    ranks = Ranks(meeting, 60.0)
    if rank == 1:
        while os.getppid() == first:
            time.sleep(0.05)
        os._exit(0)
    dist.all_gather([torch.zeros(1)] * 2, torch.zeros(1), async_op=True)
    time.sleep(0.5)  # its thread has begun
    atexit.register(os.kill, first, signal.SIGTERM)  # of a launcher
    with suppress(RankError), ranks:
        ranks.watch._lose("rank 1 is lost", is_first=True)
        ranks.watch.look()
    print(ranks.watch.is_lost, flush=True)
    sys.exit(RankError.exit_code)


@pytest.mark.parity
def test_a_run_with_a_stopped_rank_records_it(tmp_path: Path) -> None:
    from tests.distributed.runs import train_run

    place: dict[str, Any] = {"root": str(tmp_path), "out": "run"}
    codes = exit_codes(tmp_path / "logs", 2, train_run, timeout_s=20, killed=[1, 60], how="SIGSTOP", **place)
    assert codes == [RankError.exit_code, -9]
    error = list(read_rows(tmp_path / "run/events.jsonl"))[-1]
    assert (error["event"], error["exit_code"]) == ("error", RankError.exit_code)
    assert "is stopped or lost: it has been silent for 20 s" in error["text"]
