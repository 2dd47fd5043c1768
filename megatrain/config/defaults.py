"""The defaults of a run's open settings: the rules for every command, in one place.

Precision and the length of a row follow from the model and from whether a CPU computes, and the size of a
step from the data as well. Nothing here depends on a machine's memory, its speed or the number of its GPUs,
so a run trains the same model wherever it runs. The planner chooses the size of micro-batches, since a
machine's speed depends on it.

This module loads neither pydantic nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatrain.config.choice import StepBatch
from megatrain.errors import ConfigError

_ROW_TOKENS, _ROW_TOKENS_ON_CPU = 4096, 1024
"""The largest number of tokens of a row."""

_STEP_TOKENS, _STEP_TOKENS_ON_CPU = 131_072, 8192
"""The number of tokens of a step, with which accelerators hide the host's AdamW several times over."""

_STEP_TOKENS_OF_ADAPTERS = 32_768
"""The number of tokens of a step that trains adapters: nothing waits for an optimizer, and adapters learn
less from large batches than whole models do. Source: Schulman et al., "LoRA Without Regret", 2025."""

_LEAST_STEPS, _LEAST_STEPS_PER_EPOCH = 100, 32
"""The least steps of a run and of a pass over its data: with fewer, a schedule has nothing to do."""

_MOST_ROWS = 64
"""The largest number of rows of a micro-batch whose size is chosen."""


def default_precision(*, on_cpu: bool) -> str:
    """Return the precision of a run: bf16 with fp32 masters on accelerators, fp32 on a CPU."""
    return "fp32" if on_cpu else "bf16"


def default_seq_len(context: int | None, *, on_cpu: bool) -> int:
    """Return the tokens of a row: as many as the model takes, up to the usual number.

    Args:
        context: The most tokens of a row that the model takes; None if it names no limit.
        on_cpu: Whether a CPU computes.
    """
    most = _ROW_TOKENS_ON_CPU if on_cpu else _ROW_TOKENS
    return min(most, context or most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Epochs:
    """The data of a run, and the number of passes over them."""

    num_rows: int
    """The number of packed rows of one pass."""
    epochs: float | None
    """The number of passes; None if the steps are given, so that only a pass has to have enough of them."""

    def steps_per_epoch(self, rows: int) -> int:
        """Return the number of steps of `rows` rows in one pass; the last may reach into the next."""
        return -(-self.num_rows // rows)

    def are_enough(self, rows: int) -> bool:
        """Return whether steps of `rows` rows are enough steps."""
        per_epoch = self.steps_per_epoch(rows)
        if per_epoch < _LEAST_STEPS_PER_EPOCH:
            return False
        return self.epochs is None or math.ceil(self.epochs * per_epoch) >= _LEAST_STEPS


def default_rows(row_tokens: int, *, on_cpu: bool, has_adapters: bool = False, data: Epochs | None) -> int:
    """Return the rows of a step, a power of two, so that micro-batches and ranks can share them out.

    Args:
        row_tokens: The number of tokens of a row, of both of its sequences where it has two.
        on_cpu: Whether a CPU computes.
        has_adapters: Whether adapters are trained, and not the model.
        data: The data; None means that they are unknown, and counts as enough.
    """
    tokens = _STEP_TOKENS_ON_CPU if on_cpu else _STEP_TOKENS
    if has_adapters:
        tokens = min(tokens, _STEP_TOKENS_OF_ADAPTERS)
    rows = 1 << max(0, (tokens // row_tokens).bit_length() - 1)
    while rows > 1 and data is not None and not data.are_enough(rows):
        rows //= 2
    return rows


def default_batch(context: int | None, *, on_cpu: bool) -> StepBatch:
    """Return the batch of a step of an unknown run, in micro-batches of one row."""
    seq_len = default_seq_len(context, on_cpu=on_cpu)
    rows = default_rows(seq_len, on_cpu=on_cpu, data=None)
    return StepBatch(micro_batch_size=1, seq_len=seq_len, num_micro_batches=rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """The settings of the rows of a step; None means left open."""

    row_tokens: int
    """The number of tokens of a row, of both of its sequences where it has two."""
    tokens_per_step: int | None = None
    micro_batch_size: int | None = None
    grad_accumulation: int | None = None
    num_runs: int = 1
    """The number of runs into which the micro-batches of a step are cut: `parallel.shards`."""

    def rows(self, default: int) -> int:
        """Return the rows of a step: as many as the settings say, or about as many as the default.

        Args:
            default: The number of rows where neither tokens nor both other sizes are given.

        Raises:
            ConfigError: The settings contradict each other.
        """
        tokens, size, number = self.tokens_per_step, self.micro_batch_size, self.grad_accumulation
        if size is not None and number is not None:
            rows = size * number
            if tokens is not None and tokens != rows * self.row_tokens:
                raise ConfigError(
                    f"{self._given()} contradict each other: {number:,} micro-batches of {size:,} rows of "
                    f"{self.row_tokens:,} tokens are {rows * self.row_tokens:,}; leave one of them out"
                )
            return rows
        unit = number if number is not None else (size or 1) * self.num_runs
        wanted = default if tokens is None else tokens // self.row_tokens
        if wanted < unit and tokens is not None:
            raise ConfigError(
                f"{self._given()} contradict each other: a step has at least {unit:,} "
                f"{'row' if unit == 1 else 'rows'} of {self.row_tokens:,} tokens; use "
                f"train.tokens_per_step={unit * self.row_tokens} or more, or auto"
            )
        return max(unit, wanted // unit * unit)

    def sizes(self, rows: int, num_runs: int, least_number: int = 1) -> list[int]:
        """List the sizes of micro-batches that a step of so many rows can have, the smallest first.

        Args:
            rows: The number of rows of a step, of all ranks.
            num_runs: The number of equally long runs of micro-batches: `parallel.shards`, or one per rank.
            least_number: The least number of micro-batches of a run.

        Raises:
            ConfigError: The rows cannot be shared out.
        """
        if self.micro_batch_size is not None:
            return [self.micro_batch_size]
        if self.grad_accumulation is not None:
            return [rows // self.grad_accumulation]
        if rows % num_runs:
            more = -(-rows // num_runs) * num_runs
            raise ConfigError(
                f"a step of {rows:,} rows of {self.row_tokens:,} tokens (train.tokens_per_step) cannot be "
                f"cut into {num_runs:,} equal runs (parallel.shards; one per rank, if left open); use "
                f"train.tokens_per_step={more * self.row_tokens}"
            )
        most = rows // num_runs // least_number
        found = [size for size in _sizes(min(most, _MOST_ROWS)) if rows % (size * num_runs) == 0]
        return found or [1]

    def _given(self) -> str:
        values = {
            "train.tokens_per_step": self.tokens_per_step,
            "train.micro_batch_size": self.micro_batch_size,
            "train.grad_accumulation": self.grad_accumulation,
            "parallel.shards": self.num_runs if self.num_runs > 1 else None,
        }
        given = [f"{key}={value}" for key, value in values.items() if value is not None]
        given.append(f"rows of {self.row_tokens:,} tokens (data.seq_len)")
        return f"{', '.join(given[:-1])} and {given[-1]}"


def _sizes(most: int) -> Iterator[int]:
    """Yield the powers of two up to a number, and halfway between them: what is saved may fill the device."""
    size = 1
    while size <= most:
        yield size
        if size > 1 and size * 3 // 2 <= most:
            yield size * 3 // 2
        size *= 2
