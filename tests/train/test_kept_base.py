"""Runs whose base is kept as stored: the metrics, checkpoints and exports of the same base in values."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megatrain
from megatrain.checkpoint.load import find
from megatrain.config import Config, build_config
from megatrain.config.adaptation import AS_STORED, DEQUANTISED
from megatrain.data.tokenizer import train_tokenizer
from megatrain.errors import ConfigError
from megatrain.train.loop import train
from megatrain.train.outputs.export import export_run
from tests.data.documents import read_texts
from tests.forks import run_script
from tests.model.weights.quantised.test_checkpoints import DEEPSEEK, GPT_OSS, QUANTISED, write_quantised
from tests.train.project import make_config, train_until, write_corpus
from tests.train.test_loop import assert_same_runs, rows_of

pytest.importorskip("peft")

CONFIGS = {"mxfp4": GPT_OSS, "fp8 experts": DEEPSEEK}


@pytest.fixture(scope="module", params=CONFIGS)
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised model with a tokenizer, a corpus, and a run beside its values."""
    root = tmp_path_factory.mktemp("base")
    write_base(root, request.param)
    train(config_of(root, DEQUANTISED, DEQUANTISED))
    return root


def write_base(root: Path, kind: str) -> None:
    _, quantise, more = QUANTISED[kind]
    config = type(CONFIGS[kind])(**CONFIGS[kind].to_dict() | {"vocab_size": 300, "eos_token_id": 0})
    write_quantised(root / "model", config, quantise, {"quant_method": kind.split()[0], **more})
    write_corpus(root / "corpus.txt")
    texts = (document.text for document in read_texts([str(root / "corpus.txt")], text_column="text"))
    train_tokenizer(texts, 300).save_pretrained(root / "model")


def config_of(root: Path, out: str, base: str = AS_STORED, **sections: Any) -> Config:
    return make_config(
        root,
        out,
        **{
            "model": {"path": str(root / "model"), "init": "pretrained"},
            "lora": {"r": 4, "base": base},
            "train": {"precision": "bf16", "steps": 8},
            **sections,
        },
    )


_KILLED = """
import os, signal, sys
from pathlib import Path
from megatrain.train import loop
from tests.searches import searched_for_a_moment
from tests.train.test_kept_base import config_of

inner = loop.train_step

def dying(run):
    if run.step == 6:
        run.optimizer.step = lambda: os.kill(os.getpid(), signal.SIGKILL)
    return inner(run)

loop.train_step = dying
with searched_for_a_moment():
    loop.train(config_of(Path(sys.argv[1]), "killed"))
"""


@pytest.mark.sampled(2)
def test_a_run_is_the_one_beside_values_and_goes_on_after_a_kill(root: Path) -> None:
    """Its memory is as planned too: `memory.on_mismatch` would stop it."""
    done = run_script(_KILLED, root)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert [path.name for path in find(root / "killed/checkpoints")] == ["step-00000004"]
    train(config_of(root, "killed"))
    assert_same_runs(root / "killed", root / DEQUANTISED)
    rows = rows_of(root / "killed")
    assert rows[-1]["loss"] < rows[0]["loss"]
    plan, other = (json.loads((root / run / "plan.json").read_text()) for run in ("killed", DEQUANTISED))
    working, values = (
        next(pool["nbytes"] for pool in each["pools"] if pool["name"] == "working") for each in (plan, other)
    )
    assert working < 0.8 * values


@pytest.mark.sampled(2)
def test_adapters_and_merged_models_are_those_beside_values(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a run that began beside values, and goes on beside codes without a word."""
    train_until(config_of(root, "kept", DEQUANTISED), 4)
    train(config_of(root, "kept"))
    assert "lora.base" not in caplog.text
    found: dict[str, dict[str, Any]] = {}
    for run in ("kept", DEQUANTISED):
        export_run(root / run, tmp_path / run / "adapter")
        export_run(root / run, tmp_path / run / "merged", merges=True)
        adapters = load_file(tmp_path / run / "adapter/adapter_model.safetensors")
        found[run] = adapters | load_file(tmp_path / run / "merged/model.safetensors")
    assert found["kept"].keys() == found[DEQUANTISED].keys()
    for name, value in found[DEQUANTISED].items():
        assert torch.equal(found["kept"][name], value), name
    ids = torch.arange(3, 19)[None]
    merged = megatrain.load(tmp_path / "kept/merged", precision="bf16")(ids).logits
    base = megatrain.load(root / "model", precision="bf16")(ids).logits
    assert not torch.equal(merged, base)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"lora": {"base": AS_STORED}}, r"lora\.base is given, but lora\.r is null"),
        ({"lora": {"r": 4, "base": "kept"}}, r"lora\.base"),
        ({"memory": {"tiers": {"nvme": ["drive"]}}}, r"codes are kept in RAM alone"),
        ({"memory": {"mirror_resident": False}}, r"use memory\.mirror_resident=auto"),
    ],
)
def test_settings_that_exclude_each_other(sections: dict[str, Any], words: str) -> None:
    raw: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}, "lora": {"r": 4, "base": AS_STORED}}
    with pytest.raises(ConfigError, match=words):
        build_config(raw | sections)
