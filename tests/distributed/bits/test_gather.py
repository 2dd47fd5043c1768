"""Weights of which every rank fetches a piece, and which ranks gather."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from megatrain.config.choice import StepBatch
from megatrain.layout.ownership import PIECE_ALIGNMENT, piece_bytes
from megatrain.plan.program.block_size import BlockSize
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.spec import StepSpec
from megatrain.plan.program.step import step_program
from megatrain.plan.program.visits import LayerPlan
from megatrain.stream.evaluate import losses
from tests.distributed.threads import RankLanes, ThreadRanks, Turns
from tests.families import FAMILIES
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER


@pytest.mark.parametrize(
    ("nbytes", "size", "piece"),
    [(4096, 2, 2048), (4095, 2, 1792), (1023, 4, 0), (1024, 4, 256), (10**9 + 7, 8, 124_999_936)],
)
def test_pieces_are_equal_and_leave_less_than_an_alignment_per_rank(
    nbytes: int, size: int, piece: int
) -> None:
    assert piece_bytes(nbytes, size) == piece
    assert 0 <= nbytes - size * piece < size * PIECE_ALIGNMENT


def test_every_fetch_of_a_step_is_of_a_piece_and_a_gather_follows_it() -> None:
    fetched, gathered = [1000, 2000, 3000, 100], [500, 1500, 2000, 0]
    sizes = [
        BlockSize(
            is_streamed=block < 3,
            is_trained=True,
            fetch_bytes=fetched[block],
            offload_bytes=10,
            accumulator_bytes=20,
            gather_bytes=gathered[block],
        )
        for block in range(4)
    ]
    layers = [LayerPlan((block,)) for block in range(3)]
    spec = StepSpec(sizes=sizes, layers=layers, num_slots=2, num_gradient_buffers=2, num_ranks=4)
    alone = step_program(spec, [[1, 1]])
    together = step_program(replace(spec, gathers=True), [[1, 1]])
    assert alone.count("gather") == 0
    assert together.count("fetch") == alone.count("fetch") == 5
    assert together.count("gather") == 4  # the last block is too small
    assert together.nbytes("fetch") + together.nbytes("gather") == alone.nbytes("fetch")
    for fetch, gather in zip(together.operations, together.operations[1:], strict=False):
        if fetch.label == "fetch" and fetch.block < 3:
            assert (gather.label, gather.lane, gather.block) == ("gather", Lane.GATHER, fetch.block)
            assert gather.writes == fetch.writes == gather.reads
            assert (fetch.nbytes, gather.nbytes) == (
                fetched[fetch.block] - gathered[fetch.block],
                gathered[fetch.block],
            )


def moved(ranks: ThreadRanks | None, *, gathers: bool = False) -> dict[str, Any]:
    """Train two steps with an evaluation by the first rank between them; tell losses and bytes."""
    if ranks is not None:
        ranks.gathers = gathers
    batch = StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=4, num_runs=4)
    device: Any = "checked" if ranks is None else RankLanes(ranks.turns, ranks.rank)
    engine = attach_plainly(make_model(FAMILIES["llama_tied"]()), device=device, batch=batch, ranks=ranks)
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    rank = 0 if ranks is None else ranks.rank
    told: dict[str, Any] = {"losses": [], "evaluated": []}
    for step in range(3):
        batches = make_batches(4, seed=step)
        own = [batches[number] for number in engine.parts(4)[rank]]
        told["losses"].append(float(engine.forward_backward(own)))
        optimizer.step()
        if rank == 0 and step == 1:  # its slots and outer blocks hold weights now that others do not have
            engine.sync()
            found = losses(engine, make_batches(1, seed=9))
            told["evaluated"] = [float(loss) for loss, _ in found]
    told["fetch_bytes"] = engine.last_step.fetch_bytes
    told["spec"] = engine.executor.spec
    told["sums"] = engine.arrangement.binding.job.sums(engine.choice).by_round
    return told


def test_each_rank_fetches_its_part_as_the_program_says_and_one_may_evaluate_between_steps() -> None:
    alone = moved(None)
    whole = Turns(2).run(moved)
    parts = Turns(2).run(partial(moved, gathers=True))
    for told in (*whole, *parts):
        assert told["losses"] == alone["losses"]
    for told in (whole, parts):
        assert told[0]["evaluated"] == alone["evaluated"] != []
    for told in parts:
        program = step_program(told["spec"], [[1], [1]], sums=told["sums"])
        assert told["fetch_bytes"] == program.nbytes("fetch") + program.nbytes("load")
        left_out = program.nbytes("gather")
        assert told["fetch_bytes"] + left_out == whole[1]["fetch_bytes"]
        weights = program.nbytes("fetch")
        assert 0 <= weights - left_out < program.count("fetch") * 2 * PIECE_ALIGNMENT  # half of each block
