"""The command line: what each command asks of the library, its exit codes, and how little it loads."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import typer

from megatrain.cli import main, read_settings
from megatrain.cli.commands import app
from megatrain.cli.help import _MEANT, MOST_USED, _instead_of
from megatrain.cli.importing import importing
from megatrain.config import config_keys
from megatrain.data.read.files import check_path
from megatrain.distributed.alone import ALONE
from megatrain.errors import CapacityError, ConfigError, DataError, DivergedError, MegatrainError, OutputError
from megatrain.train.caller import Caller

LOADS = "train: loading torch and transformers\n"
"""What a run says first."""


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """Stand-ins for the modules that the commands call; returns what they were called with."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no rates that `doctor --bench` has kept here
    monkeypatch.setattr("megatrain.data.read.files.check_path", lambda path: None)
    seen: list[tuple[Any, ...]] = []

    def stand_in(module: str, name: str, result: object = None) -> None:
        def function(*arguments: Any, **options: Any) -> object:
            seen.append((name, *arguments, options))
            return result

        fake = types.ModuleType(module)
        setattr(fake, name, function)
        monkeypatch.setitem(sys.modules, module, fake)

    stand_in("megatrain.train.loop", "train")
    stand_in("megatrain.train.commands.quickstart", "quickstart")
    stand_in("megatrain.train.outputs.sample", "sample", "Once upon a time")
    stand_in("megatrain.train.outputs.export", "export_run")
    return seen


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("megatrain.data.read.files.check_path", lambda path: None)
    fake = types.ModuleType("megatrain.train.loop")
    fake.train = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatrain.train.loop", fake)


@pytest.mark.parametrize(
    "arguments", [None, ["--help"], ["train", "--help"], ["doctor", "--help"], ["train", "--model", "m"]]
)
def test_import_help_and_usage_errors_load_nothing_heavy(arguments: list[str] | None) -> None:
    call = "import megatrain" if arguments is None else f"from megatrain.cli import main; main({arguments!r})"
    code = (
        "import sys\n"
        "try:\n"
        f"    {call}\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'transformers', 'numba', 'datasets', 'numpy', 'tensorboard'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    for command in ("quickstart", "train", "sample", "export", "trace", "doctor"):
        assert command in text
    assert run("--version") == 0
    assert capsys.readouterr().out == "megatrain 0.1.0\n"


def test_train_help_is_short_and_help_all_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--help") == 0
    lines = capsys.readouterr().out.split("\n")
    assert len(lines) <= 53
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in MOST_USED)
    assert run("train", "--help-all") == 0
    everything = capsys.readouterr().out.split("\n")
    assert everything[:20] == lines[:20]
    for key in config_keys().values():
        assert f"  {key.name} = {key.default}" in everything
    assert max(map(len, everything)) <= 110


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="pipes that keep writes apart are Linux's")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_the_sentence_of_an_error_is_written_in_one_piece(tmp_path: Path, unbuffered: str) -> None:
    """Ranks that end at the same moment write to the same place: their lines must not come apart."""
    read, write = os.pipe2(os.O_DIRECT)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "megatrain", "train", str(tmp_path / "absent.yaml")]
    done = subprocess.run(command, stdout=write, stderr=write, env=environment, check=False)
    os.close(write)
    pieces = iter(lambda: os.read(read, 1 << 16).decode(), "")
    said = [piece for piece in pieces if "error: " in piece]
    os.close(read)
    assert done.returncode == 2
    assert len(said) == 1
    assert "absent.yaml" in said[0]
    assert said[0].endswith("\n")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--learning_rate", "did you mean the setting optim.lr=VALUE (no dashes)?"),
        ("--learning-rate=1e-4", "did you mean the setting optim.lr=VALUE"),
        ("--num_train_epochs", "did you mean the setting train.epochs=VALUE"),
        ("--optim.weight_decay", "did you mean the setting optim.weight_decay=VALUE"),
        ("--report_to", "did you mean the setting log.to=VALUE"),
        ("--sequence-len", "did you mean --seq-len?"),
        ("--xyzzy", "--help lists the options"),
    ],
)
def test_an_option_that_there_is_not_is_a_setting(
    capsys: pytest.CaptureFixture[str], option: str, words: str
) -> None:
    for command in ("train", "plan"):
        assert run(command, "--model", "m", option, "3") == 2
        shown = capsys.readouterr().err
        assert f"No such option: {option.partition('=')[0]}; {words}" in " ".join(shown.split())


def require_caller(caller: Caller, cache: Path) -> None:
    """Compare a run's caller with the command line on a machine that has measured nothing."""
    folders = cache / "megatrain/counts", cache / "megatrain/data"
    assert (caller.counts, caller.prepared, caller.measure) == (*folders, None)


def test_train_from_flags(calls: list[tuple[Any, ...]], tmp_path: Path) -> None:
    files = ["--model", "m", "--data", "a.txt", "--data", "b.txt", "--out", "o"]
    numbers = ["--steps", "3", "--seq-len", "64", "--lr", "1e-3", "--precision", "bf16", "--device", "cpu"]
    assert run("train", *files, *numbers, "--resume", "no", "optim.weight_decay=0", "log.every=2") == 0
    ((name, config, options),) = calls
    require_caller(options.pop("caller"), tmp_path)
    assert (name, options) == ("train", {"resume": "no", "ranks": ALONE})
    assert (config.model.path, config.data.path, config.out) == ("m", ("a.txt", "b.txt"), "o")
    assert (config.train.steps, config.data.seq_len, config.optim.lr) == (3, 64, 1e-3)
    assert (config.train.precision, config.train.device, config.checkpoint.resume) == ("bf16", "cpu", "no")
    assert (config.optim.weight_decay, config.log.every) == (0.0, 2)


def test_train_from_a_file_with_overrides_and_flags(tmp_path: Path, calls: list[tuple[Any, ...]]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {path: d}\noptim: {lr: 1.0, eps: 1e-6}\n")
    assert run("train", str(path), "optim.lr=2.0", "--steps", "7") == 0
    ((_, config, options),) = calls
    require_caller(options.pop("caller"), tmp_path)
    assert (config.optim.lr, config.optim.eps, config.train.steps, options) == (
        2.0,
        1e-6,
        7,
        {"resume": "auto", "ranks": ALONE},
    )


def test_argument_with_an_equals_sign_is_an_override() -> None:
    config = read_settings(["model.path=m", "data.path=d"], {})
    assert (config.model.path, config.data.path) == ("m", ("d",))
    with pytest.raises(ConfigError, match=r"one CONFIG at a time, not a\.yaml and b\.yaml"):
        read_settings(["a.yaml", "b.yaml"], {})
    with pytest.raises(ConfigError, match=r"optim\.lr is set twice on the command line; keep one"):
        read_settings(["optim.lr=1"], {"optim.lr": 2.0})


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("finetune", "megatrain train?"),
        ("evaluate", "megatrain eval?"),
        ("merge", "megatrain export --merge?"),
        ("resume", "megatrain train, with the same arguments as before?"),
        ("trian", "'train'"),
    ],
)
def test_a_command_of_another_tool_is_known(
    words: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    assert f"No such command '{words}'. Did you mean" in (said := capsys.readouterr().err)
    assert meant in said


def test_what_a_command_is_meant_to_be_is_one() -> None:
    names = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert {meant.split()[0].rstrip(",") for meant in _MEANT.values()} <= names
    assert not names & set(_MEANT)
    assert (_instead_of("sft"), _instead_of("kto")) == ("train", "train ... train.loss=kto")


def test_sample_prints_the_text(calls: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sample", "runs/a", "--prompt", "Once", "--max-new-tokens", "5", "--temperature", "0.5") == 0
    assert calls == [("sample", "runs/a", "Once", {"max_new_tokens": 5, "temperature": 0.5, "chat": False})]
    assert capsys.readouterr().out == "Once upon a time\n"


def test_export_and_quickstart_are_called(calls: list[tuple[Any, ...]]) -> None:
    assert run("export", "runs/a", "out") == 0
    assert run("export", "runs/a", "out", "--max-shard-size", "2GiB") == 0
    assert run("export", "runs/a", "out", "--merge", "--format", "fp8") == 0
    assert run("quickstart", "--out", "q") == 0
    assert run("quickstart") == 0
    places = (Path("runs/a"), Path("out"))
    assert calls == [
        ("export_run", *places, {"merges": False, "max_shard_bytes": None, "quantised": None}),
        ("export_run", *places, {"merges": False, "max_shard_bytes": 2 << 30, "quantised": None}),
        ("export_run", *places, {"merges": True, "max_shard_bytes": None, "quantised": "fp8"}),
        ("quickstart", Path("q"), print, {}),
        ("quickstart", None, print, {}),
    ]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["trian"], "No such command 'trian'"),
        (["config"], "No such command 'config'. Did you mean: megatrain recipe?"),
        (["train", "--lr", "fast"], "--lr"),
        (["train", "--nonsense"], "--nonsense"),
        (["sample", "m"], "--prompt"),
        (["sample", "m", "--prompt", "x", "--temperature", "-1"], "--temperature"),
        (["export", "a"], "OUT"),
        (["trace", "nothing"], "error: there is no file and no recipe 'nothing'; bundled are 120b-h200, "),
        (["trace", "a", "--steps", "0"], "--steps"),
        (["train", "nothing.yaml"], "error: the configuration nothing.yaml cannot be read"),
        (["train", "my.txt"], "error: my.txt is no CONFIG, which is YAML; data is given as --data my.txt"),
        (
            ["train", "--model", "m"],
            "error: command line: data.path is required (--data, or data.path=",
        ),
        (["train", "--model", "m", "--data", "d", "--steps", "0"], "error: command line: train.steps is 0"),
        (
            ["train", "--model", "m", "--data", "\udcff.txt"],
            "error: '\\udcff.txt' is not UTF-8 text; rename the file, or write it otherwise",
        ),
        (["train", "--model", "m", "--data", "d", "train.stepz=3"], "did you mean train.steps?"),
        (["train", "--model", "m", "--data", "d", "--precision", "fp16"], "train.precision is 'fp16'"),
    ],
)
def test_bad_usage_exits_2_with_one_message(
    capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    assert run(*arguments) == 2
    shown = capsys.readouterr()
    assert part in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_data_that_is_not_there_is_said_before_torch_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "megatrain.train.loop", None)
    for path in ("gone.txt", "gone/*.jsonl"):
        assert run("train", "--model", "m", "--data", path, "--out", "o") == 4
        assert path in capsys.readouterr().err
    check_path("somebody/chats")  # may be on the hub


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MegatrainError("what"), 2),
        (ConfigError("what"), 2),
        (OutputError("what"), 2),
        (CapacityError("what"), 3),
        (DataError("what"), 4),
        (DivergedError("what"), 5),
    ],
)
def test_error_is_one_line_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: MegatrainError, code: int
) -> None:
    fail_with(monkeypatch, error)
    assert run("train", "--model", "m", "--data", "d") == code
    assert capsys.readouterr().err == f"{LOADS}error: what\n"
    assert run("--debug", "train", "--model", "m", "--data", "d") == code
    _, _, shown = capsys.readouterr().err.partition("\n")
    assert shown.startswith("Traceback")
    assert shown.endswith("error: what\n")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.EIO, os.strerror(errno.EIO), "/x/y"),
            "megatrain cannot use /x/y: Input/output error; check this path and its disk, or name another "
            "path",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/x"),
            "megatrain cannot use /x: Permission denied; give",
        ),
        (
            Exception("No space left on device (os error 28)"),
            "megatrain cannot use a file: No space left on device; free",
        ),
        (
            RuntimeError("unable to mmap 9 bytes from file </x>: Too many open files (24)"),
            "megatrain cannot use a file: Too many open files; allow more open files (ulimit -n)",
        ),
    ],
)
def test_error_of_the_system_is_one_line_from_wherever_it_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, message: str
) -> None:
    fail_with(monkeypatch, error)
    assert run("train", "--model", "m", "--data", "d") == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"{LOADS}error: {message}")
    assert shown.count("\n") == 2


def test_error_that_files_are_closed_behind_is_the_one_to_tell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    close = OSError(errno.EIO, "Input/output error")
    close.__context__ = OutputError("cannot write /x: Input/output error")
    fail_with(monkeypatch, close)
    assert run("train", "--model", "m", "--data", "d") == 2
    assert capsys.readouterr().err == f"{LOADS}error: cannot write /x: Input/output error\n"


def test_bug_met_while_a_file_was_missing_is_still_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("ours", "ours: (28)", "ours: No space left on device (27)"):
        bug = ValueError(text)
        bug.__context__ = FileNotFoundError(errno.ENOENT, "No such file or directory", "/x")
        fail_with(monkeypatch, bug)
        with pytest.raises(ValueError, match="ours"):
            main(["train", "--model", "m", "--data", "d"])


def test_interrupt_exits_130_and_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    assert run("train", "--model", "m", "--data", "d") == 130
    fail_with(monkeypatch, ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        main(["train", "--model", "m", "--data", "d"])
    fail_with(monkeypatch, SystemExit(75))
    assert run("train", "--model", "m", "--data", "d") == 75


def test_log_lines_go_to_whatever_standard_error_is_now(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import logging

    def train(*_: Any, **__: Any) -> None:
        logging.getLogger("megatrain.train.loop").info("step 1")

    monkeypatch.setattr("megatrain.data.read.files.check_path", lambda path: None)
    fake = types.ModuleType("megatrain.train.loop")
    fake.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatrain.train.loop", fake)
    for _ in range(2):
        assert run("train", "--model", "m", "--data", "d") == 0
        shown = capsys.readouterr()
        assert (shown.err, shown.out) == (f"{LOADS}step 1\n", "")


def test_plan_refuses_gpus_that_a_machine_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--model", "none", "--machine", "8xh100", "--gpus", "16") == ConfigError.exit_code
    assert "error: --gpus is 16, but 8xh100 has 8" in capsys.readouterr().err


def test_plan_takes_gpus_and_nodes_and_a_table_takes_every_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[int, int]] = []

    def taken(raw: Any, spec: Any, **_: Any) -> None:
        asked.append((spec.num_gpus, spec.num_nodes))
        raise ConfigError("taken")

    monkeypatch.setattr("megatrain.train.planning.plan_run.plan_run", taken)
    monkeypatch.setattr("megatrain.train.planning.scale.plan_scale", taken)
    for more in ((), ("--gpus", "2", "--nodes", "4"), ("--gpus", "4", "--scale")):
        run("plan", "--model", "none", "--machine", "8xh100", *more)
    assert asked == [(8, 1), (2, 4), (4, 1)]
    capsys.readouterr()


def test_garbage_is_not_looked_for_while_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    with importing():  # torch is here already
        assert gc.isenabled()
    before = gc.get_freeze_count()
    monkeypatch.delitem(sys.modules, "torch")
    try:
        with importing():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > before + 10_000
    finally:
        gc.unfreeze()
