"""Decides what the settings of a run leave open and its numbers depend on: one path for every command.

First comes what rows are (`with_rows`), then, once the data are packed, how many make a step (`with_step`),
and last, in micro-batches of which size they pass (`with_micro_batches`), which the planner chooses. A run
that goes on begins with what it was begun with (`as_begun`). The rules are in `megatrain.config.defaults`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain.config.choice import AUTO
from megatrain.config.defaults import Epochs, StepSize, default_precision, default_rows, default_seq_len
from megatrain.config.sections.config import Config
from megatrain.errors import ConfigError


def with_rows(config: Config, *, context: int | None, on_cpu: bool) -> Config:
    """Return settings in which precision and the length of rows are decided.

    Args:
        config: Of a run.
        context: Most tokens of a row that the model takes; None: it names no limit.
        on_cpu: A CPU computes.
    """
    train: dict[str, Any] = {}
    if config.train.precision == AUTO:
        train["precision"] = default_precision(on_cpu=on_cpu)
    data: dict[str, Any] = {}
    if config.data.seq_len == AUTO:
        data["seq_len"] = default_seq_len(context, on_cpu=on_cpu)
    return _changed(config, train=train, data=data)


def with_step(config: Config, *, on_cpu: bool, num_rows: int | None) -> Config:
    """Return settings in which the tokens of a step are decided; rows have their length.

    Args:
        config: As `with_rows` returns it.
        on_cpu: A CPU computes.
        num_rows: Rows of a pass over the data; None: they are not known.

    Raises:
        ConfigError: Settings contradict each other.
    """
    rows = _step_size(config).rows(_default_rows(config, on_cpu=on_cpu, num_rows=num_rows))
    decided = _changed(config, train={"tokens_per_step": rows * config.row_tokens})
    sizes = (config.train.micro_batch_size, config.train.grad_accumulation)
    if sizes == (AUTO, AUTO):
        return decided
    size, number = (rows // number if size == AUTO else size for size, number in (sizes, sizes[::-1]))
    return _changed(decided, train={"micro_batch_size": size, "grad_accumulation": number})


def micro_batch_sizes(config: Config, num_runs: int) -> list[int]:
    """List the sizes of micro-batches that a run can have, the smallest first; the step is decided.

    Args:
        config: As `with_step` returns it.
        num_runs: Equally long runs of micro-batches in a step: `parallel.shards`, or one per rank.

    Raises:
        ConfigError: The step cannot be cut so.
    """
    lockstep = config.memory.lockstep
    least = 1 if lockstep == "auto" else lockstep
    return _step_size(config).sizes(config.rows_per_step, num_runs, least)


def with_micro_batches(config: Config, size: int) -> Config:
    """Return settings in which nothing is open any more.

    Args:
        config: As `with_step` returns it.
        size: Rows of a micro-batch, of those of `micro_batch_sizes`.
    """
    sizes = {"micro_batch_size": size, "grad_accumulation": config.rows_per_step // size}
    return _changed(config, train=sizes)


def as_settings(config: Config) -> Config:
    """Return settings to write down: what follows from others is open, so that these can be changed."""
    return _changed(config, train={"grad_accumulation": AUTO})


def smallest_micro_batches(config: Config) -> Config:
    """Return settings in which nothing is open any more, for a model of which no planner knows anything."""
    if config.is_decided:
        return config
    return with_micro_batches(config, micro_batch_sizes(config, config.parallel.shards or 1)[0])


def as_begun(config: Config, saved: Mapping[str, Any]) -> Config:
    """Return the settings of a run that goes on: what they leave open is as it was begun.

    A size of micro-batches that was chosen is kept, on any machine and any number of ranks.

    Args:
        config: As they are now.
        saved: Settings of its checkpoint, as plain values; older ones have no `train.tokens_per_step`.
    """
    then, now = saved["train"], config.train
    seq_len = saved["data"]["seq_len"] if config.data.seq_len == AUTO else config.data.seq_len
    row_tokens = seq_len * config.rows_each
    size, number = then["micro_batch_size"], then["grad_accumulation"]
    train: dict[str, Any] = {}
    if now.precision == AUTO:
        train["precision"] = then["precision"]
    if (now.tokens_per_step, now.grad_accumulation) == (AUTO, AUTO):
        train["tokens_per_step"] = size * number * row_tokens
    is_open = now.micro_batch_size == AUTO and AUTO in (now.tokens_per_step, now.grad_accumulation)
    if is_open and (now.tokens_per_step == AUTO or now.tokens_per_step >= size * row_tokens):
        train["micro_batch_size"] = size
    return _changed(config, train=train, data={"seq_len": seq_len})


_TOKENS_KEY = "train.tokens_per_step"


def larger_step_settings(config: Config, factor: int) -> str:
    """Say the settings with which a step is so many times as large; empty: its size is not of the user.

    Args:
        config: As the user gave it.
        factor: Of the tokens of a step.
    """
    return " and ".join(f"{key}={value * factor}" for key, value in _given_sizes(config).items())


def smaller_step_settings(config: Config, part: int, step_tokens: int) -> str:
    """Say the settings with which a step is a half, a quarter, ... of what it is.

    Args:
        config: As the user gave it.
        part: 2: a half.
        step_tokens: Of the smaller step.
    """
    sizes = {key: value // part for key, value in _given_sizes(config).items()}
    if AUTO in (config.train.micro_batch_size, config.train.grad_accumulation):
        sizes = {_TOKENS_KEY: step_tokens, **sizes}  # else they say the step, and it need not be repeated
    return " ".join(f"{key}={value}" for key, value in sizes.items())


def _given_sizes(config: Config) -> dict[str, int]:
    """Return those settings of a step's size that the user gave."""
    values = {
        _TOKENS_KEY: config.train.tokens_per_step,
        "train.grad_accumulation": config.train.grad_accumulation,
    }
    return {key: value for key, value in values.items() if value != AUTO}


def step_problems(config: Config) -> list[str]:
    """Say how the settings of a step contradict each other, as far as they are decided."""
    if config.data.seq_len == AUTO:
        return []
    try:
        _step_size(config).rows(1)
    except ConfigError as error:
        return [str(error)]
    return []


def _step_size(config: Config) -> StepSize:
    train = config.train
    return StepSize(
        row_tokens=config.row_tokens,
        tokens_per_step=_given(train.tokens_per_step),
        micro_batch_size=_given(train.micro_batch_size),
        grad_accumulation=_given(train.grad_accumulation),
        num_runs=config.parallel.shards or 1,
    )


def _default_rows(config: Config, *, on_cpu: bool, num_rows: int | None) -> int:
    epochs = None if config.train.steps is not None else config.train.epochs or 1
    return default_rows(
        config.row_tokens,
        on_cpu=on_cpu,
        has_adapters=config.lora.r is not None,
        data=None if num_rows is None else Epochs(num_rows=num_rows, epochs=epochs),
    )


def _given(value: int) -> int | None:
    return None if value == AUTO else value


def _changed(config: Config, *, train: dict[str, Any], data: dict[str, Any] | None = None) -> Config:
    return config.model_copy(
        update={
            "train": config.train.model_copy(update=train),
            "data": config.data.model_copy(update=data or {}),
        }
    )
