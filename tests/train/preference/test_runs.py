"""Runs that learn from judged answers: their reference, resuming, evaluation, and what is refused."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.checkpoint.load import verify
from megatrain.config import Config, apply_overrides, build_config
from megatrain.data.tokenizer import train_tokenizer
from megatrain.errors import ConfigError
from megatrain.model.weights.skeleton import read_config
from megatrain.objective.registry import OBJECTIVES
from megatrain.train.commands.dry_run import dry_run
from megatrain.train.commands.evaluate import evaluate_run
from megatrain.train.loop import train
from tests.reference import make_model
from tests.train.evaluate.test_evaluation import events_of
from tests.train.project import WORDS, make_config, write_model_config
from tests.train.test_loop import rows_of

SHARED = Path(__file__).parents[4] / "shared/data"
COMPUTING = "computing the reference"


def write_rows(file: Path, count: int, *, is_kto: bool) -> None:
    def words(first: int, number: int) -> str:
        return " ".join(WORDS[(first + step * (first + 1)) % len(WORDS)] for step in range(number))

    rows: list[dict[str, Any]] = []
    for n in range(count):
        row: dict[str, Any] = {
            "prompt": words(n, 3),
            "chosen": f" {words(n + 1, 4 + n % 3)}",
            "rejected": f" {words(n + 2, 3)}",
        }
        if is_kto:
            row = {"prompt": row["prompt"], "completion": row["chosen"], "label": n % 2 == 0}
        rows.append(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(root: Path) -> None:
    write_model_config(root / "plain", attention_dropout=0.0)
    make_model(read_config(root / "plain")).save_pretrained(root / "model")
    train_tokenizer([" ".join(WORDS)] * 20, 300).save_pretrained(root / "model")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights and a tokenizer, pairs and judged answers."""
    root = tmp_path_factory.mktemp("judged")
    write_model(root)
    for name in ("dpo", "kto"):
        write_rows(root / f"{name}.jsonl", 20, is_kto=name == "kto")
    return root


def config_of(root: Path, out: str, loss: str = "dpo", **sections: Any) -> Config:
    sections["train"] = {"loss": loss, "steps": 4, **sections.get("train", {})}
    sections["data"] = {
        "path": str(root / f"{OBJECTIVES[loss].rows.way}.jsonl"),
        "cache": str(root / "cache"),
        "seq_len": 16,
        "val_size": 4,
        **sections.get("data", {}),
    }
    sections["checkpoint"] = {"every": 2, "keep_last": None}
    model = {"path": str(root / "model"), "init": "pretrained"}
    evaluation = {"every": 2} if sections["data"]["val_size"] else {}
    return make_config(root, out, model=model, eval=evaluation, **sections)


def log_probabilities(model: Any, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return what a resident model says of the answers of rows."""
    with torch.no_grad():
        chances = model(rows).logits[:, :-1].double().log_softmax(-1)
    found = chances.gather(-1, rows[:, 1:, None])[..., 0]
    return (found * (labels[:, 1:] != -100)).sum(-1)


@pytest.fixture(scope="module")
def whole(root: Path) -> Path:
    train(config_of(root, "whole"))
    return root / "whole"


def test_a_run_says_what_it_has_learnt(root: Path, whole: Path) -> None:
    rows = rows_of(whole)
    shown = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"}
    assert shown <= rows[0].keys()
    assert rows[-1]["rewards/margins"] == rows[-1]["rewards/chosen"] - rows[-1]["rewards/rejected"]
    assert rows[-1]["loss"] < math.log(2)
    last = events_of(whole, "evaluation")[-1]
    assert (last["step"], last["name"], last["rows"]) == (4, "val", 4)
    assert "perplexity" not in last

    # of the resident models, the trained one and the one before
    from megatrain.data.pairs import JudgedRows, judged_batch
    from megatrain.data.tokenizer import load_tokenizer
    from megatrain.train.inputs import Packer
    from megatrain.train.run_data import make_eval_sets

    config = config_of(root, "whole")
    tokenizer, model_config = load_tokenizer(str(root / "model")), read_config(root / "model")
    packer = Packer(config, tokenizer, model_config)
    (one,) = make_eval_sets(config, packer.evaluation(packer.train()))
    assert isinstance(one.rows, JudgedRows)
    batch = judged_batch(one.rows.rows[range(4)])
    before, after = (
        log_probabilities(
            AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval(),
            batch["input_ids"],
            batch["labels"],
        )
        for place in (root / "model", whole / "hf")
    )
    margins = 0.1 * (after - before).view(-1, 2) @ torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert last["rewards/margins"] == pytest.approx(float(margins.mean()), rel=1e-4)
    loss = torch.nn.functional.softplus(-margins).mean()
    assert last["loss"] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cache", ["kept", "damaged", "gone"])
def test_a_run_that_goes_on_has_the_reference_that_it_began_with(
    root: Path, whole: Path, cache: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Found where it was kept, or asked of the model's own files again; of the trained model, never."""
    caplog.set_level(logging.INFO)
    folder = root / "cache"
    kept = {path: path.read_bytes() for path in sorted(folder.glob("reference-*/rows.bin"))}
    assert len(kept) >= 2
    for path, content in kept.items():
        if cache == "damaged":
            path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        elif cache == "gone":
            shutil.rmtree(path.parent)
    train(config_of(root, f"from-{cache}"), resume=str(whole / "checkpoints/step-00000002"))
    assert sum(COMPUTING in message for message in caplog.messages) == {"kept": 0}.get(cache, 2)
    assert any("rows are damaged" in message for message in caplog.messages) == (cache == "damaged")
    ours, theirs = rows_of(root / f"from-{cache}"), rows_of(whole)[2:]
    names = ("step", "loss", "grad_norm", "rewards/chosen", "rewards/rejected")
    assert [[row[name] for name in names] for row in ours] == [
        [row[name] for name in names] for row in theirs
    ]
    assert {path: path.read_bytes() for path in folder.glob("reference-*/rows.bin")} == kept
    if cache == "gone":
        assert_same_weights(root / "from-gone", whole)


def assert_same_weights(ours: Path, theirs: Path) -> None:
    from tests.train.test_loop import state_of

    left, right = state_of(ours), state_of(theirs)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], tensor) for name, tensor in right.items())


def test_adapters_are_off_in_a_reference_that_is_computed_again(root: Path) -> None:
    """Beside trained adapters the base says what it said before."""
    pytest.importorskip("peft")
    lora = {"r": 4, "dropout": 0.1, "modules_to_save": ["lm_head"]}
    settings: dict[str, Any] = {"lora": lora, "data": {"cache": str(root / "cache-lora")}}
    train(config_of(root, "lora", **settings))
    kept = {path: path.read_bytes() for path in (root / "cache-lora").glob("reference-*/rows.bin")}
    for path in kept:
        shutil.rmtree(path.parent)
    train(config_of(root, "lora-on", **settings), resume=str(root / "lora/checkpoints/step-00000002"))
    assert {path: path.read_bytes() for path in (root / "cache-lora").glob("reference-*/rows.bin")} == kept
    assert [row["loss"] for row in rows_of(root / "lora-on")] == [
        row["loss"] for row in rows_of(root / "lora")[2:]
    ]


def test_a_step_is_the_same_however_its_pairs_fall(root: Path) -> None:
    """Two micro-batches of one pair, or one of two: the mean over the step's pairs."""
    found = []
    for size in (1, 2):
        out = f"falls-{size}"
        shape = {"micro_batch_size": size, "grad_accumulation": 2 // size, "steps": 3}
        data = {"val_size": 0}
        train(config_of(root, out, data=data, train=shape))
        rows = rows_of(root / out)
        names = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected")
        found.append([row[name] for row in rows for name in names])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_kto_runs_and_a_dry_run_asks_no_reference(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = config_of(root, "kto", "kto")
    dry_run(config, lambda line: None)
    assert not any(COMPUTING in message for message in caplog.messages)
    train(config)
    rows = rows_of(root / "kto")
    assert all({"kl", "rewards/chosen"} <= row.keys() and row["kl"] >= 0 for row in rows)
    assert rows[-1]["loss"] < 0.5
    last = events_of(root / "kto", "evaluation")[-1]
    assert {"kl", "rows", "loss"} <= last.keys()
    assert config.batch.micro_batch_size == 2 * config.train.micro_batch_size


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", [one.name for one in OBJECTIVES.values() if not one.has_reference][1:])
def test_a_loss_without_a_reference_asks_for_none(
    root: Path, loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It learns, is resumed to the same bits, and is evaluated by the command to the same digits."""
    caplog.set_level(logging.INFO)
    held_out = root / f"{loss}-held.jsonl"
    write_rows(held_out, 5, is_kto=False)
    settings: dict[str, Any] = {"preference": {"beta": 2.0}, "data": {"eval_path": {"other": str(held_out)}}}
    train(config_of(root, loss, loss, **settings))
    assert not any(COMPUTING in message for message in caplog.messages)
    rows = rows_of(root / loss)
    names = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "nll_loss"}
    assert names <= rows[0].keys()
    assert all(row["grad_norm"] > 0 for row in rows)
    half = root / loss / "checkpoints/step-00000002"
    assert "reference" not in verify(half).meta
    train(config_of(root, f"{loss}-again", loss, **settings), resume=str(half))
    assert_same_weights(root / f"{loss}-again", root / loss)
    (found,) = evaluate_run(root / loss, [str(held_out)])
    first, last = [one for one in events_of(root / loss, "evaluation") if one["name"] == "other"]
    assert last["loss"] < first["loss"]
    assert (found.unit, found.count, found.loss) == ("rows", 5, last["loss"])
    assert {name: last[name] for name in found.shown} == dict(found.shown)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model": {"init": "random"}},
            "a model without training is no reference; use model.init=pretrained",
        ),
        ({"data": {"packing": "best_fit"}}, "one answer per sequence; use pad"),
        ({"data": {"too_long": "split"}}, "judges whole answers; use truncate or drop"),
        ({"preference": {"desirable_weight": 2}}, "train.loss is dpo; leave it out, or use train.loss=kto"),
        ({"preference": {"label_smoothing": 0.1, "loss_type": "ipo"}}, "use sigmoid or robust"),
        ({"train": {"loss": "sft"}, "preference": {"beta": 0.2}}, "use train.loss=dpo or kto"),
    ],
)
def test_settings_that_cannot_be_obeyed_are_refused(root: Path, changes: Any, said: str) -> None:
    raw: dict[str, Any] = {
        "model": {"path": str(root / "model")},
        "data": {"path": str(root / "dpo.jsonl"), "seq_len": 16},
        "train": {"loss": "dpo", "steps": 1},
    }
    for section, values in changes.items():
        raw[section] = {**raw.get(section, {}), **values}
    with pytest.raises(ConfigError, match=said):
        build_config(raw)


def test_names_that_others_give_these_settings_are_read(root: Path) -> None:
    raw = {"model": {"path": str(root / "model")}, "data": {"path": str(root / "dpo.jsonl")}}
    overrides = ["stage=dpo", "pref_beta=0.3", "pref_loss=hinge", "precompute_ref_log_probs=true"]
    config = build_config(apply_overrides(raw, overrides))
    assert (config.train.loss, config.preference.beta, config.preference.loss_type) == ("dpo", 0.3, "hinge")
    with pytest.raises(ConfigError, match="the reference is the model before the first step"):
        apply_overrides(raw, ["ref_model=other"])


@pytest.mark.parity
@pytest.mark.parametrize(("loss", "first"), [("dpo", math.log(2)), ("kto", 0.5)])
def test_real_files_are_trained_on(tmp_path: Path, loss: str, first: float) -> None:
    model, file = SHARED / "stories260K/hf", SHARED / f"llamafactory/{loss}_en_demo.json"
    if not model.is_dir() or not file.is_file():
        pytest.skip("needs stories260K and the files of LLaMA-Factory in shared/data next to the repository")
    data = {"path": str(file), "seq_len": 192, "chat_template": "plain", "max_samples": 40}
    train(
        build_config(
            {
                "model": {"path": str(model)},
                "data": data,
                "train": {"loss": loss, "steps": 3, "micro_batch_size": 2, "device": "cpu"},
                "optim": {"lr": 1e-3},
                "memory": {"on_mismatch": "stop"},
                "log": {"progress": "none"},
                "out": str(tmp_path / "run"),
            }
        )
    )
    rows = rows_of(tmp_path / "run")
    assert rows[0]["loss"] == pytest.approx(first, rel=1e-5)  # nothing has been learnt yet
    assert min(row["loss"] for row in rows[1:]) < first
