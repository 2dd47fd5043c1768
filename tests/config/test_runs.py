"""What ranks take of a step's micro-batches, and which partial sums there are between rounds."""

from __future__ import annotations

import pytest

from megatrain.config.runs import Runs, StepSums, SumRoom, in_order


def test_ranks_take_turns_where_rounds_hold_whole_runs() -> None:
    assert Runs(8, 1).parts(2, 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert Runs(4, 2).parts(2, 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert Runs(2, 4).parts(2, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]  # two rounds of one run
    assert Runs(8, 1).parts(4, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]  # one round
    assert Runs(8, 1).parts(3, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]  # rounds are not alike
    assert Runs(4, 1).parts(1, 4, sequence=2) == [[0, 2], [0, 2], [1, 3], [1, 3]]


def test_what_ranks_have_found_is_put_in_the_order_of_one() -> None:
    parts = Runs(4, 1).parts(1, 4, sequence=2)
    found = [[f"{number}{'ab'[rank % 2]}" for number in own] for rank, own in enumerate(parts)]
    assert in_order(parts, found, sequence=2) == ["0a", "1a", "2a", "3a", "0b", "1b", "2b", "3b"]


def test_a_round_joins_sums_as_a_binary_counter_carries() -> None:
    """Of 8 rounds of 4 ranks: 7 shares are loaded and 7 left, of which 3 wait at a time."""
    sums = StepSums.of(Runs(8, 2), 2, num_ranks=4)
    assert [each.loaded for each in sums.by_round if each.loaded] == [
        range(1),
        range(2),
        range(1, 2),
        range(3),
    ]
    assert [each.left.start for each in sums.by_round] == [0, 0, 1, 0, 1, 1, 2, 0]
    assert all(each.are_shares and each.exchanges for each in sums.by_round)
    assert sums.between(is_wide=True) == SumRoom(0, 3, 4)
    assert sums.on_device == SumRoom(1, 3, 4)


@pytest.mark.parametrize(("num_ranks", "sequence"), [(4, 1), (2, 2)])
def test_sums_of_parts_of_runs_wait_whole_and_are_exchanged_once(num_ranks: int, sequence: int) -> None:
    lockstep = 1 if sequence == 1 else 2  # those who share out rows alone have nobody to take turns with
    sums = StepSums.of(Runs(4, 2), lockstep, num_ranks, sequence)
    assert [each.exchanges for each in sums.by_round] == [False] * (len(sums.rounds) - 1) + [True]
    assert sums.between(is_wide=True).shares == 0
    assert sums.between(is_wide=True).whole == (3 if sequence == 1 else 2)
