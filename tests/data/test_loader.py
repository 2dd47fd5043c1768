"""The order of the data: each window once per epoch, and the same again from any step."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.data.loader import PackedLoader, epoch_order
from megatrain.errors import DataError

EXPECTED_ORDER = [2, 4, 1, 3, 6, 5, 0, 7]  # of 8 windows, seed 3, epoch 2: fixed for ever


def make_windows(num_windows: int, seq_len: int = 3) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.arange(num_windows * seq_len, dtype=np.int32).reshape(num_windows, seq_len)


def make_loader(
    num_windows: int, batch: int = 1, count: int = 1, seed: int = 0, shuffle: bool = True
) -> PackedLoader:
    return PackedLoader(
        make_windows(num_windows), micro_batch_size=batch, num_micro_batches=count, seed=seed, shuffle=shuffle
    )


def rows_of(step: list[dict[str, torch.Tensor]]) -> list[int]:
    """Which windows a step holds: window r begins with the token 3 r."""
    return [int(first) // 3 for micro_batch in step for first in micro_batch["input_ids"][:, 0]]


def test_step_is_micro_batches_of_ids_and_labels() -> None:
    step = next(make_loader(10, batch=2, count=3, shuffle=False))
    assert len(step) == 3
    assert step[1]["input_ids"].tolist() == [[6, 7, 8], [9, 10, 11]]
    for micro_batch in step:
        assert sorted(micro_batch) == ["input_ids", "labels"]
        assert micro_batch["labels"].dtype == micro_batch["input_ids"].dtype == torch.int64
        assert torch.equal(micro_batch["labels"], micro_batch["input_ids"])
        assert micro_batch["labels"].data_ptr() != micro_batch["input_ids"].data_ptr()


@given(
    num_windows=st.integers(1, 13),
    batch=st.integers(1, 4),
    count=st.integers(1, 3),
    seed=st.integers(0, 2**63 - 1),
    shuffle=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_three_epochs_visit_each_window_once_each_and_resume_from_every_step(
    num_windows: int, batch: int, count: int, seed: int, shuffle: bool
) -> None:
    loader = make_loader(num_windows, batch, count, seed, shuffle)
    num_steps = 3 * loader.steps_per_epoch
    states, steps = [], []
    for _ in range(num_steps):
        states.append(json.loads(json.dumps(loader.state())))
        steps.append(rows_of(next(loader)))
    visited = [row for step in steps for row in step]
    for epoch in range(3):
        rows = visited[epoch * num_windows : (epoch + 1) * num_windows]
        assert sorted(rows) == list(range(num_windows))
        assert shuffle or rows == list(range(num_windows))
    for at, state in enumerate(states):
        resumed = make_loader(num_windows, batch, count, seed, shuffle)
        resumed.restore(state)
        assert [rows_of(step) for step in islice(resumed, num_steps - at)] == steps[at:]


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch_order(100, seed=seed, epoch=epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_order_is_the_same_in_every_process_and_version() -> None:
    assert epoch_order(8, seed=3, epoch=2).tolist() == EXPECTED_ORDER


def test_order_is_uniform() -> None:
    """Each of 4 windows comes first in a quarter of 4000 epochs, within 5 standard deviations (27)."""
    first = [int(epoch_order(4, seed=0, epoch=epoch)[0]) for epoch in range(4000)]
    for row in range(4):
        assert abs(first.count(row) - 1000) < 137


def test_size_of_a_step_may_change_on_resume() -> None:
    loader = make_loader(10, batch=2)
    done = rows_of(next(loader))
    resumed = make_loader(10, batch=1, count=4)
    resumed.restore(loader.state())
    rest = [row for step in islice(resumed, 2) for row in rows_of(step)]
    assert sorted(done + rest) == list(range(10))


def test_resume_on_other_data_is_refused() -> None:
    state = make_loader(10).state()
    for windows in (make_windows(11), make_windows(10)[::-1], make_windows(6, 5)):
        other = PackedLoader(windows, micro_batch_size=1, num_micro_batches=1, seed=0)
        with pytest.raises(DataError, match="the data is not that of the run being resumed") as caught:
            other.restore(state)
        assert caught.value.exit_code == 4
    with pytest.raises(DataError, match=r"data\.seed is 1, but the run being resumed used 0"):
        make_loader(10, seed=1).restore(state)
    with pytest.raises(DataError, match=r"data\.shuffle is False, .* used True"):
        make_loader(10, shuffle=False).restore(state)


def test_steps_per_epoch_counts_the_started_step() -> None:
    assert [make_loader(10, batch=2, count=count).steps_per_epoch for count in (1, 2, 5, 6)] == [5, 3, 1, 1]
