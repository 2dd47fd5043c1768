"""Weights of which every rank fetches a piece, and which ranks gather."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.layout.ownership import PIECE_ALIGNMENT, piece_bytes
from megatrain.plan.program.block_size import BlockSize
from megatrain.plan.program.operations import Kind, Lane
from megatrain.plan.program.spec import StepSpec
from megatrain.plan.program.step import step_program
from megatrain.plan.program.visits import LayerPlan


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
    assert alone.count(Kind.GATHER) == 0
    assert together.count(Kind.FETCH) == alone.count(Kind.FETCH) == 5
    assert together.count(Kind.GATHER) == 4  # the last block is too small
    assert together.nbytes(Kind.FETCH) + together.nbytes(Kind.GATHER) == alone.nbytes(Kind.FETCH)
    for fetch, gather in zip(together.operations, together.operations[1:], strict=False):
        if fetch.kind is Kind.FETCH and fetch.block < 3:
            assert (gather.kind, gather.lane, gather.block) == (Kind.GATHER, Lane.GATHER, fetch.block)
            assert gather.writes == fetch.writes == gather.reads
            assert (fetch.nbytes, gather.nbytes) == (
                fetched[fetch.block] - gathered[fetch.block],
                gathered[fetch.block],
            )
