"""Evaluation during a run: right numbers, no bit of training changed, the best kept, early stops resumed."""

from __future__ import annotations

import json
import logging
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.checkpoint.load import verify
from megatrain.config.choice import StepBatch
from megatrain.config.sections.eval import EvalConfig
from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import CheckpointError, ConfigError, DataError
from megatrain.train import loop
from megatrain.train.evaluate.best_tracker import BestTracker
from megatrain.train.evaluate.evaluator import Evaluator
from megatrain.train.evaluate.losses import EvalSet, Evaluation, evaluate
from megatrain.train.inputs import Packer, prepare_data
from megatrain.train.loop import train
from megatrain.train.outputs.export import export_run
from megatrain.train.run_data import make_eval_sets
from tests.stream.test_engine import start
from tests.train.project import make_config, write_corpus
from tests.train.test_loop import rows_of, state_of

HELD_OUT = {"val_size": 0.1}


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == kind]


def losses_of(run: Path) -> dict[int, float]:
    """Return the loss of each evaluation; the newest, where a resumed run has made it again."""
    return {row["step"]: row["loss"] for row in events_of(run, "evaluation")}


def saved_steps(run: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in (run / "checkpoints").iterdir())


TOO_LONG = "giant " * 999


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps with dropout, evaluated on two sets at every third step, with prompts."""
    root = tmp_path_factory.mktemp("evaluated")
    make_config(root)
    write_corpus(root / "other.txt", 900)
    prompts = ["one small", TOO_LONG, "giant"]
    settings = {"every": 3, "at_start": True, "prompts": prompts, "max_new_tokens": 3}
    data = {**HELD_OUT, "eval_path": {"other": str(root / "other.txt")}}
    train(make_config(root, data=data, eval=settings))
    return root


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_run_with_evaluation_equals_one_without_bit_for_bit(
    tmp_path: Path, evaluated: Path, device: str
) -> None:
    """Of the same data: what is held out stays out. Emulated, state streams while it evaluates."""
    settings = {"every": 3, "at_start": True, "prompts": ["one small"], "max_new_tokens": 3}
    quiet = {"every": None, "at_end": False}
    runs = {}
    for name, section in (("with", settings), ("without", quiet)):
        if (device, name) == ("cpu", "with"):
            runs[name] = evaluated / "run"
            continue
        options: dict[str, Any] = {"data": HELD_OUT, "eval": section, "train": {"device": device}}
        if device == "emulated":
            options["train"]["reproducible"] = True  # a plan at the start is enough of searching
            options["memory"] = {
                "activations": "recompute",
                "lockstep": 2,
                "resident_blocks": 0,
                "num_slots": 2,
            }
        train(make_config(tmp_path, name, **options))
        runs[name] = tmp_path / name
    assert not events_of(runs["without"], "evaluation")
    assert len(losses_of(runs["with"])) == 5
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert [row[key] for row in rows_of(runs["with"])] == [row[key] for row in rows_of(runs["without"])]
    left, right = state_of(runs["with"]), state_of(runs["without"])
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert torch.equal(left[name], tensor), name
    metas = [verify(max((run / "checkpoints").iterdir())).meta for run in runs.values()]
    assert metas[0]["rng"] == metas[1]["rng"]
    assert metas[0]["data"] == metas[1]["data"]


def test_losses_are_those_of_the_resident_model_over_all_tokens(evaluated: Path) -> None:
    config = make_config(evaluated, data={**HELD_OUT, "eval_path": {"other": str(evaluated / "other.txt")}})
    model = AutoModelForCausalLM.from_pretrained(evaluated / "run/hf").eval()
    tokenizer = load_tokenizer(str(evaluated / "run/hf"))
    packer = Packer(config, tokenizer, model.config)
    sets = make_eval_sets(config, packer.evaluation(packer.train()))
    assert [one.name for one in sets] == ["val", "other"]
    seen = {row["name"]: row for row in events_of(evaluated / "run", "evaluation") if row["step"] == 12}
    for one in sets:
        total = tokens = 0.0
        for batch in one.batches():
            with torch.no_grad():
                logits = model(input_ids=batch["input_ids"]).logits.double()
            chances = logits[:, :-1].log_softmax(-1).gather(-1, batch["labels"][:, 1:, None])
            total, tokens = total - float(chances.sum()), tokens + chances.numel()
        assert seen[one.name]["tokens"] == tokens
        assert seen[one.name]["loss"] == pytest.approx(total / tokens, rel=1e-6)
        assert seen[one.name]["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-6)


def test_a_prompt_is_continued_as_by_the_saved_model(evaluated: Path) -> None:
    samples = events_of(evaluated / "run", "sample")
    assert [row["prompt"] for row in samples] == ["one small", TOO_LONG, "giant"] * 5
    assert samples[-2]["text"].startswith("(the prompt has "), "a prompt without room does not end a run"
    model = AutoModelForCausalLM.from_pretrained(evaluated / "run/hf").eval()
    tokenizer = load_tokenizer(str(evaluated / "run/hf"))
    ids = tokenizer("giant", return_tensors="pt", return_token_type_ids=False)
    made = model.generate(**ids, max_new_tokens=3, do_sample=False, max_length=None, pad_token_id=0)
    assert samples[-1]["text"] == tokenizer.decode(made[0], skip_special_tokens=True)


def test_what_is_held_out_is_trained_on_by_nobody(evaluated: Path) -> None:
    config = make_config(evaluated, data=HELD_OUT)
    tokenizer = load_tokenizer(str(evaluated / "run/hf"))
    model_config = AutoModelForCausalLM.from_pretrained(evaluated / "run/hf").config
    packer = Packer(config, tokenizer, model_config)
    packed = packer.train()
    (held_out,) = make_eval_sets(config, packer.evaluation(packed))
    rows = torch.cat([batch["input_ids"] for batch in held_out.batches()])
    assert len(rows) == round(0.1 * len(packed.rows))
    meta = verify(max((evaluated / "run/checkpoints").iterdir())).meta
    kept = len(packed.rows) - len(rows)
    assert meta["data"]["fingerprint"].startswith(f"{kept}x32-")
    packer = Packer(make_config(evaluated, data={"val_size": 1e-9}), tokenizer, model_config)
    with pytest.raises(DataError, match="leaves 0 to evaluate on"):
        packer.evaluation(packed)


def test_what_is_held_out_of_examples_is_packed_as_the_others_are(evaluated: Path, tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    rows = [{"prompt": f"one small {number}", "completion": " giant leap"} for number in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(evaluated, data={"path": str(file), "val_size": 5})
    tokenizer = load_tokenizer(str(evaluated / "run/hf"))
    model_config = AutoModelForCausalLM.from_pretrained(evaluated / "run/hf").config
    for folder in (None, tmp_path, tmp_path):
        packer = Packer(config, tokenizer, model_config, folder)
        packed = packer.train()
        apart = packer.evaluation(packed)
        (held_out,) = make_eval_sets(config, apart)
        assert (packed.packing, packed.counts.kept) == ("best_fit", 15)
        starts = [int((batch["position_ids"] == 0).sum()) for batch in held_out.batches()]
        filled = sum(int((batch["labels"] != -100).sum()) for batch in held_out.batches())
        assert sum(starts) >= 5
        assert filled == 5 * packed.counts.trained / 15
    own = {"model": config.model.model_copy(update={"path": str(evaluated / "run/hf")})}
    said = prepare_data(config.model_copy(update=own), folder=tmp_path / "beforehand")
    assert list(said) == ["train", "val"]
    assert "15 examples" in said["train"][-1]
    assert "5 examples" in said["val"][-1]


def test_random_states_and_modes_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, engine, _ = start()
    model.get_decoder().layers[0].eval()
    modes = [module.training for module in model.modules()]
    forward = type(model).forward

    def drawing(self: Any, *args: Any, **kwargs: Any) -> Any:
        random.random(), np.random.rand(), torch.rand(1)
        return forward(self, *args, **kwargs)

    ids = torch.arange(24).view(2, 12)
    sets = [EvalSet(name="a", batches=lambda: [{"input_ids": ids, "labels": ids}])]
    words: Any = np.random.get_state
    before = random.getstate(), words()[1].tolist(), torch.get_rng_state()
    monkeypatch.setattr(type(model), "forward", drawing)
    first, second = (evaluate(engine, sets, most_batches=None)[0].loss for _ in range(2))
    assert first == second, "without dropout"
    assert random.getstate() == before[0]
    assert words()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert [module.training for module in model.modules()] == modes


def test_logits_of_a_batch_are_never_there_as_a_whole() -> None:
    """The head runs in chunks, as in training, and the loss is the same."""
    ids = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :5] = -100
    sets = [EvalSet(name="a", batches=lambda: [{"input_ids": ids, "labels": labels}])]
    found = []
    for chunk in (0, 4):
        model, _, engine, _ = start(head_chunk_tokens=chunk or None)
        rows: list[int] = []
        model.lm_head.register_forward_hook(lambda *call, rows=rows: rows.append(call[2].shape[:-1].numel()))
        found.append(evaluate(engine, sets, most_batches=None)[0])
        rows.clear()  # of the trial whether chunks add up to the model's own loss
        assert evaluate(engine, sets, most_batches=None)[0].loss == found[-1].loss
        assert rows == ([4] * 6 if chunk else [24])
    assert found[0].count == found[1].count == 7 + 11
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-6)


def test_tokens_have_equal_weight_and_batches_without_any_are_passed_over() -> None:
    _, _, engine, _ = start()
    ids = torch.randint(0, 128, (1, 12), generator=torch.Generator().manual_seed(2))

    def batch(first: int) -> dict[str, torch.Tensor]:
        labels = ids.clone()
        labels[:, :first] = -100
        return {"input_ids": ids, "labels": labels}

    def loss(*firsts: int) -> Evaluation:
        sets = [EvalSet(name="a", batches=lambda: [batch(first) for first in firsts])]
        return evaluate(engine, sets, most_batches=None)[0]

    most, few = loss(1), loss(10)
    assert (most.count, few.count) == (11, 2)
    assert loss(1, 12, 10).loss == pytest.approx((11 * most.loss + 2 * few.loss) / 13, rel=1e-9)
    with pytest.raises(DataError, match="set a has no token with a label"):
        loss(12)
    assert Evaluation(name="a", loss=1e9, count=1, seconds=0.0).perplexity == math.inf


def test_batches_of_a_set_fetch_each_layer_once_with_the_loss_of_single_ones() -> None:
    """Seven batches of one row, in the memory of two micro-batches of four rows each."""
    batch = StepBatch(micro_batch_size=4, seq_len=12, num_micro_batches=2)
    ids = torch.randint(0, 128, (7, 1, 12), generator=torch.Generator().manual_seed(4))
    sets = [EvalSet(name="a", batches=lambda: [{"input_ids": row, "labels": row} for row in ids])]
    found = []
    for planned_tokens in (96, 0):
        _, _, engine, _ = start(lockstep=2, batch=batch)
        engine.together.micro_batch_tokens, engine.together.planned_tokens = (
            1,
            planned_tokens,
        )  # else one after the other
        before = engine.counts.fetches
        found.append((evaluate(engine, sets, most_batches=None)[0].loss, engine.counts.fetches - before))
    assert found[0][0] == found[1][0]
    num_layers = len(engine.arrangement.layers)
    assert found[0][1] == num_layers
    assert found[1][1] > 3 * num_layers


def stand_in(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """Let the n-th evaluation of a run, at the steps 2, 4, 6 ..., have the n-th loss."""

    def told(engine: Any, sets: Any, **_: Any) -> list[Evaluation]:
        number = engine.optimizer.steps[next(iter(engine.optimizer.steps))] // 2 - 1
        return [Evaluation(name="val", loss=losses[number], count=1, seconds=0.0)]

    monkeypatch.setattr("megatrain.train.evaluate.evaluator.evaluate", told)


def test_the_best_checkpoint_is_kept_with_its_metric_and_left_in_hf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch, [3.0, 2.0, 2.5, 2.1, 2.2, 2.3])
    settings = {"every": 2, "load_best": True}
    config = make_config(tmp_path, data=HELD_OUT, eval=settings, checkpoint={"every": 3, "keep_last": 1})
    with caplog.at_level(logging.INFO, logger="megatrain"):
        train(config)
    run = tmp_path / "run"
    assert "done: 12 steps" in caplog.text
    assert f"; the model of step 4, the best one, is in {run / 'hf'}" in caplog.text
    card = (run / "hf/README.md").read_text()
    assert "| steps | 12; the model is that of step 4, the best |" in card
    assert "| val, held out | 4 | 2.0000 |" in card
    assert saved_steps(run) == [4, 12], "the best, which no cadence would have saved, and the newest"
    assert [(row["step"], row["loss"]) for row in events_of(run, "best")] == [(2, 3.0), (4, 2.0)]
    tracker = verify(run / "checkpoints/step-00000012").meta["evaluation"]
    assert (tracker["best_step"], tracker["best_loss"], tracker["best_set"]) == (4, 2.0, "val")
    best = (run / "checkpoints/step-00000004/model.safetensors").read_bytes()
    assert (run / "hf/model.safetensors").read_bytes() == best
    export_run(run, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == best
    with caplog.at_level(logging.INFO, logger="megatrain"):
        train(config)
    assert "finished" in caplog.text
    (run / "hf/model.safetensors").unlink()
    train(config)
    assert (run / "hf/model.safetensors").read_bytes() == best
    assert len(rows_of(run)) == 12
    for file in (run / "checkpoints/step-00000004").rglob("*"):
        if file.is_file():
            file.unlink()
    for folder in ("state", ""):
        (run / "checkpoints/step-00000004" / folder).rmdir()
    with pytest.raises(CheckpointError, match="no checkpoint of step 4, the best one"):
        train(config)


def test_a_run_stops_early_and_is_finished_until_its_patience_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch, [3.0, 2.0, 2.0, 2.5, 1.9, 1.8])
    options: dict[str, Any] = {"data": HELD_OUT, "checkpoint": {"every": 5}}
    with caplog.at_level(logging.INFO, logger="megatrain"):
        train(make_config(tmp_path, eval={"every": 2, "patience": 2}, **options))
    run = tmp_path / "run"
    assert len(rows_of(run)) == 8
    assert "stopped after step 8: the loss on val was 2.0000 after step 4, and no better in 2" in caplog.text
    assert (run / "hf/config.json").is_file()
    assert saved_steps(run) == [4, 5, 8]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="megatrain"):
        train(make_config(tmp_path, eval={"every": 2, "patience": 2}, **options))
    assert "is finished (8 steps)" in caplog.text
    train(make_config(tmp_path, eval={"every": 2, "patience": 3}, **options))
    assert len(rows_of(run)) == 12


def patient(patience: int, every: int | str, *, num_steps: int = 12, steps_per_epoch: int = 4) -> Evaluator:
    settings = EvalConfig(patience=patience, every=every)
    sets = [EvalSet(name="val", batches=list)]
    return Evaluator(settings, sets, num_steps=num_steps, steps_per_epoch=steps_per_epoch)


@pytest.mark.parametrize(
    ("patience", "every", "way"),
    [
        (
            3,
            "epoch",
            "4 evaluations before its last step are the fewest that can, and it has 2; eval.every=2 ",
        ),
        (3, 3, "4 evaluations before its last step are the fewest that can, and it has 3; eval.every=2 "),
        (3, 2, ""),
        (10, 1, ""),
        (
            11,
            1,
            "12 evaluations before its last step are the fewest that can, and it has 11; it is too short",
        ),
    ],
)
def test_a_patience_that_cannot_end_the_run_is_said_with_what_can(
    patience: int, every: int | str, way: str
) -> None:
    """The test counts what is due before the last step; the frequency that the note names is just enough."""
    evaluator = patient(patience, every)
    due = sum(evaluator.is_due(step) for step in range(1, 12))
    assert (due > patience) == (not way)
    note = "".join(evaluator.notes)
    assert (
        note == ""
        if not way
        else note.startswith(f"eval.patience={patience} cannot end this run early: {way}")
    )
    named = re.search(r"eval.every=(\d+) is often enough", note)
    if named is not None:
        assert not patient(patience, int(named[1])).notes
        assert patient(patience, int(named[1]) + 1).notes


@pytest.mark.parametrize("page", ["README.md", "docs/training.md"])
def test_a_patience_that_a_page_shows_can_end_the_shortest_run(page: str) -> None:
    """An epoch has 32 steps by default, or as many as the data is rows."""
    text = (Path(__file__).parents[3] / page).read_text(encoding="utf-8")
    shown = re.findall(r"--epochs (\d+) .*eval\.every=(\S+) eval\.patience=(\d+)", text)
    assert shown
    for epochs, every, patience in shown:
        assert not patient(int(patience), every, num_steps=32 * int(epochs), steps_per_epoch=32).notes
    assert text.count("eval.patience=") == len(shown)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_run_whose_evaluations_are_not_finite_is_saved_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, loss: float
) -> None:
    """It once ended in the middle of its first save, as JSON has no infinity."""
    stand_in(monkeypatch, [loss] * 6)
    with caplog.at_level(logging.INFO, logger="megatrain"):
        train(make_config(tmp_path, data=HELD_OUT, eval={"every": 2, "patience": 2, "load_best": True}))
    assert "stopped after step 4: the loss on val was finite in no evaluation (eval.patience)" in caplog.text
    assert saved_steps(tmp_path / "run") == [4]
    assert not events_of(tmp_path / "run", "best")
    assert (tmp_path / "run/hf/config.json").is_file()


def test_min_delta_nan_and_infinity_are_no_better() -> None:
    tracker = BestTracker()
    losses = [math.inf, 2.0, 1.95, 1.89]
    taken = [tracker.take(step, loss, "a", min_delta=0.1) for step, loss in enumerate(losses)]
    assert taken == [False, True, False, True]
    assert not any(tracker.take(4, loss, "a", min_delta=0.0) for loss in (math.nan, math.inf, -math.inf))
    assert (tracker.worse_in_a_row, tracker.best_loss, tracker.best_step) == (3, 1.89, 3)
    other = BestTracker()
    other.restore({**tracker.state(), "of_a_later_version": 1})
    assert other.state() == tracker.state()


def test_a_run_killed_anywhere_evaluates_saves_and_stops_as_if_nothing_had_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after every step in turn, before anything of it is saved; patience and best go on."""
    stand_in(monkeypatch, [3.0, 2.0, 2.4, 2.5, 2.6, 1.0])
    options: dict[str, Any] = {
        "data": HELD_OUT,
        "eval": {"every": 2, "patience": 3, "load_best": True},
        "checkpoint": {"every": 3, "keep_last": 2},
    }
    train(make_config(tmp_path, "whole", **options))
    step = loop.train_step

    class Killed(BaseException):
        pass

    for last in range(1, 10):

        def killing(run: Any, last: int = last) -> Any:
            row = step(run)
            if run.step == last:
                raise Killed
            return row

        with monkeypatch.context() as patch:
            patch.setattr(loop, "train_step", killing)
            with pytest.raises(Killed):
                train(make_config(tmp_path, "killed", **options))
    train(make_config(tmp_path, "killed", **options))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert saved_steps(killed) == saved_steps(whole) == [4, 9, 10]
    assert losses_of(killed) == losses_of(whole)
    assert [row["loss"] for row in rows_of(killed)] == [row["loss"] for row in rows_of(whole)]
    left, right = state_of(killed), state_of(whole)
    assert all(torch.equal(left[name], tensor) for name, tensor in right.items())
    newest = "checkpoints/step-00000010"
    for name in ("evaluation", "losses", "rng", "data", "tokens", "targets"):
        assert verify(killed / newest).meta[name] == verify(whole / newest).meta[name], name


def test_epochs_are_passes_over_the_data_that_is_trained_on(tmp_path: Path) -> None:
    """And `eval.every: epoch/3` evaluates three times in each; `checkpoint.every: epoch` saves in the end."""
    settings: dict[str, Any] = {
        "train": {"steps": None, "epochs": 1.5, "grad_accumulation": 12},
        "optim": {"warmup_steps": 0.25},
        "eval": {"every": "epoch/3", "keep_best": False},
        "checkpoint": {"every": "epoch", "keep_last": None},
    }
    train(make_config(tmp_path, data=HELD_OUT, **settings))
    run = tmp_path / "run"
    meta = verify(max((run / "checkpoints").iterdir())).meta
    num_rows = int(meta["data"]["fingerprint"].partition("x")[0])
    per_epoch = -(-num_rows // 24)
    assert meta["step"] == math.ceil(1.5 * per_epoch)
    third = math.ceil(per_epoch / 3)
    assert 1 < third < per_epoch / 2
    assert list(losses_of(run)) == [*range(third, meta["step"], third), meta["step"]]
    steps = [int(path.name.removeprefix("step-")) for path in sorted((run / "checkpoints").iterdir())]
    assert steps == [per_epoch, meta["step"]]
    rates = [row["lr"] for row in rows_of(run)]
    assert rates.index(max(rates)) == math.ceil(0.25 * len(rates))


def test_a_metric_that_names_no_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval\.metric is code; the eval sets are val"):
        train(make_config(tmp_path, data=HELD_OUT, eval={"metric": "code"}))
