"""Ranks that share out the tokens of rows compute what one rank does, up to rounding."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.config.choice import StepBatch
from megatrain.config.policies import POLICY_NAMES
from megatrain.errors import ConfigError, ModelError
from megatrain.hardware import load_machine
from megatrain.model.profile.count import count_anatomy
from megatrain.model.sequence import attention, check
from megatrain.model.sequence.rows import cut_rows
from megatrain.plan.search.planner import plan_of
from megatrain.plan.search.request import Request
from megatrain.stream.evaluate import losses
from megatrain.stream.ranks import sums
from tests.distributed.processes import run_ranks
from tests.distributed.threads import RankLanes, ThreadRanks, Turns
from tests.families import FAMILIES
from tests.products import pairwise_rows
from tests.reference import Batch, attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER

WITHIN = 1e-6


def make_rows(num: int, *, seed: int, tokens: int, kind: str) -> list[Batch]:
    """Make micro-batches: `full` rows, `packed` ones of several documents, or `padded` ones."""
    batches = make_batches(num, seed=seed, tokens=tokens, padded=kind == "padded")
    if kind != "packed":
        return batches
    borders = (0, 3, tokens // 2 + 1, tokens)  # none is where a shard begins
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(borders)])
    packed: list[Batch] = []
    for batch in batches:
        labels = batch["labels"].clone()
        labels[:, borders[1:-1]] = -100
        ids = batch["input_ids"]
        packed.append({"input_ids": ids, "labels": labels, "position_ids": positions.expand_as(ids)})
    return packed


def train(
    ranks: Any,
    *,
    family: str = "llama_tied",
    sequence: int = 1,
    num_runs: int = 1,
    num_micro_batches: int = 2,
    tokens: int = 18,
    kind: str = "full",
    attention: str | None = None,
    steps: int = 1,
    out: str | None = None,
    tile_tokens: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train a family, and return losses, norms and every step's gradients."""
    config = FAMILIES[family]()
    config.output_router_logits = False
    config.num_key_value_heads = 4  # so that 4 ranks can share them out
    config.max_position_embeddings = max(tokens, config.max_position_embeddings)
    if attention is not None:
        config._attn_implementation = attention
    model = make_model(config)
    is_thread = isinstance(ranks, ThreadRanks)
    settings.setdefault("device", RankLanes(ranks.turns, ranks.rank) if is_thread else "checked")
    batch = StepBatch(
        micro_batch_size=2,
        seq_len=tokens,
        num_micro_batches=num_micro_batches,
        num_runs=num_runs,
        sequence=sequence if ranks is not None else 1,
        tile_tokens=tile_tokens,
    )
    engine = attach_plainly(model, batch=batch, ranks=ranks, **settings)
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    own = engine.parts(num_micro_batches)[0 if ranks is None else ranks.rank]
    told: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    for step in range(steps):
        batches = make_rows(num_micro_batches, seed=step, tokens=tokens, kind=kind)
        told["losses"].append(float(engine.forward_backward([batches[number] for number in own])))
        told["gradients"].append({name: each.clone() for name, each in engine.named_gradients()})
        told["norms"].append(optimizer.step().grad_norm)
    told["report"] = engine.last_step
    told["choice"] = engine.choice
    if is_thread:
        rows: Any = engine._steps._rows
        told["swapped"] = None if rows is None else rows.shards.swapped
    if out is not None:
        del told["report"], told["choice"]
        if ranks is None or ranks.rank == 0:
            torch.save(told.pop("gradients"), out)
        told.pop("gradients", None)
    return told


def as_ranks(size: int, **settings: Any) -> list[dict[str, Any]]:
    """Train with ranks that are threads."""
    return Turns(size).run(lambda ranks: train(ranks, **settings))


def furthest(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest relative difference of a loss, a norm, or a parameter's gradient."""
    worst = 0.0
    for name in ("losses", "norms"):
        for one, other in zip(found[name], expected[name], strict=True):
            worst = max(worst, abs(one - other) / abs(other))
    for mine, theirs in zip(found["gradients"], expected["gradients"], strict=True):
        assert mine.keys() == theirs.keys()
        whole = torch.cat([each.flatten() for each in theirs.values()]).norm()
        for name, each in mine.items():
            worst = max(worst, float((each - theirs[name]).norm() / max(theirs[name].norm(), 1e-3 * whole)))
    return worst


ROWS: list[tuple[int, int, dict[str, Any]]] = [
    (2, 2, {"kind": "packed", "tile_tokens": 5, "head_chunk_tokens": 7}),
    (4, 2, {"family": "qwen2", "kind": "packed", "lockstep": 2, "activations": "recompute_cheap"}),
    (4, 4, {"family": "gemma2", "kind": "padded", "activations": "keep", "fragments": True}),
    (2, 2, {"family": "deepseek_v3", "activations": "offload", "head_chunk_tokens": 5}),
    (2, 2, {"family": "gemma2", "kind": "packed", "attention": "tiled"}),
    (4, 4, {"family": "gemma3_text", "kind": "padded", "attention": "tiled"}),
]
"""Ranks, how many of them share out rows, and the rest: what `make test` runs."""

AXES = {
    "family": (
        "llama",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "mixtral",
        "gpt2",
        "phi",
        "opt",
        "granite",
    ),
    "kind": ("full", "packed", "padded"),
    "ranks": ((2, 2), (4, 2), (4, 4)),
    "activations": POLICY_NAMES,
    "lockstep": (1, 2),
    "num_micro_batches": (2, 4),
    "fragments": (False, True),
    "boundaries": ("device", "host"),
    "attention": (None, "eager", "tiled"),
    "head_chunk_tokens": (None, 5),
}
FULL = [(*row.pop("ranks"), row) for row in pairwise_rows(AXES)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("size", "sequence", "settings"),
    [*ROWS, *(pytest.param(*row, marks=pytest.mark.parity) for row in FULL)],
    ids=str,
)
def test_ranks_that_share_out_rows_compute_what_one_does(
    size: int, sequence: int, settings: dict[str, Any]
) -> None:
    alone = train(None, **settings)
    told = as_ranks(size, sequence=sequence, num_runs=size // sequence, **settings)
    assert furthest(told[0], alone) <= WITHIN
    assert all(each["losses"] == told[0]["losses"] for each in told)


def test_with_the_same_shards_more_ranks_give_the_same_bits() -> None:
    """The tree is over the runs of a shard first, and over shards then."""
    settings = {"num_micro_batches": 4, "num_runs": 4, "sequence": 2}
    few, many = as_ranks(2, **settings)[0], as_ranks(4, **settings)[0]
    assert few["norms"] == many["norms"]
    for one, other in zip(few["gradients"], many["gradients"], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("activations", "forwards"),
    [
        ("recompute_cheap", 2),
        ("drop_boundary", 2.75),
        *(
            pytest.param(name, forwards, marks=pytest.mark.parity)
            for name, forwards in (("keep", 1), ("offload", 1), ("recompute", 2))
        ),
    ],
)
def test_all_ranks_exchange_in_the_same_order(activations: str, forwards: float) -> None:
    """In a backward that computes a layer again, ranks meet in its attention again: each as often."""
    shape = {"activations": activations, "num_micro_batches": 4, "lockstep": 2, "tokens": 16}
    told = as_ranks(4, sequence=2, num_runs=2, **shape)
    orders = [each["swapped"] for each in told]
    assert orders[0] == orders[1] == orders[2] == orders[3]
    of_attention = [shape for shape in orders[0] if len(shape) == 5]  # and not of masks
    layers, micro_batches, tensors = 4, 2, 4
    assert len(of_attention) == layers * micro_batches * tensors * (forwards + 1)


@pytest.mark.parametrize(
    "activations",
    [
        "recompute",
        *(pytest.param(name, marks=pytest.mark.parity) for name in ("keep", "offload", "recompute_cheap")),
    ],
)
def test_ranks_swap_what_was_planned(activations: str) -> None:
    told = as_ranks(2, sequence=2, tokens=16, activations=activations)[0]
    shape: dict[str, Any] = {"micro_batch_size": 2, "seq_len": 16}
    config = FAMILIES["llama_tied"]()
    config.num_key_value_heads = 4
    anatomy = count_anatomy(config, **shape, precision="fp32", device_type="cpu", sequence=2)
    batch = StepBatch(**shape, num_micro_batches=2, num_ranks=2, sequence=2)
    plan = plan_of(Request(spec=load_machine("cpu-laptop"), anatomy=anatomy, batch=batch), told["choice"])
    of_masks = 2 * 2 * 8 * 8  # micro-batches, rows, tokens of a shard, bytes of a position
    assert told["report"].swapped_bytes == plan.bytes_per_step["swapped"] + of_masks
    assert plan.batch.tokens == 2 * 2 * 8
    flops = anatomy.model_flops_per_token * plan.batch.tokens
    assert told["report"].model_flops == pytest.approx(flops)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.parity)])
def test_processes_share_out_rows(tmp_path: Path, size: int) -> None:
    settings: dict[str, Any] = {"kind": "packed", "num_micro_batches": 1, "device": "cpu"}
    alone = train(None, **settings)
    out = str(tmp_path / "gradients")
    told = run_ranks(tmp_path / "logs", size, train, sequence=size, out=out, **settings)
    assert furthest({**told[0], "gradients": torch.load(out)}, alone) <= WITHIN


@pytest.mark.parity
@pytest.mark.parametrize("size", [2, 4])
def test_rows_of_16k_tokens(size: int) -> None:
    settings: dict[str, Any] = {"tokens": 16_384, "num_micro_batches": 1}
    told = as_ranks(size, sequence=size, **settings)
    assert furthest(told[0], train(None, **settings)) <= WITHIN


def test_one_rank_evaluates_whole_rows_alone() -> None:
    batches = make_rows(2, seed=7, tokens=18, kind="packed")

    def evaluate(ranks: Any) -> list[float]:
        model = make_model(FAMILIES["llama"]())
        batch = StepBatch(micro_batch_size=2, seq_len=18, num_micro_batches=1, sequence=2 if ranks else 1)
        engine = attach_plainly(model, batch=batch, ranks=ranks)
        engine.forward_backward(batches[:1])
        if ranks is not None and ranks.rank > 0:
            return []
        return [float(loss) for loss, _ in losses(engine, batches)]

    assert Turns(2).run(evaluate)[0] == evaluate(None)


# -- faults ------------------------------------------------------------------------------------------------


def test_documents_told_apart_by_the_positions_of_a_shard_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "gather", lambda mine, rows: mine.repeat(1, rows.number))
    with pytest.raises(ModelError, match=r"differs by .* tokens see others elsewhere than in attention"):
        as_ranks(2, sequence=2, kind="packed")
    monkeypatch.setattr("megatrain.stream.attach.attach.refuse_model", lambda *_: None)
    told = as_ranks(2, sequence=2, kind="packed")
    assert furthest(told[0], train(None, kind="packed")) > 0.1  # passes unnoticed without the check


def test_labels_that_are_shifted_in_shards_are_found_at_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifts_late(batch: Batch, shards: Any) -> dict[str, Any]:
        cut = cut_rows({**batch, "shift_labels": batch["labels"]}, shards)
        late = torch.nn.functional.pad(cut["labels"], (0, 1), value=-100)[:, 1:].contiguous()
        return {**cut, "shift_labels": late}

    monkeypatch.setattr(check, "cut_rows", shifts_late)
    with pytest.raises(ModelError, match="its loss is another"):
        as_ranks(2, sequence=2)


def test_a_tree_over_ranks_in_their_order_depends_on_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "_by_shard", lambda parts, _: [sums.tree(list(parts))])
    with pytest.raises(AssertionError):
        test_with_the_same_shards_more_ranks_give_the_same_bits()


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"compile": "on"}, ConfigError, "compile is on and parallel.sequence is 2"),
        ({"sequence": 4}, ConfigError, "parallel.sequence is 4, .* but 2 train together; .*=2"),
        ({"family": "jamba"}, ModelError, "layers that carry a state from token to token"),
        ({"family": "falcon"}, ModelError, "cannot be called with a part of a row"),
    ],
)
def test_what_ranks_cannot_share_out_is_refused(
    settings: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        as_ranks(2, **{"sequence": 2, **settings})


def test_one_rank_alone_shares_out_nothing() -> None:
    batch = StepBatch(micro_batch_size=1, seq_len=8, num_micro_batches=1, sequence=2)
    with pytest.raises(ConfigError, match=r"but 1 trains alone; .* parallel.sequence=1"):
        attach_plainly(make_model(FAMILIES["llama"]()), batch=batch)


def test_a_model_is_whole_after_it_was_refused() -> None:
    def attach(ranks: Any) -> Tensor:
        model = make_model(FAMILIES["falcon"]())
        batch = StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=2, sequence=2)
        with pytest.raises(ModelError):
            attach_plainly(model, batch=batch, ranks=ranks)
        assert model._megatrain_engine is None
        return model(**make_batches(1)[0]).loss

    before = make_model(FAMILIES["falcon"]())(**make_batches(1)[0]).loss
    assert Turns(2).run(attach) == [before, before]
