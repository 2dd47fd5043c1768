"""Runs that train adapters: their checkpoints, resuming, what PEFT makes of them, and what is refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import megatrain
from megatrain.checkpoint.load import find
from megatrain.config import Config, build_config
from megatrain.data.tokenizer import train_tokenizer
from megatrain.errors import CheckpointError, ConfigError
from megatrain.train import loop
from megatrain.train.loop import train
from megatrain.train.outputs.sample import sample
from megatrain.train.records.metrics import StepMetrics
from megatrain.train.run import Run
from tests.data.documents import read_texts
from tests.forks import run_script
from tests.reference import make_model
from tests.train.project import make_config, write_corpus, write_model_config
from tests.train.test_loop import assert_same_runs, rows_of

pytest.importorskip("peft")

LORA: dict[str, Any] = {"r": 4, "dropout": 0.1, "modules_to_save": ["lm_head"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights and a tokenizer."""
    return write_base(tmp_path_factory.mktemp("base"))


def write_base(root: Path) -> Path:
    """Write a model with weights and a tokenizer, and a corpus."""
    write_model_config(root / "plain")
    write_corpus(root / "corpus.txt")
    model = make_model(megatrain.model.weights.skeleton.read_config(root / "plain"))
    model.to(torch.bfloat16).save_pretrained(root / "model")
    texts = (document.text for document in read_texts([str(root / "corpus.txt")], text_column="text"))
    train_tokenizer(texts, 300).save_pretrained(root / "model")
    return root


def config_of(root: Path, out: str = "run", **sections: Any) -> Config:
    model = {"path": str(root / "model"), "init": "pretrained"}
    return make_config(root, out, **{"model": model, "lora": LORA, **sections})


@pytest.fixture(scope="module")
def whole(base: Path) -> Path:
    """An uninterrupted run of 12 steps with adapters in bf16, with dropout; the head is trained too."""
    train(config_of(base, "whole", train={"precision": "bf16"}))
    return base / "whole"


def test_a_checkpoint_holds_the_adapters_and_not_the_base(base: Path, whole: Path) -> None:
    rows = rows_of(whole)
    assert rows[-1]["loss"] < rows[0]["loss"]
    newest = max((whole / "checkpoints").glob("step-*"))
    assert not list(newest.glob("model*.safetensors"))
    tensors = load_file(newest / "adapter_model.safetensors")
    head = tensors.pop("base_model.model.lm_head.weight")
    assert head.dtype == torch.bfloat16
    assert len(tensors) == 3 * 7 * 2
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    described = json.loads((newest / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(base / "model")
    assert (described["r"], described["lora_alpha"], described["modules_to_save"]) == (4, 8, ["lm_head"])


def test_peft_and_transformers_open_the_result(base: Path, whole: Path) -> None:
    """And give the logits that the streamed model gives."""
    import peft

    ids = torch.arange(3, 19)[None]
    ours = megatrain.load(whole / "hf")(ids).logits
    model = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32)
    before = model(ids).logits
    theirs = peft.PeftModel.from_pretrained(model, whole / "hf").eval()(ids).logits
    assert torch.equal(ours, theirs)
    assert not torch.allclose(before, theirs, atol=1e-2)
    opened = AutoModelForCausalLM.from_pretrained(whole / "hf", dtype=torch.float32).eval()
    assert torch.equal(opened(ids).logits, theirs)
    assert AutoTokenizer.from_pretrained(whole / "hf").vocab_size == 300
    assert sample(str(whole), "one small step", max_new_tokens=4).startswith("one small step")


def stopping_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process a SIGTERM when a run has taken so many steps."""
    inner = loop.train_step

    def stepping(run: Run) -> StepMetrics:
        row = inner(run)
        if row.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return row

    monkeypatch.setattr(loop, "train_step", stepping)


_KILLED = """
import os, signal, sys
from pathlib import Path
from megatrain.train import loop
from tests.searches import searched_for_a_moment
from tests.train.test_adapters import config_of

inner = loop.train_step

def dying(run):
    if run.step == 6:
        run.optimizer.step = lambda: os.kill(os.getpid(), signal.SIGKILL)
    return inner(run)

loop.train_step = dying
with searched_for_a_moment():
    loop.train(config_of(Path(sys.argv[1]), "killed", train={"precision": "bf16"}))
"""
"""It dies in the seventh step, when gradients are complete and nothing is updated; it has saved step 4."""


def test_a_run_that_was_killed_in_a_step_goes_on_to_the_same_bits(base: Path, whole: Path) -> None:
    done = run_script(_KILLED, base)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert [path.name for path in find(base / "killed/checkpoints")] == ["step-00000004"]
    train(config_of(base, "killed", train={"precision": "bf16"}))
    assert_same_runs(base / "killed", whole)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora": {"r": None, "dropout": 0.0, "modules_to_save": []}}, "holds adapters, but lora.r is null"),
        ({"lora": {**LORA, "r": 8}}, "use the lora settings that it was trained with"),
        ({"lora": {**LORA, "target_modules": ["q_proj"]}}, "use the lora settings that it was trained with"),
    ],
)
def test_going_on_with_other_adapters_is_refused(
    base: Path, whole: Path, change: dict[str, Any], words: str
) -> None:
    newest = max((whole / "checkpoints").glob("step-*"))
    changed = config_of(base, "other", **{"train": {"precision": "bf16"}, **change})
    with pytest.raises(megatrain.MegatrainError, match=words):
        train(changed, resume=str(newest))


def test_going_on_beside_another_base_is_refused(base: Path, whole: Path, tmp_path: Path) -> None:
    """One weight of the base is another: its size and its configuration are the same."""
    model = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(base / "model").save_pretrained(tmp_path / "model")
    write_corpus(tmp_path / "corpus.txt")
    newest = max((whole / "checkpoints").glob("step-*"))
    with pytest.raises(CheckpointError, match="trained beside another model"):
        train(config_of(tmp_path, train={"precision": "bf16"}), resume=str(newest))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("key", ["freeze", "only"])
def test_patterns_choose_what_is_trained(base: Path, key: str) -> None:
    patterns = ["model.embed_tokens*", "lm_head*"]
    lora: dict[str, Any] = {"r": None, "dropout": 0.0, "modules_to_save": []}
    train(config_of(base, key, train={"steps": 2, key: patterns}, optim={"warmup_steps": 0}, lora=lora))
    before, after = (
        load_file(base / "model/model.safetensors"),
        load_file(base / key / "hf/model.safetensors"),
    )
    changed = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    named = {"model.embed_tokens.weight", "lm_head.weight"}
    assert changed == (before.keys() - named if key == "freeze" else named)
    newest = max((base / key / "checkpoints").glob("step-*"))
    state = [name for file in newest.glob("state/*.safetensors") for name in load_file(file)]
    assert {name.partition("/")[2] for name in state} == changed


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"lora": {"r": 4, "load_in_4bit": True}}, "never quantised here, which would cost exactness"),
        ({"lora": {"dropout": 0.1}}, "lora.dropout is given, but lora.r is null"),
        ({"train": {"only": ["*"]}, "lora": {"r": 4}}, "but adapters freeze the whole model"),
        ({"model": {"init": "random"}, "lora": {"r": 4}}, "model.init is random"),
    ],
)
def test_settings_that_exclude_each_other(sections: dict[str, Any], words: str) -> None:
    raw: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}}
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values}
    with pytest.raises(ConfigError, match=words):
        build_config(raw)
