"""Exchanges: in a node first, then among nodes, with the bits of a tree over all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.layout import exchange as pieces
from megatrain.layout.exchange import PIECE_NUMEL, Exchange
from megatrain.layout.pools import ROOM_ALIGN_BYTES
from megatrain.stream.ranks.sums import Room, owned_sums
from megatrain.stream.ranks.sums import tree as add_by_tree
from tests.distributed.processes import run_ranks
from tests.distributed.threads import ThreadRanks, Turns

SHAPES = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4), (16, 4)]

CASES = [(shape, sequence) for shape in SHAPES for sequence in (1, 2, 4) if sequence <= shape[0]]


def counts_of(size: int) -> list[int]:
    """Return what ranks own: unequally much, and one nothing."""
    return [0 if rank == 1 else 3 + rank % 3 for rank in range(size)]


def own_of(size: int, rank: int) -> Tensor:
    """Make what a rank has: numbers of which no two orders of additions have the same bits."""
    generator = torch.Generator().manual_seed(rank)
    scale = 10.0 ** torch.randint(-4, 4, (sum(counts_of(size)),), generator=generator)
    return torch.randn(scale.numel(), generator=generator) * scale


def tree(leaves: list[Tensor]) -> Tensor:
    while len(leaves) > 1:
        leaves = [left + right for left, right in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0]


def sums_of(
    ranks: Any, exchange: Exchange, mine: Tensor, counts: list[int], *, is_on_device: bool = False
) -> list[Tensor]:
    """Put the pieces of this rank's sums behind one another; a device has the room that a plan counts."""
    found: list[list[Tensor]] = []

    def take(start: int, sums: list[Tensor]) -> None:
        assert start == sum(len(piece[0]) for piece in found) or not len(sums[0])
        found.append([each.clone() for each in sums])

    nbytes = 4 * exchange.passing_numel(max(counts)) + 3 * ROOM_ALIGN_BYTES
    memory = torch.empty(nbytes, dtype=torch.uint8) if is_on_device else None
    owned_sums(ranks, exchange, mine, counts, take, Room(memory))
    return [torch.cat(pieces) for pieces in zip(*found, strict=True)]


@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize("piece_numel", [2, PIECE_NUMEL])
@pytest.mark.parametrize(("shape", "sequence"), CASES, ids=str)
def test_sums_have_the_bits_of_one_tree(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int],
    sequence: int,
    piece_numel: int,
    is_on_device: bool,
) -> None:
    """Over the ranks in order, or, where ranks share out rows, over those of each shard first."""
    monkeypatch.setattr(pieces, "PIECE_NUMEL", piece_numel)
    size, num_nodes = shape
    order = [rank for shard in range(sequence) for rank in range(shard, size, sequence)]
    whole = tree([own_of(size, rank) for rank in order]).split(counts_of(size))

    def one(ranks: ThreadRanks) -> Tensor:
        exchange = Exchange(size, num_nodes, sequence)
        return add_by_tree(
            sums_of(ranks, exchange, own_of(size, ranks.rank), counts_of(size), is_on_device=is_on_device)
        )

    found = Turns(size, num_nodes).run(one)
    for rank in range(size):
        assert torch.equal(found[rank], whole[rank]), f"rank {rank}"


def test_a_node_sends_others_the_sum_of_its_ranks() -> None:
    """Of 1,600 elements: to the node all that others there own, to other nodes one sum of its own rail's."""

    def one(ranks: ThreadRanks) -> tuple[int, int]:
        sums_of(ranks, Exchange(16, 4), torch.ones(1600), [100] * 16)
        return ranks.sent["near"], ranks.sent["rail"]

    assert Turns(16, 4).run(one) == [(4 * 1200, 4 * 300)] * 16
    assert Exchange(16, 4).sent_bytes(1600, 400, 100) == 4 * (1200 + 300)
    assert Exchange(16, 4, sequence=2).sent_bytes(1600, 400, 100) == 4 * (1200 + 2 * 300)
    assert Exchange(16, 4).near_part == 0.8


def test_what_an_exchange_takes_does_not_grow_with_the_share() -> None:
    """Of eight ranks, 8 MiB from each and to each; a share that is one piece is sent from where it is."""
    piece = PIECE_NUMEL
    assert 4 * piece == 8 << 20
    assert [Exchange(8).passing_numel(own) for own in (100, piece)] == [800, 8 * piece]
    assert [Exchange(8).passing_numel(own) for own in (piece + 1, 9 * piece)] == [16 * piece] * 2
    assert Exchange(4, 4).passing_numel(9 * piece) == 8 * piece
    assert Exchange(16, 4).passing_numel(9 * piece) == (2 * 4 + 4) * piece
    assert Exchange(16, 4).passing_numel(100) == 800
    # of a thousand, 64 MiB at once from all, though one rank may own a whole block
    assert Exchange(1024, 128).passing_numel(9 * piece) == 2 * 8 * piece


def add_up(ranks: Any) -> list[float]:
    (found,) = sums_of(ranks, Exchange(4, 2), own_of(4, ranks.rank), counts_of(4))
    return [float(value) for value in found]


def test_processes_add_up_as_threads_do(tmp_path: Path) -> None:
    whole = tree([own_of(4, rank) for rank in range(4)])
    found = run_ranks(tmp_path / "ranks", 4, add_up, num_nodes=2)
    assert [value for own in found for value in own] == whole.tolist()
