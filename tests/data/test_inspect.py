"""`megatrain data inspect`: what it counts, what it shows, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.data.tokenizer import train_tokenizer

CHAT = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a directory with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["hello"], 257).save_pretrained(folder)
    return f"data.tokenizer={folder}"


def write(folder: Path, *rows: object, name: str = "a.jsonl") -> str:
    path = folder / name
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def inspect(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["data", "inspect", *arguments])
    assert (ended.value.code or 0) == code
    captured = capsys.readouterr()
    return captured.err if code and not captured.out else captured.out


def test_what_is_trained_on_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer: str
) -> None:
    path = write(tmp_path, CHAT, '{"messages"\n', CHAT)
    arguments = ("--data", path, tokenizer, "data.chat_template=plain")
    text = inspect(capsys, *arguments)
    lines = text.splitlines()
    assert lines[0] == f"{path}: messages; 3 rows read, 2 examples kept, 1 dropped"
    assert lines[1] == f"  dropped: it is not valid JSON: 1 ({path}:2)"
    assert f"example {path}:1, trained on what is in [[ ]]:" in lines
    assert text.count("[[good day<|endoftext|>]]") == 1
    assert "[[hello" not in text
    coloured = inspect(capsys, *arguments, "--colour")
    assert "\x1b[32mgood day<|endoftext|>\x1b[0m" in coloured


def test_what_the_template_leaves_out_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer: str
) -> None:
    thinking = {"role": "assistant", "content": "good day", "reasoning_content": "so"}
    path = write(tmp_path, {"messages": [CHAT["messages"][0], thinking]})
    arguments = ("--data", path, tokenizer, "data.chat_template=plain")
    said = "the chat template leaves out what the data holds of reasoning"
    assert f"\nwarning: {said}" in inspect(capsys, *arguments)
    (found,) = json.loads(inspect(capsys, *arguments, "--json")).values()
    assert [warning.startswith(said) for warning in found["warnings"]] == [True]


def test_tokens_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer: str) -> None:
    """A byte is a token, and each document has its end: so many tokens, in bins of powers of two."""
    path = write(tmp_path, *[{"prompt": "p" * n, "completion": "c"} for n in (1, 1, 6, 30)])
    arguments = ("--data", path, tokenizer, "data.seq_len=16", "--samples", "0")
    (found,) = json.loads(inspect(capsys, *arguments, "--json")).values()
    assert (found["total"], found["trained"], found["longer_than_seq_len"]) == (3 + 3 + 8 + 32, 2 * 4, 1)
    assert [(one["most"], one["examples"]) for one in found["lengths"]] == [(4, 2), (8, 1), (16, 0), (32, 1)]
    text = inspect(capsys, *arguments)
    assert "46 tokens, 8 trained on (17.4%); of an example: median 5, 95 % up to 28, longest 32" in text
    assert "1 longer than data.seq_len 16 (data.too_long)" in text


def test_pairs_are_shown_with_both_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer: str
) -> None:
    path = write(tmp_path, {"prompt": "ask", "chosen": " yes", "rejected": " no"})
    text = inspect(capsys, "--data", path, tokenizer)
    assert "ask\n<chosen> [[ yes<|endoftext|>]]\n<rejected> [[ no<|endoftext|>]]" in text
    # the prompt is there with each answer, as in training, and never trained on
    assert "15 tokens, 9 trained on (60.0%); of an example: median 8, 95 % up to 8, longest 8" in text


def test_without_a_tokenizer_characters_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, CHAT)
    text = inspect(capsys, "--data", path)
    assert "13 characters; of an example: median 13" in text
    assert text.endswith("hello\ngood day\n")
    long = write(tmp_path, "x" * 5000, name="a.txt")
    assert inspect(capsys, "--data", long).endswith("x ... (1,000 characters more)\n")


def test_the_page_shows_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, CHAT, '{"messages"\n', CHAT, name="my.jsonl")
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    assert f"```text\n{inspect(capsys, '--data', 'my.jsonl')}```\n" in page


def test_evaluation_sets_are_looked_at_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = write(tmp_path, *[CHAT] * 10), write(tmp_path, CHAT, CHAT, name="b.jsonl")
    settings = ("data.val_size=3", f"data.eval_path={{other: {other}}}")
    found: dict[str, Any] = json.loads(inspect(capsys, "--data", path, *settings, "--json"))
    assert {name: one["kept"] for name, one in found.items()} == {"train": 7, "val": 3, "other": 2}
    text = inspect(capsys, "--data", path, *settings)
    assert f"val:\n{path}: messages; 10 rows read, 3 examples kept, 7 trained on, 0 dropped" in text


def test_nothing_to_train_on_ends_with_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer: str
) -> None:
    row = {"input_ids": [1, 2], "labels": [-100, -100]}
    assert "0 trained on" in inspect(capsys, "--data", write(tmp_path, row), tokenizer, code=4)
    problem = inspect(capsys, "--data", write(tmp_path, "{"), code=4)
    assert "a.jsonl, line 1: it is not valid JSON" in problem
    assert inspect(capsys, code=2).startswith("error: command line: data.path is required")


def test_without_a_model_torch_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}\n')
    code = (
        "import sys; from megatrain.cli import app\n"
        "app(['data', 'inspect', '--data', sys.argv[1]], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.jsonl")], check=True, capture_output=True)
