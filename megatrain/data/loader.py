"""The loader turns rows into micro-batches, in an order that can be continued from any step.

No row is ever left out: a step that an epoch's end does not fill goes on with the next epoch. The order of an
epoch depends only on the seed and the epoch's number, and is drawn from the raw bits of a counter generator,
which no numpy version may change. So the position, two integers, is the whole state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from megatrain.data.cache import Rows, name_of
from megatrain.data.flagged_tokens import num_present, split_words
from megatrain.data.pairs import judged_batch, sequences, split_reference
from megatrain.errors import DataError
from megatrain.objective.rows import kind_of


class PackedLoader:
    """Iterator without end over the micro-batches of each step.

    Each epoch visits every row exactly once; a step may begin in one epoch and end in the next.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        micro_batch_size: int,
        num_micro_batches: int,
        seed: int,
        shuffle: bool = True,
        packing: str = "join",
        name: str | None = None,
        day: str | None = None,
    ) -> None:
        """Start at the first row of epoch 0.

        Args:
            rows: The rows, (num_rows, T): token ids if they are joined, otherwise words.
            micro_batch_size: The number of rows of a micro-batch.
            num_micro_batches: The number of micro-batches of a step.
            seed: The seed of the order of the rows.
            shuffle: Whether each epoch has a new random order; otherwise rows come in the order of `rows`.
            packing: The way in which the rows are packed; see `as_batch`.
            name: The fingerprint of the rows, if it is known.
            day: The date that the chat template was given, for whoever prepares the same data again.
        """
        assert len(rows.shape) == 2
        assert len(rows) > 0
        self.rows = rows
        self._packing = packing
        self._micro_batch_size = micro_batch_size
        self._num_micro_batches = num_micro_batches
        self._seed = seed
        self._shuffle = shuffle
        self.num_tokens = 0
        """The number of tokens of the step that was returned last, without filling."""
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)
        self._day = day
        self._fingerprint = name or fingerprint(rows[range(len(rows))])

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps until every row has been visited; the last may reach into the next epoch."""
        per_step = self._micro_batch_size * self._num_micro_batches
        return -(-len(self.rows) // per_step)

    def __iter__(self) -> Iterator[list[dict[str, torch.Tensor]]]:
        return self

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        """Return the next step's micro-batches, each as `as_batch` makes it."""
        self.num_tokens = 0
        return [self._micro_batch() for _ in range(self._num_micro_batches)]

    def state(self) -> dict[str, Any]:
        """Return the position of the next step, the data's name and their order, as plain values for JSON."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "fingerprint": self._fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
        } | ({} if self._day is None else {"day": self._day})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. The size of a step may have changed since.

        Raises:
            DataError: The state belongs to other data, or to another order of it.
        """
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                "the data is not that of the run being resumed (another text, tokenizer or data.seq_len, or "
                "another way of packing or masking it); restore it, or start a new run in another output "
                "directory"
            )
        for name, ours in (("seed", self._seed), ("shuffle", self._shuffle)):
            if state[name] != ours:
                raise DataError(
                    f"data.{name} is {ours}, but the run being resumed used {state[name]}; restore it, "
                    "or start a new run in another output directory"
                )
        if not 0 <= int(state["position"]) <= len(self.rows):
            raise DataError(
                f"the run being resumed is at row {state['position']} of its data, which have "
                f"{len(self.rows)}; resume from another checkpoint"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self._epoch)

    def _micro_batch(self) -> dict[str, torch.Tensor]:
        numbers = [self._next_row() for _ in range(self._micro_batch_size)]
        rows = self.rows[numbers]
        self.num_tokens += _num_present(rows, self._packing)
        return as_batch(rows, self._packing)

    def _next_row(self) -> int:
        if self._position == len(self.rows):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        row = int(self._order[self._position])
        self._position += 1
        return row

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self.rows))
        return epoch_order(len(self.rows), seed=self._seed, epoch=epoch)


def as_batch(rows: NDArray[np.int32], packing: str) -> dict[str, torch.Tensor]:
    """Return the arguments of a model's forward, each (B, T) int64.

    Joined rows give `input_ids` and equal `labels`. Other rows hold words, whose `labels` are -100 where
    nothing is trained on. Rows packed best-fit also give `position_ids`, which begin anew with each document:
    where there is no `attention_mask`, attention uses them to keep documents apart. A row with one document
    and filling at its end needs neither, since no token sees what comes after it. A row of judged answers is
    two such rows with their reference; see `judged_batch`.
    """
    if kind_of(packing).is_judged:
        return judged_batch(*split_reference(rows))
    if packing == "join":
        input_ids = torch.from_numpy(rows.astype(np.int64))
        return {"input_ids": input_ids, "labels": input_ids.clone()}
    ids, labels, positions = (torch.from_numpy(array) for array in split_words(rows))
    batch = {"input_ids": ids, "labels": labels}
    return batch if packing == "pad" else batch | {"position_ids": positions}


def _num_present(rows: NDArray[np.int32], packing: str) -> int:
    if packing == "join":
        return int(rows.size)
    return num_present(sequences(split_reference(rows)[0]) if kind_of(packing).is_judged else rows)


def epoch_order(num_rows: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a random permutation that depends on nothing but its arguments.

    It sorts random keys, since numpy promises the bits of Philox for ever, and not those of
    `Generator.permutation`. Equal keys keep their order.
    """
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_rows)
    return np.argsort(keys, kind="stable")


def in_batches(rows: Rows, num_rows: int, packing: str = "join") -> Iterator[dict[str, torch.Tensor]]:
    """Yield micro-batches of all rows, in order, as `as_batch` makes them; the last one may be smaller."""
    for start in range(0, len(rows), num_rows):
        yield as_batch(rows[range(start, min(start + num_rows, len(rows)))], packing)


def fingerprint(rows: NDArray[np.int32]) -> str:
    """Return a name for exactly these rows: their shape and the hash of their bytes."""
    digest = xxhash.xxh3_128()
    digest.update(np.ascontiguousarray(rows, dtype="<i4").data)
    return name_of((rows.shape[0], rows.shape[1]), digest)
