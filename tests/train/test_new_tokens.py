"""Runs whose tokenizer gets new tokens: their rows are trained as a resident model's, saved, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import megatrain
from megatrain.config import Config, build_config
from megatrain.data.tokenizer import train_tokenizer
from megatrain.model.adapters.adapt import adapt
from megatrain.model.weights.skeleton import read_config
from megatrain.train.loop import train, train_step
from megatrain.train.outputs.export import export_run
from megatrain.train.planning.asking import with_new_tokens
from megatrain.train.planning.counting import PlannedModel
from megatrain.train.run import prepare
from tests.data.documents import read_texts
from tests.reference import Resident, assert_same_bits, make_model
from tests.train.project import make_config, write_corpus, write_model_config
from tests.train.test_adapters import stopping_after
from tests.train.test_loop import assert_same_runs

pytest.importorskip("peft")

OLD, TOKENS = 300, ["<ask>", "<answer>", "<rare>"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with weights, tied and not, and a corpus that has two of the new tokens."""
    root = tmp_path_factory.mktemp("tokens")
    text = write_corpus(root / "plain.txt").read_text()
    (root / "corpus.txt").write_text(text.replace("giant", "<ask>").replace("through", "<answer>"))
    (root / "tokens.txt").write_text("\n".join(["one", *TOKENS]) + "\n")  # the first is no new word
    texts = (document.text for document in read_texts([str(root / "plain.txt")], text_column="text"))
    tokenizer = train_tokenizer(texts, OLD)
    for name, is_tied in (("untied", False), ("tied", True)):
        write_model_config(root / name, tie_word_embeddings=is_tied, vocab_size=OLD)
        make_model(read_config(root / name)).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


def config_of(root: Path, name: str, out: str, *, lora: bool, **sections: Any) -> Config:
    config: dict[str, Any] = {
        "model": {"path": str(root / name), "init": "pretrained", "new_tokens": TOKENS},
        "data": {"path": str(root / "corpus.txt")},
        "train": {"steps": 4},
        "optim": {"warmup_steps": 0, "max_grad_norm": None, "schedule": "constant", "betas": [0.9, 0.95]},
        "checkpoint": {"every": 2},
        "lora": {"r": 4, "dropout": 0.1} if lora else {},
    }
    for section, values in sections.items():
        config[section] = {**config[section], **values}
    (root / "model").mkdir(exist_ok=True)
    (root / "model/config.json").touch()
    return make_config(root, out, **config)


def resident(path: Path, rows: int) -> PreTrainedModel:
    """Make the model as transformers resizes it, its new rows the mean of the old ones."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for module in {model.get_input_embeddings(), model.get_output_embeddings()}:
            module.weight[OLD:] = module.weight[:OLD].mean(0)
    return model.train()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("model", "lora"), [("untied", False), ("tied", True)])
def test_new_rows_are_trained_as_resident_ones(model: str, lora: bool, root: Path) -> None:
    config = config_of(root, model, "unwritten", lora=lora)
    run = prepare(config)
    reference_model = resident(root / model, len(run.tokenizer))
    own = dict(run.engine.named_masters())
    begin = own["model.embed_tokens.weight"].clone()
    assert begin.shape[0] == len(run.tokenizer) == OLD + len(TOKENS)
    if config.adaptation is not None:
        adapt(reference_model, config.adaptation)
        with torch.no_grad():
            for name, parameter in reference_model.named_parameters():
                if ".lora_" in name:
                    parameter.copy_(own[name])
    optim = config.optim
    reference = Resident(
        reference_model, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
    )
    assert {"model.embed_tokens.weight"} < reference.parameters.keys()
    inner = run.engine.forward_backward

    def beside(batches: Any, *, seeds: Any) -> torch.Tensor:
        loss = inner(batches, seeds=seeds)
        assert_same_bits(loss, reference.forward_backward(batches, seeds), "loss")
        return loss

    run.engine.forward_backward = beside  # type: ignore[method-assign, assignment]
    for _ in range(3):
        train_step(run)
        reference.step(0.0, None)
    trained = dict(run.engine.named_masters())
    for name in reference.parameters:
        assert_same_bits(trained[name], reference.master(name), name)
    after, ids = trained["model.embed_tokens.weight"], run.tokenizer.convert_tokens_to_ids(TOKENS)
    moved = (after - begin).abs().amax(1)[ids]
    assert float(moved[:2].min()) > 1e-2, "what the corpus has is trained"
    decay = 1 - optim.lr * optim.weight_decay
    if model == "untied":  # no gradient of it, but for that of the head where that is tied
        assert_same_bits(after[ids[2]], begin[ids[2]] * decay * decay * decay, "what it lacks only decays")
    run.engine.close()


@pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings=True`:UserWarning"
)  # PEFT's, when it opens
def test_runs_with_new_tokens_resume_and_are_opened_by_others(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft

    changes = {"model": {"new_tokens": str(root / "tokens.txt")}}
    train(config_of(root, "untied", "full", lora=False, train={"steps": 2}, **changes))
    train(config_of(root, "tied", "adapters", lora=True, **changes))
    again = config_of(root, "tied", "again", lora=True, **changes)
    with monkeypatch.context() as patch:
        stopping_after(3, patch)
        with pytest.raises(SystemExit, match="75"):
            train(again)
    train(again)
    assert_same_runs(root / "again", root / "adapters")
    tokenizer = AutoTokenizer.from_pretrained(root / "adapters/hf")
    ids = tokenizer("<ask>one small<answer>", return_tensors="pt")["input_ids"]
    assert ids[0, 0] == OLD
    assert ids[0, -1] == OLD + 1
    full = AutoModelForCausalLM.from_pretrained(root / "full/hf").eval()
    assert full.config.vocab_size == len(tokenizer)
    assert torch.equal(full(ids).logits, megatrain.load(root / "full/hf")(ids).logits)
    ours = megatrain.load(root / "adapters/hf")(ids).logits
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(root / "adapters/hf").eval()
    assert torch.equal(ours, theirs(ids).logits)
    export_run(root / "adapters", root / "merged", merges=True)
    merged = AutoModelForCausalLM.from_pretrained(root / "merged").eval()
    torch.testing.assert_close(merged(ids).logits, ours, rtol=0, atol=1e-5)


def test_a_plan_counts_the_rows_of_new_tokens(root: Path) -> None:
    """By the tokenizer where there is one; else each token is a row."""
    shape = write_model_config(root / "shape", vocab_size=OLD) / "config.json"
    found = []
    for place in (root / "untied", shape):
        raw = {"model": {"path": str(place), "new_tokens": ["one", *TOKENS]}, "data": {"path": "none"}}
        config = build_config(raw)
        counted = with_new_tokens(config, PlannedModel(str(place), None, lambda _: None))
        found.append(counted.vocab_size - OLD)
    assert found == [3, 4], "the tokenizer has one of them"


@pytest.mark.parametrize(("text", "words"), [("\n \n", "has no line with a token"), (None, "cannot read")])
def test_a_file_of_tokens_that_is_none_is_refused(text: str | None, words: str, root: Path) -> None:
    file = root / "none.txt"
    file.unlink(missing_ok=True)
    if text is not None:
        file.write_text(text)
    config = config_of(root, "untied", "refused", lora=False, model={"new_tokens": str(file)})
    with pytest.raises(megatrain.MegatrainError, match=words):
        prepare(config)
