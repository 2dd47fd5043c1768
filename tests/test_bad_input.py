"""Every mistake of a user of `train` ends in one sentence, the right exit code, and no leftovers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BartForConditionalGeneration, BertConfig, BertModel

from megatrain import cli
from megatrain.errors import ModelError
from megatrain.stream.attach.load import load
from tests.model.weights.test_parts import HALVES
from tests.train.project import make_config, write_corpus, write_model_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model directory with safetensors and a tokenizer, and a corpus beside it."""
    from megatrain.train.loop import train

    root = tmp_path_factory.mktemp("trained")
    train(make_config(root, train={"steps": 1}, optim={"warmup_steps": 0}))
    return root


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    """A copy of the model and the corpus that a test may spoil."""
    model = tmp_path / "model"
    model.mkdir()
    for file in (trained / "run/hf").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    write_corpus(tmp_path / "corpus.txt")
    return tmp_path


def spoil_weights(project: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = project / "model/model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def truncate(project: Path) -> None:
    file = project / "model/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def remove_weights(project: Path) -> None:
    (project / "model/model.safetensors").unlink()


def remove_shard(project: Path) -> None:
    names = load_file(project / "model/model.safetensors").keys()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (project / "model/model.safetensors.index.json").write_text(json.dumps(index))
    remove_weights(project)


def missing_tensor(project: Path) -> None:
    spoil_weights(project, lambda tensors: tensors.__delitem__("model.norm.weight"))


def wrong_shape(project: Path) -> None:
    spoil_weights(project, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))


def pickle_only(project: Path) -> None:
    remove_weights(project)
    canary = project / "canary"

    class Canary:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (os.mkdir, (str(canary),))

    torch.save({"model.norm.weight": Canary()}, project / "model/pytorch_model.bin")


def remote_code(project: Path) -> None:
    file = project / "model/config.json"
    config = json.loads(file.read_text())
    config["model_type"] = "evil"
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}
    file.write_text(json.dumps(config))
    (project / "model/evil.py").write_text(f"import os; os.mkdir({str(project / 'canary')!r})")


def encoder(project: Path) -> None:
    """Weights as models of embeddings come: without what would predict tokens."""
    sizes = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    BertModel(BertConfig(**sizes, num_hidden_layers=2)).save_pretrained(project / "model")


def two_parts(project: Path) -> None:
    BartForConditionalGeneration(HALVES["bart"][0]()).save_pretrained(project / "model")


def no_config(project: Path) -> None:
    (project / "model/config.json").unlink()


def empty_data(project: Path) -> None:
    (project / "corpus.txt").write_text("")


def invalid_utf8(project: Path) -> None:
    (project / "corpus.txt").write_bytes(b"fine\nbroken \xff\xfe here\n" * 50)


def no_text_column(project: Path) -> None:
    (project / "corpus.txt").rename(project / "corpus.jsonl")
    (project / "corpus.jsonl").write_text('{"content": "hello"}\n' * 50)


def other_labels(project: Path) -> None:
    row = {"input_ids": [5, 6, 7], "labels": [-100, 7, 8]}
    (project / "rows.jsonl").write_text((json.dumps(row) + "\n") * 50)


def foreign_token(project: Path) -> None:
    file = project / "model/tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    word = max(vocabulary, key=lambda token: vocabulary[token])
    vocabulary[word] = 5000
    for token in (chr(number) for number in range(33, 127)):
        if token in vocabulary:
            vocabulary[token] += 5000
    file.write_text(json.dumps(tokenizer))


CASES: dict[str, tuple[Callable[[Path], None] | None, list[str], int, str]] = {
    "missing weights": (remove_weights, [], 2, "safetensors"),
    "truncated weights": (truncate, [], 2, "model.safetensors"),
    "missing shard": (remove_shard, [], 2, "model-00001-of-00002.safetensors"),
    "missing tensor": (missing_tensor, [], 2, "lacks 1 of the model's tensors: model.norm.weight"),
    "wrong shape": (wrong_shape, [], 2, "model.norm.weight"),
    "pickle-only weights": (pickle_only, [], 2, "pytorch_model.bin"),
    "encoder": (encoder, [], 2, "is an encoder"),
    "two parts": (
        two_parts,
        [],
        2,
        "causal language model (an encoder: is_encoder_decoder)",
    ),
    "remote code": (remote_code, [], 2, "auto_map"),
    "no config": (no_config, [], 2, "config.json"),
    "no model": (None, ["model.path=./nowhere"], 2, "nowhere"),
    "empty data": (empty_data, [], 4, "corpus.txt"),
    "invalid UTF-8": (invalid_utf8, [], 4, "line 2"),
    "no text column": (no_text_column, ["data.path=corpus.jsonl"], 4, "content"),
    "labels of other tokens": (other_labels, ["data.path=rows.jsonl"], 4, "a label differs from its token"),
    "unknown attention": (None, ["model.attn_implementation=flsh"], 2, "is 'flsh', which transformers"),
    "attention without a backward": (
        None,
        ["model.attn_implementation=flex_attention", "train.device=cpu"],
        2,
        "flex_attention has no backward on the CPU",
    ),
    "missing data": (None, ["data.path=nowhere.txt"], 4, "nowhere.txt"),
    "token of another vocabulary": (foreign_token, [], 4, "vocab_size"),
    "beyond the context": (None, ["data.seq_len=65"], 2, "65"),
    "unknown key": (None, ["optim.learning_rat=1"], 2, "learning_rat"),
    "misspelt section": (None, ["optimm.lr=1"], 2, "optim"),
    "wrong type": (None, ["train.steps=many"], 2, "train.steps"),
    "warm-up longer than the run": (None, ["optim.warmup_steps=99"], 2, "warmup_steps"),
    "unknown schedule argument": (None, ["optim.schedule_args={bogus: 1}"], 2, "bogus"),
    "host memory": (None, ["memory.host_limit=100KB"], 3, "host memory"),
    "device memory": (None, ["memory.device_limit=10KB"], 3, "device memory"),
    "no CUDA": (None, ["train.device=cuda"], 2, "no CUDA device"),
}


BEFORE_DATA = (
    "missing weights", "truncated weights", "missing shard", "missing tensor", "wrong shape",
    "pickle-only weights", "encoder", "two parts", "remote code", "no config", "no model",
)  # fmt: skip
"""What is found before the data is read, and so before anything is planned or promised."""


@pytest.mark.parametrize("case", CASES)
def test_mistake_ends_in_one_sentence(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    spoil, overrides, code, words = CASES[case]
    if case in BEFORE_DATA:
        monkeypatch.setattr("megatrain.train.run.read_data", None)
    if case == "no CUDA" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    if spoil is not None:
        spoil(project)
    monkeypatch.chdir(project)
    given = {override.split("=")[0] for override in overrides}
    flags = ["--steps", "2", "--out", "run"]
    flags = [] if "train.steps" in given else flags
    settings = {"model.path": "model", "data.path": "corpus.txt", "data.seq_len": "32", "out": "run"}
    arguments = [
        f"{key}={value}" for key, value in settings.items() if key not in given and f"--{key}" not in flags
    ]
    arguments = [argument for argument in arguments if not (argument.startswith("out=") and flags)]
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *arguments, *overrides, *flags])
    output = capsys.readouterr()
    assert ended.value.code == code, output.err
    errors = [line for line in output.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, output.err
    assert words in output.err
    assert "Traceback" not in output.err
    assert not (project / "canary").exists()
    assert not (project / "run").exists() or not any((project / "run").iterdir())


@pytest.mark.parametrize("spoil", [encoder, two_parts])
def test_a_model_that_is_not_trained_gets_one_sentence_everywhere(
    spoil: Callable[[Path], None],
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(project)
    monkeypatch.chdir(project)
    with pytest.raises(ModelError) as loaded:
        load("model")
    sentences = {str(loaded.value)}
    for command in (["train", "data.path=corpus.txt"], ["plan", "--machine", "rtx-4090"]):
        with pytest.raises(SystemExit) as ended:
            cli.main([*command, "--model", "model"])
        assert ended.value.code == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        sentences |= {line.removeprefix("error: ") for line in errors}
    assert len(sentences) == 1, sentences


def test_output_directory_with_foreign_files(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "run").mkdir()
    (project / "run/thesis.tex").write_text("mine")
    monkeypatch.chdir(project)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--model", "model", "--data", "corpus.txt", "--out", "run"])
    assert ended.value.code == 2
    assert "thesis.tex" in capsys.readouterr().err
    assert (project / "run/thesis.tex").read_text() == "mine"


def test_model_that_cannot_fit_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A 400B shape is refused from its config alone, in host memory, before anything is allocated."""
    write_model_config(
        tmp_path, hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128
    )
    write_corpus(tmp_path / "corpus.txt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "model.init=random", "--model", ".", "--data", "corpus.txt", "data.seq_len=32"])
    error = capsys.readouterr().err
    assert ended.value.code == 3, error
    assert "host memory" in error
    assert "GiB" in error


def test_copied_model_is_usable(project: Path) -> None:
    """The project fixture itself is sound: what the cases spoil is what makes them fail."""
    assert load(project / "model").num_parameters() > 0
