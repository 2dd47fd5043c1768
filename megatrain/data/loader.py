"""Windows to micro-batches, in an order that can be continued from any step.

The order of an epoch depends on the seed and the epoch's number alone, and is drawn from the raw bits of a
counter generator, which no numpy version may change. So the position is the whole state: two integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from megatrain.errors import DataError


class PackedLoader:
    """Iterator without end over the micro-batches of each step.

    Each epoch visits every window exactly once; a step may begin in one epoch and end in the next.
    """

    def __init__(
        self,
        windows: NDArray[np.int32],
        *,
        micro_batch_size: int,
        num_micro_batches: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        """Start at the first window of epoch 0.

        Args:
            windows: (num_windows, T) token ids.
            micro_batch_size: windows in a micro-batch.
            num_micro_batches: micro-batches in a step.
            seed: of the order of the windows.
            shuffle: a new random order in each epoch; else the order of `windows`.
        """
        assert windows.ndim == 2
        assert windows.size > 0
        self._windows = windows
        self._micro_batch_size = micro_batch_size
        self._num_micro_batches = num_micro_batches
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)
        self._fingerprint = fingerprint(windows)

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every window has been visited; the last may reach into the next epoch."""
        per_step = self._micro_batch_size * self._num_micro_batches
        return -(-len(self._windows) // per_step)

    def __iter__(self) -> Iterator[list[dict[str, torch.Tensor]]]:
        return self

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        """Return the next step's micro-batches: `input_ids` and `labels`, each (B, T) int64."""
        return [self._micro_batch() for _ in range(self._num_micro_batches)]

    def state(self) -> dict[str, Any]:
        """Return where the next step begins, and of which data and order; plain values for JSON."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "fingerprint": self._fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. The size of a step may have changed since.

        Raises:
            DataError: the state belongs to other data, or to another order of it.
        """
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                "the data is not that of the run being resumed (another text, tokenizer or data.seq_len); "
                "restore it, or start a new run in another output directory"
            )
        for name, ours in (("seed", self._seed), ("shuffle", self._shuffle)):
            if state[name] != ours:
                raise DataError(
                    f"data.{name} is {ours}, but the run being resumed used {state[name]}; restore it, "
                    "or start a new run in another output directory"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self._epoch)

    def _micro_batch(self) -> dict[str, torch.Tensor]:
        rows = [self._next_row() for _ in range(self._micro_batch_size)]
        input_ids = torch.from_numpy(self._windows[rows].astype(np.int64))
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    def _next_row(self) -> int:
        if self._position == len(self._windows):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        row = int(self._order[self._position])
        self._position += 1
        return row

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self._windows))
        return epoch_order(len(self._windows), seed=self._seed, epoch=epoch)


def epoch_order(num_windows: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a random permutation that depends on nothing but its arguments.

    It sorts random keys, since numpy promises the bits of Philox for ever, and not those of
    `Generator.permutation`. Equal keys keep their order.
    """
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_windows)
    return np.argsort(keys, kind="stable")


def in_batches(windows: NDArray[np.int32], num_rows: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield micro-batches of windows in their order; the last one may have fewer rows."""
    for start in range(0, len(windows), num_rows):
        input_ids = torch.from_numpy(windows[start : start + num_rows].astype(np.int64))
        yield {"input_ids": input_ids, "labels": input_ids.clone()}


def fingerprint(windows: NDArray[np.int32]) -> str:
    """Return a name for exactly these windows: their shape and the hash of their bytes."""
    digest = xxhash.xxh3_128()
    digest.update(np.ascontiguousarray(windows, dtype="<i4").data)
    return f"{windows.shape[0]}x{windows.shape[1]}-{digest.hexdigest()}"
