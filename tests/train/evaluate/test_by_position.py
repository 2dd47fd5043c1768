"""The loss of an evaluation by ranges of positions, from the pass that gives its mean."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain.model.head.form import Form
from megatrain.model.head.linear import LinearHead
from megatrain.model.head.positions import PositionSums, range_name
from megatrain.train.evaluate.losses import EvalSet, Evaluation, evaluate
from megatrain.train.loop import train
from megatrain.train.report.collect import read_run
from megatrain.train.report.page import facts_of
from megatrain.train.run_data import make_eval_sets
from tests.families import FAMILIES
from tests.stream.runs import start
from tests.train.project import make_config, write_corpus, write_model_config

LONG = 2300


def rows_of_documents() -> dict[str, Tensor]:
    """Return two rows: a document of 2,300 tokens, and one of 1,300 beside ten of 100."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 128, (2, LONG), generator=generator)
    positions = torch.stack([torch.arange(LONG), torch.cat([torch.arange(1300), torch.arange(1000) % 100])])
    labels = ids.clone()
    labels[positions < 3] = -100
    labels[0, 1500:1600] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def expected_of(model: Any, batch: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
    """Return mean and number of a resident model's losses of tokens, by the position of the target."""
    with torch.no_grad():
        given = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**given, use_cache=False).logits.double()  # with a cache, documents are not told apart
    labels = batch["labels"][:, 1:]
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none")
    positions = batch["position_ids"][:, 1:]
    found = {}
    for name, low, high in (
        ("0-1k", 0, 1024),
        ("1k-2k", 1024, 2048),
        ("2k-4k", 2048, 4096),
    ):
        inside = (positions >= low) & (positions < high) & (labels != -100)
        found[name] = float(losses[inside].mean()), int(inside.sum())
    return found


@pytest.mark.parametrize("chunk", [None, 700])
@pytest.mark.parametrize("is_fused", [False, True])
def test_losses_by_position_are_those_of_the_resident_model(chunk: int | None, is_fused: bool) -> None:
    """Of documents in packed rows, from one pass: no chunk of the head is larger than it may be."""
    config = FAMILIES["llama"]()
    config.max_position_embeddings = LONG
    model, reference, engine, _ = start(config=config, head_chunk_tokens=chunk, device="cpu")
    if is_fused:
        engine._model_forward.head.linear = LinearHead(model.lm_head, Form())
    sizes: list[int] = []
    if not is_fused:
        model.lm_head.register_forward_hook(lambda *call: sizes.append(call[2].shape[:-1].numel()))
    batch = rows_of_documents()
    halves = [{name: value[row : row + 1] for name, value in batch.items()} for row in (0, 1)]
    (whole,) = evaluate(
        engine, [EvalSet(name="a", batches=lambda: [batch], by_position=True)], most_batches=None
    )
    (parts,) = evaluate(
        engine, [EvalSet(name="a", batches=lambda: halves, by_position=True)], most_batches=None
    )
    (plain,) = evaluate(engine, [EvalSet(name="a", batches=lambda: [batch])], most_batches=None)
    expected = expected_of(reference.model, batch)
    assert [*expected] == [*whole.by_position]
    for name, (loss, count) in expected.items():
        assert whole.by_position[name] == (pytest.approx(loss, rel=1e-5), count), name
        assert parts.by_position[name] == (pytest.approx(loss, rel=1e-5), count), name
    assert sum(count for _, count in expected.values()) == whole.count
    total = sum(loss * count for loss, count in whole.by_position.values())
    assert total / whole.count == pytest.approx(whole.loss, rel=1e-6)
    assert plain.loss == pytest.approx(whole.loss, rel=1e-6)
    assert plain.by_position == {}
    assert max(sizes, default=0) <= (chunk or 1 << 22)


class _OneOfTwo:
    """A rank of two, which have met already: `gather_values` returns what both have told."""

    size = 2

    def __init__(self, rank: int, told: dict[int, Any]) -> None:
        self.rank, self._told = rank, told

    def gather_values(self, values: Any) -> list[Any]:
        self._told[self.rank] = json.loads(json.dumps(values))
        return [self._told.get(rank, []) for rank in range(2)]


def test_two_ranks_find_what_one_finds() -> None:
    config = FAMILIES["llama"]()
    config.max_position_embeddings = LONG
    _, _, engine, _ = start(config=config, device="cpu")
    batch = rows_of_documents()
    halves = [{name: value[row : row + 1] for name, value in batch.items()} for row in (0, 1)]
    sets = [EvalSet(name="a", batches=lambda: halves, by_position=True)]
    (alone,) = evaluate(engine, sets, most_batches=None)
    told: dict[int, Any] = {}
    found = [evaluate(engine, sets, most_batches=None, ranks=_OneOfTwo(rank, told)) for rank in (0, 1, 0)]  # type: ignore[arg-type]
    for (each,) in found[1:]:
        assert (each.loss, each.by_position) == (alone.loss, alone.by_position)


def test_what_routers_add_belongs_to_no_position() -> None:
    config = FAMILIES["mixtral"]()
    config.max_position_embeddings = LONG
    assert config.output_router_logits
    _, reference, engine, _ = start(config=config, device="cpu")
    batch = rows_of_documents()
    sets = [EvalSet(name="a", batches=lambda: [batch], by_position=True)]
    (found,) = evaluate(engine, sets, most_batches=None)
    (plain,) = evaluate(engine, [EvalSet(name="a", batches=lambda: [batch])], most_batches=None)
    for name, (loss, count) in expected_of(reference.model, batch).items():
        assert found.by_position[name] == (pytest.approx(loss, rel=1e-5), count), name
    tokens = sum(loss * count for loss, count in found.by_position.values()) / found.count
    assert found.loss > tokens + 1e-3
    assert found.loss == pytest.approx(plain.loss, rel=1e-6)


def test_ranges_double_and_cut_only_where_targets_change_range() -> None:
    names = [range_name(number) for number in range(12)]
    assert names[:3] == ["0-1k", "1k-2k", "2k-4k"]
    assert names[9:] == ["256k-512k", "512k-1M", "1M-2M"]
    length = 1 << 20
    labels = torch.ones((1, length), dtype=torch.int64)
    sums = PositionSums({"labels": labels})
    assert sums.ends == [*(1023 + 1024 * (2**n - 1) for n in range(10)), length]
    assert sums.counts == [1023, *(1024 * 2**n for n in range(10))]
    short = torch.arange(length)[None] % 1000
    assert PositionSums({"labels": labels, "position_ids": short}).ends == [length]
    labels[:, :-5] = -100
    assert PositionSums({"labels": labels}).ends == [length], "a prompt that is not trained on cuts nothing"


def test_a_run_tells_and_records_losses_by_position(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model").mkdir()
    small = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    write_model_config(tmp_path / "model", max_position_embeddings=4096, attention_dropout=0.0, **small)
    write_corpus(tmp_path / "corpus.txt", 8000)
    sections: dict[str, dict[str, Any]] = {
        "data": {"seq_len": 3000, "val_size": 0.3},
        "train": {"steps": 1, "micro_batch_size": 1, "grad_accumulation": 1},
        "optim": {"warmup_steps": 0},
    }
    with caplog.at_level("INFO"):
        train(make_config(tmp_path, "run", **sections))
    rows = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row["event"] == "evaluation"]
    (said,) = [text for text in caplog.messages if "evaluation after step 1" in text]
    names = ["0-1k", "1k-2k", "2k-4k"]
    total = sum(row[f"loss/{name}"] * row[f"tokens/{name}"] for name in names)
    assert sum(row[f"tokens/{name}"] for name in names) == row["tokens"]
    assert total / row["tokens"] == pytest.approx(row["loss"], rel=1e-6)
    assert row["tokens/0-1k"] * 1024 == row["tokens/1k-2k"] * 1023, "the first token of a row is no target"
    at = ", ".join(f"{name} {row[f'loss/{name}']:.4f}" for name in names)
    assert f"; loss by position: {at}" in said
    run = read_run(tmp_path / "run")
    assert ["val by position", at] in facts_of(run, run.state())


def test_short_rows_and_judged_answers_have_no_ranges(tmp_path: Path) -> None:
    def wants(seq_len: int, **sections: Any) -> bool:
        config = make_config(tmp_path, **sections)
        (one,) = make_eval_sets(config, {"val": (np.zeros((2, seq_len), np.int32), "join")})
        return one.by_position

    assert wants(2049)
    assert not wants(2048)
    assert not wants(2049, eval={"by_position": False})
    assert not wants(2049, train={"loss": "orpo"})


def test_an_evaluation_s_numbers_and_words() -> None:
    one = Evaluation(
        name="a", loss=2.0, count=30, seconds=1.0, by_position={"0-1k": (2.5, 10), "1k-2k": (1.75, 20)}
    )
    assert one.numbers == {
        "loss": 2.0,
        "perplexity": math.exp(2.0),
        "tokens": 30,
        "loss/0-1k": 2.5,
        "tokens/0-1k": 10,
        "loss/1k-2k": 1.75,
        "tokens/1k-2k": 20,
    }
    assert (
        one.describe()
        == "loss 2.0000, perplexity 7.389, 30 tokens; loss by position: 0-1k 2.5000, 1k-2k 1.7500"
    )
