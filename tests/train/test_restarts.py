"""A run is started again after what another start may mend, and after nothing else."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from megatrain import cli
from megatrain.train.commands.restarts import oom_kills, run_again
from megatrain.train.loop import train
from megatrain.train.records.directory import RunDirectory
from megatrain.train.records.json_lines import read_rows
from tests.train.killed_once import killed_once
from tests.train.project import make_config
from tests.train.test_loop import assert_same_runs

KILL = "os.kill(os.getpid(), signal.SIGKILL)"
CRASH = "os.kill(os.getpid(), signal.SIGSEGV)"


class Starts:
    """The processes of a run: each takes some steps, and ends in its way."""

    def __init__(self, root: Path, *ends: tuple[int, str]) -> None:
        self.directory, self.ends, self.count = RunDirectory(root / "run"), ends, 0
        self.directory.path.mkdir()
        self.directory.config.write_text("{}")

    def command(self) -> Sequence[str]:
        step, end = self.ends[self.count]
        self.count += 1
        rows = "".join(json.dumps({"step": number}) + "\n" for number in range(1, step + 1))
        code = f"import os, pathlib, signal, sys, time; pathlib.Path({str(self.directory.metrics)!r})"
        return [sys.executable, "-c", f"{code}.write_text({rows!r}); {end}"]

    def run(self, restarts: int = 9, root: Path = Path("/")) -> int:
        return run_again(self.command, self.directory, restarts=restarts, root=root)


@pytest.mark.parametrize(
    ("ends", "code", "starts"),
    [
        ([(3, "sys.exit(0)")], 0, 1),
        ([(2, KILL), (5, CRASH), (6, "sys.exit(1)"), (7, "sys.exit(6)"), (9, "sys.exit(0)")], 0, 5),
        ([(3, "sys.exit(3)"), (4, "sys.exit(0)")], 0, 2),  # memory ran out in the fourth step
        ([(0, "sys.exit(3)")], 3, 1),  # it does not fit
        *([([(3, f"sys.exit({code})")], code, 1) for code in (2, 4, 5, 9, 75)]),
        ([(3, "sys.exit(7)"), (4, "sys.exit(0)")], 0, 2),  # a rank was lost
        ([(3, KILL), (3, KILL)], 137, 2),
        ([(3, KILL), (4, KILL), (3, CRASH)], 139, 3),
        ([(3, "sys.exit(1)")] * 2, 1, 2),
    ],
)
def test_what_another_start_may_mend_is_started_again(
    ends: list[tuple[int, str]], code: int, starts: int, tmp_path: Path
) -> None:
    run = Starts(tmp_path, *ends)
    assert (run.run(), run.count) == (code, starts)


def test_no_more_starts_than_are_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Starts(tmp_path, (1, CRASH), (2, CRASH), (3, CRASH))
    assert (run.run(restarts=2), run.count) == (139, 3)
    assert caplog.messages == [
        "the run was killed (SIGSEGV) after step 1; starting it again (2 starts left)",
        "the run was killed (SIGSEGV) after step 2; starting it again (1 start left)",
        "the run was killed (SIGSEGV) after step 3; --restarts allows no further start",
    ]
    rows = list(read_rows(run.directory.events))
    assert [(row["event"], row["step"], row["exit_code"]) for row in rows] == [
        ("error", step, 139) for step in (1, 2, 3)
    ]


def test_second_end_at_the_same_step_is_the_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Starts(tmp_path, (3, CRASH), (3, CRASH)).run() == 139
    assert caplog.messages[-1] == (
        "the run was killed (SIGSEGV), for the second time after step 3; it is not started a third time"
    )


def test_kill_for_lack_of_memory_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vmstat = tmp_path / "proc/vmstat"
    vmstat.parent.mkdir()
    vmstat.write_text("nr_free_pages 12\noom_kill 4\n")
    assert oom_kills(tmp_path) == 4
    grows = f"pathlib.Path({str(vmstat)!r}).write_text('oom_kill 5'); {KILL}"
    run = Starts(tmp_path, (2, grows), (3, KILL), (4, "sys.exit(0)"))
    assert run.run(root=tmp_path) == 0
    assert caplog.messages[0].startswith(
        "the run was killed (SIGKILL): memory ran out, says the kernel (have less planned, with "
        "memory.host_limit) after step 2"
    )
    assert "by somebody, or for lack of memory that the kernel does not tell of" in caplog.messages[1]
    assert oom_kills(tmp_path / "nowhere") is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_is_passed_on_once_and_ends_the_starts(number: signal.Signals, tmp_path: Path) -> None:
    """The process counts what it gets, and ends as a run that was saved does."""
    there = tmp_path / "there"
    waits = (
        "got = []; [signal.signal(each, lambda number, _: got.append(number)) for each in (1, 2, 15)]; "
        f"pathlib.Path({str(there)!r}).touch(); "
        "exec('while not got: time.sleep(0.01)'); time.sleep(0.3); sys.exit(75 if len(got) == 1 else 99)"
    )
    run = Starts(tmp_path, (1, waits), (2, "sys.exit(0)"))

    def send() -> None:
        while not there.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    assert (run.run(), run.count) == (75, 1)
    thread.join()


def test_options_that_do_not_go_with_it_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(make_config(tmp_path).model_dump(mode="json")))
    with pytest.raises(SystemExit) as end:
        cli.main(["train", str(file), "--restarts", "2", "--dry-run"])
    assert end.value.code == 2
    assert "--restarts starts a run again and does not go with --dry-run" in capsys.readouterr().err
    for ranks in ([], ["--ranks", "2"]):
        with pytest.raises(SystemExit):
            cli.main(["train", str(file), "--restarts=-1", *ranks])
        assert "--restarts is -1; give 0 or more" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        cli.main(["train", str(file), "--restarts", "2"])
    assert "torchrun has --max-restarts of its own" in capsys.readouterr().err


def test_killed_run_goes_on_by_itself_to_the_same_bits(tmp_path: Path) -> None:
    """Whole processes: one is killed when it has saved its fourth step, and the next one goes on.

    It may be in a later step by then: the fourth is saved behind those.
    """
    (tmp_path / "whole").mkdir()
    train(make_config(tmp_path / "whole", log={"report": False}, train={"steps": 8}))
    config = make_config(tmp_path, log={"report": False}, train={"steps": 8})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    added = killed_once(tmp_path, os.environ.get("PYTHONPATH", ""))
    added["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    ended = subprocess.run(
        [sys.executable, "-m", "megatrain", "train", str(tmp_path / "run.yaml"), "--restarts", "3"],
        env=os.environ | added,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert "the run was killed (SIGKILL)" in ended.stderr
    assert re.search(r"after step [4-8]; starting it again \(3 starts left\)", ended.stderr)
    assert_same_runs(tmp_path / "run", tmp_path / "whole/run")
