"""`megatrain eval`: the loss that the run itself has computed, to the last digit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.errors import ConfigError
from megatrain.train.commands import evaluate as module
from megatrain.train.commands.evaluate import evaluate_run
from megatrain.train.loop import train
from megatrain.train.outputs.sample import open_chat
from tests.train.evaluate.test_evaluation import events_of, losses_of
from tests.train.project import WORDS, make_config, write_corpus


def write_chats(file: Path, count: int, first: int = 0) -> Path:
    """Write conversations of two turns each, no two alike."""
    rows = [
        {
            "messages": [
                {
                    "role": role,
                    "content": " ".join(WORDS[(number * 5 + turn + each) % 12] for each in range(3)),
                }
                for turn, role in enumerate(("user", "assistant", "user", "assistant"))
            ]
        }
        for number in range(first, first + count)
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def run_of(root: Path, kind: str) -> tuple[Path, Path]:
    """Train two steps and evaluate; return the run and what it was evaluated on."""
    sections: dict[str, dict[str, Any]] = {"train": {"steps": 2}, "optim": {"warmup_steps": 0}}
    if kind == "text":
        held_out = write_corpus(root / "other.txt", 900)
        sections["train"]["micro_batch_size"] = 3
    else:
        held_out = write_chats(root / "other.jsonl", 23, first=100)
        with held_out.open("a") as file:
            file.write('{"messages": [\n')
        train_rows = write_chats(root / "chats.jsonl", 40)
        make_config(root)  # writes the model's files
        (root / "chat.jinja").write_text(
            "{% for turn in messages %}{{ turn['role'] + ':' + turn['content'] + eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
        )
        sections["data"] = {"path": str(train_rows), "chat_template": str(root / "chat.jinja"), "seq_len": 64}
        sections["train"] |= {"precision": "bf16", "device": "emulated", "reproducible": True}
        sections["eval"] = {"prompts": ["one small"], "chat": True, "max_new_tokens": 8}
        sections["memory"] = {"activations": "recompute", "resident_blocks": 0}
    sections["data"] = {**sections.get("data", {}), "eval_path": {"other": str(held_out)}}
    train(make_config(root, "run", **sections))
    (root / "chat.jinja").unlink(missing_ok=True)
    return root / "run", held_out


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["text", "chats in bf16"])
def test_the_loss_is_that_of_the_run_to_the_last_digit(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run, held_out = run_of(tmp_path, kind)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(run), "--data", str(held_out), "--data", str(held_out), "--json"])
    assert not ended.value.code
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    read = f"{held_out}: messages; 24 rows read, 23 examples kept, 1 dropped"
    dropped = f"{read}\n  dropped: it is not valid JSON: 1 ("
    assert captured.err.count(dropped) == (0 if kind == "text" else 2), "of each file that is named"
    assert list(found) == ["other", "other-2"]
    assert found["other"] == found["other-2"]
    assert found["other"]["loss"] == losses_of(run)[2]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before, "the run is only read"
    if kind != "text":
        (sample,) = events_of(run, "sample")
        assert sample["prompt"] == "one small"
        assert sample["text"] == open_chat(str(run), max_new_tokens=8).ask("one small") != ""
    (first,) = evaluate_run(run, [str(held_out)], ["eval.batches=1"])
    assert first.count < found["other"]["tokens"]


def test_a_run_of_judged_answers_is_refused(tmp_path: Path) -> None:
    """Before anything is read but its checkpoint."""
    manifest = SimpleNamespace(meta={"config": {"train": {"loss": "dpo"}}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "newest_model", lambda run: run)
        patch.setattr(module, "verify", lambda path, digests: manifest)
        with pytest.raises(ConfigError, match=r"trained on judged answers \(train.loss=dpo\)"):
            evaluate_run(tmp_path, ["a.txt"])
