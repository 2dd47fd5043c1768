"""Judged answers as rows: a row is two sequences side by side, each a prompt and an answer.

A row of a pair holds the chosen and the rejected answer. A row of a marked answer holds that answer, and
beside it the same prompt with the answer to another one, from which a loss estimates how far the model is
from its reference. For that, the answers rotate among up to 64 rows: each row's answer goes to the next row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatrain.data.cache import Rows
from megatrain.data.flagged_tokens import GOOD, START, Words, join_words, split_words
from megatrain.errors import DataError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

SIDES = 2
"""The number of sequences of a row."""
_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Judged:
    """The answers and the prompt of each, as token ids."""

    prompts: tuple[Sequence[int], ...]
    """The prompt of each answer: the same one, unless answers begin with system prompts of their own."""
    answers: tuple[Sequence[int], ...]
    """The chosen and the rejected answer, or a single one that is marked."""
    is_good: bool = False
    """Whether the single answer is marked good."""

    @property
    def lengths(self) -> list[int]:
        """Return the number of tokens of each sequence."""
        pairs = zip(self.prompts, self.answers, strict=True)
        return [len(prompt) + len(answer) for prompt, answer in pairs]

    @property
    def max_id(self) -> int:
        """Return the largest token id."""
        return max(itertools.chain(*self.prompts, *self.answers))

    def sides(self, seq_len: int) -> list[Words]:
        """Return each answer behind its prompt, cut at the end."""
        found = []
        for prompt, answer in zip(self.prompts, self.answers, strict=True):
            ids = np.array([*prompt, *answer], dtype=np.int32)
            found.append(join_words(ids, np.arange(len(ids)) >= len(prompt))[:seq_len])
        return found

    def show(self, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
        """Decode the example in pieces, each with whether it is trained on."""
        names = ("chosen", "rejected") if len(self.answers) > 1 else ("good" if self.is_good else "bad",)
        is_shared = len({tuple(prompt) for prompt in self.prompts}) == 1
        pieces = [(tokenizer.decode(list(self.prompts[0])), False)] if is_shared else []
        for name, prompt, answer in zip(names, self.prompts, self.answers, strict=True):
            own = "" if is_shared else tokenizer.decode(list(prompt))
            pieces += [(f"\n<{name}> {own}", False), (tokenizer.decode(list(answer)), True)]
        return pieces


class PairPacker:
    """Turns judged answers into rows."""

    def __init__(self, seq_len: int, fill_id: int, *, borrows: bool) -> None:
        """Make an empty packer.

        Args:
            seq_len: The number of tokens of a sequence.
            fill_id: The id of the token that fills sequences up.
            borrows: Whether examples have one answer and borrow that of the previous example as their second;
                the first example borrows from the last.
        """
        self.num_filled = 0
        self._seq_len, self._fill_id, self._borrows = seq_len, fill_id, borrows
        self._held: list[Judged] = []

    def add(self, example: Judged) -> Iterator[NDArray[np.int32]]:
        """Take an example; yield (num_rows, 2 * seq_len) rows that are ready."""
        self._held.append(example)
        if len(self._held) == 2 * _AT_ONCE:  # half stay, so that never a single one is left
            yield self._rows(self._held[:_AT_ONCE])
            self._held = self._held[_AT_ONCE:]

    def finish(self) -> Iterator[NDArray[np.int32]]:
        """Yield the rows that are left.

        Raises:
            DataError: An answer has no other example's answer to be compared with.
        """
        if self._borrows and len(self._held) == 1:
            raise DataError("there is one answer, and the loss compares it with others; add rows")
        if self._held:
            yield self._rows(self._held)
            self._held = []

    def _rows(self, group: list[Judged]) -> NDArray[np.int32]:
        if self._borrows:
            others = [*group[-1:], *group[:-1]]
            group = [
                Judged(example.prompts * SIDES, (*example.answers, *other.answers), example.is_good)
                for example, other in zip(group, others, strict=True)
            ]
        return np.stack([self._row(example) for example in group])

    def _row(self, example: Judged) -> NDArray[np.int32]:
        row = np.full((SIDES, self._seq_len), self._fill_id, dtype=np.int32)
        for side, words in zip(row, example.sides(self._seq_len), strict=True):
            side[: len(words)] = words
            if len(words) < self._seq_len:
                side[len(words)] |= START
                self.num_filled += self._seq_len - len(words)
        row[0, 0] |= GOOD * example.is_good
        return row.reshape(-1)


def sequences(words: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return a (B, 2 T) array as (2 B, T), a row's two sequences after each other."""
    return words.reshape(SIDES * len(words), -1)


def judged_batch(
    words: NDArray[np.int32], reference: NDArray[np.float32] | None = None
) -> dict[str, torch.Tensor]:
    """Return the arguments of a model's forward, and of its loss if there is a reference.

    Args:
        words: The rows, (B, 2 T).
        reference: The log-probabilities of the answers, (B, 2); None: the batch is for the model alone.

    Returns:
        `input_ids` and `labels` of 2 B sequences, a row's two after each other; for a loss, `reference` and
        `is_good`, (B,), too.
    """
    import torch

    ids, labels, _ = (torch.from_numpy(part) for part in split_words(sequences(words)))
    batch = {"input_ids": ids, "labels": labels}
    if reference is not None:
        batch["reference"] = torch.from_numpy(reference)
        batch["is_good"] = torch.from_numpy(words[:, 0] & GOOD != 0)
    return batch


class JudgedRows:
    """Rows with the reference's log-probabilities of their answers appended, as bits of fp32."""

    def __init__(self, rows: Rows, name: str) -> None:
        """Wrap rows; none can be read until `reference` is set.

        Args:
            rows: The rows, (num_rows, 2 T).
            name: The fingerprint of the rows.
        """
        self.rows = rows
        self.name = name
        self.reference: Rows | None = None
        """The log-probabilities of the answers in the reference, (num_rows, 2)."""
        self.shape = (rows.shape[0], rows.shape[1] + SIDES)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, numbers: Sequence[int]) -> NDArray[np.int32]:
        """Return (len(numbers), 2 T + 2) rows."""
        assert self.reference is not None
        return np.concatenate([self.rows[numbers], self.reference[numbers]], axis=1)


class NoReference:
    """Stands in for a reference where only times are measured."""

    def __init__(self, num_rows: int) -> None:
        self.shape = (num_rows, SIDES)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, numbers: Sequence[int]) -> NDArray[np.int32]:
        """Return (len(numbers), 2) zeros."""
        return np.zeros((len(numbers), SIDES), dtype=np.int32)


def split_reference(rows: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Split rows of `JudgedRows` into their words and their log-probabilities."""
    reference = np.ascontiguousarray(rows[:, -SIDES:]).view(np.float32)
    return np.ascontiguousarray(rows[:, :-SIDES]), reference
