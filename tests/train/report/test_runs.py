"""Tables of runs, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.cli import main
from megatrain.train.report.collect import read_run
from megatrain.train.report.runs import different_settings, losses_at_equal_tokens
from megatrain.train.report.texts import model_name
from tests.train.report.run_files import write_run


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["runs", *words])
    assert (ended.value.code or 0) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_list_finds_runs_two_levels_down_and_says_how_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = [("evaluation", step, {"name": "val", "loss": 9.0 - step}) for step in (5, 6, 7)]
    write_run(tmp_path / "runs/a", events=[("start", 0, {"steps": 40}), *best, ("end", 20, {})])
    write_run(tmp_path / "runs/b/c", num_rows=3)
    write_run(tmp_path / "runs/b/c/hidden")  # inside of a run: none of the user's
    lines = shown(capsys, "ls", str(tmp_path / "runs")).splitlines()
    assert lines[0].split() == ["run", "state", "step", "loss", "eval", "tokens/s", "model", "written"]
    assert lines[1].split()[1:7] == ["done", "20/40", "2.4500", "2.0000", "2,048", "some/model"]
    assert lines[2].split()[:6] == [str(tmp_path / "runs/b/c"), "killed", "3/100", "3.8000", "-", "2,048"]
    assert len(lines) == 3
    (first, _) = json.loads(shown(capsys, "ls", "--json", str(tmp_path / "runs")))
    assert (first["best_eval"], first["tokens_per_s"], first["steps"]) == (2.0, 2048.0, 40)


def test_a_damaged_run_keeps_no_other_from_the_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path / "runs/a")
    for number, content in enumerate((b"\xff\xfe", b"model: [\n")):
        (write_run(tmp_path / f"runs/b{number}") / "config.yaml").write_bytes(content)
    (write_run(tmp_path / "runs/c") / "config.yaml").write_text("model:\ntrain: 5\nout: c\n")
    with caplog.at_level("WARNING", logger="megatrain"):
        lines = shown(capsys, "ls", str(tmp_path / "runs")).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [str(tmp_path / "runs" / name) for name in "ac"]
    left_out = [record.getMessage() for record in caplog.records if "is left out" in record.getMessage()]
    assert len(left_out) == 2
    text = shown(capsys, "show", str(tmp_path / "runs/b0"), code=2)
    assert (
        text
        == f"error: {tmp_path}/runs/b0/config.yaml is not UTF-8 text; it is no file of a run, or damaged\n"
    )


def test_show_says_plan_and_fact_and_the_last_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, "show", str(write_run(tmp_path / "a", events=[("error", 20, {"text": "no space"})])))
    lines = [line.split() for line in text.splitlines()]
    assert ["state", "failed"] in lines
    assert ["tokens/s", "2,048", "2,048"] in lines
    assert text.rstrip().endswith("error at step 20: no space")


def test_compare_shows_settings_that_differ_and_losses_at_equal_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write_run(tmp_path / "a", num_rows=20, loss=float)
    b = write_run(tmp_path / "b", num_rows=40, lr="1e-3", loss=lambda step: 100.0 + step)
    runs = [read_run(a), read_run(b)]
    assert different_settings(runs) == {"optim.lr": [1e-4, 1e-3]}
    # 20 steps of 1,024 tokens are equal; each place is a window of 1,024 tokens, one step
    assert losses_at_equal_tokens(runs) == {
        2048: [2.0, 102.0],
        5120: [5.0, 105.0],
        10240: [10.0, 110.0],
        15360: [15.0, 115.0],
        20480: [20.0, 120.0],
    }
    lines = [line.split() for line in shown(capsys, "compare", str(a), str(b)).splitlines()]
    assert ["optim.lr", "0.0001", "0.001"] in lines
    assert ["20,480", "20.0000", "120.0000"] in lines
    assert ["tokens/s", "2,048", "2,048"] in lines


def test_losses_are_averaged_where_steps_are_small(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", num_rows=100, loss=float))
    losses = losses_at_equal_tokens([run, run])
    assert losses[102400] == [98.0, 98.0]  # of steps 96 to 100


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["ls", "nowhere"], "nowhere holds no run"),
        (["show", "nowhere"], "nowhere is not a run directory"),
        (["compare", "a"], "a is one run; give two or more to compare"),
    ],
)
def test_wrong_places_are_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    part: str,
) -> None:
    write_run(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    text = shown(capsys, *words, code=2)
    assert text.startswith("error: ")
    assert part in text
    assert text.count("\n") == 1


def test_models_are_called_by_what_tells_them_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    assert model_name("Qwen/Qwen3-8B") == ("Qwen/Qwen3-8B", True)
    assert model_name("gpt2") == ("gpt2", True)
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    for place in ("models/gone", "a model", "org/name/main", "org/", "-x"):  # none may be asked of the hub
        assert not model_name(place)[1], place
    cached = "/home/alice/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/0123abc"
    assert model_name(cached) == ("Qwen/Qwen3-8B", True)
    for place in ("my-model", "my-model/hf", "my-model/checkpoints/step-00000100"):
        assert model_name(str(tmp_path / place)) == ("my-model", False)
    assert model_name("/home/alice/hf") == ("hf", False)  # a model card goes out to others
