"""The decisions on open settings from which a run's numbers follow: one path for every command.

First come the rows (`with_rows`), then, once the data are packed, the number of rows of a step (`with_step`),
and last the size of micro-batches (`with_micro_batches`), which the planner chooses. A resumed run begins
with the settings that it was begun with (`as_begun`). The rules are in `megatrain.config.defaults`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain.config.budgets import ALL
from megatrain.config.choice import AUTO
from megatrain.config.defaults import Epochs, StepSize, default_precision, default_rows, default_seq_len
from megatrain.config.sections.config import Config
from megatrain.config.yaml12 import dump_yaml
from megatrain.errors import CheckpointError, ConfigError


def with_rows(config: Config, *, context: int | None, on_cpu: bool) -> Config:
    """Return settings in which precision and the length of rows are decided.

    Args:
        config: The settings of a run.
        context: The most tokens of a row that the model takes; None if it names no limit.
        on_cpu: Whether a CPU computes.
    """
    train: dict[str, Any] = {}
    if config.train.precision == AUTO:
        train["precision"] = default_precision(on_cpu=on_cpu)
    data: dict[str, Any] = {}
    if config.data.seq_len == AUTO:
        data["seq_len"] = default_seq_len(context, on_cpu=on_cpu)
    return _changed(config, train=train, data=data)


def with_step(config: Config, *, on_cpu: bool, num_rows: int | None) -> Config:
    """Return settings in which the tokens of a step are decided; the length of rows must be.

    Args:
        config: The settings, as `with_rows` returns them.
        on_cpu: Whether a CPU computes.
        num_rows: The number of rows of a pass over the data; None if it is unknown.

    Raises:
        ConfigError: The settings contradict each other.
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
        config: The settings, as `with_step` returns them.
        num_runs: The number of equally long runs of a step: `parallel.shards`, or one per rank.

    Raises:
        ConfigError: The step cannot be cut so.
    """
    lockstep = config.memory.lockstep
    least = 1 if lockstep == "auto" else lockstep
    return _step_size(config).sizes(config.rows_per_step, num_runs, least)


def with_micro_batches(config: Config, size: int) -> Config:
    """Return settings in which nothing is open any more.

    Args:
        config: The settings, as `with_step` returns them.
        size: The number of rows of a micro-batch, one of `micro_batch_sizes`.
    """
    sizes = {"micro_batch_size": size, "grad_accumulation": config.rows_per_step // size}
    return _changed(config, train=sizes)


def with_budget(config: Config, budget: float) -> Config:
    """Return settings in which the budget of compiled layers is decided."""
    return _changed(config, train={"activation_budget": budget})


def as_settings(config: Config) -> Config:
    """Return settings to write down, in which derived values are open, so that the others can be changed."""
    return _changed(config, train={"grad_accumulation": AUTO})


def smallest_micro_batches(config: Config) -> Config:
    """Return settings without open values for a model that no planner can count."""
    config = with_budget(config, config.activation_budget)
    if config.is_decided:
        return config
    return with_micro_batches(config, micro_batch_sizes(config, config.parallel.shards or 1)[0])


def as_begun(config: Config, saved: Mapping[str, Any]) -> Config:
    """Return the settings of a resumed run, in which open values are those that it was begun with.

    A chosen size of micro-batches is kept, on any machine and any number of ranks.

    Args:
        config: The present settings.
        saved: The settings of its checkpoint, as plain values; older ones have no `train.tokens_per_step`.

    Raises:
        CheckpointError: The rotary embeddings of the checkpoint were scaled in another way.
    """
    scaling, scaled = config.model.rope_scaling, saved.get("model", {}).get("rope_scaling")
    if scaling != scaled:
        raise CheckpointError(
            f"the checkpoint was trained with model.rope_scaling={_shown(scaled)}, not {_shown(scaling)}; "
            "use the same, or start a new run from its model directory"
        )
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
    if now.activation_budget == AUTO:
        budget = then.get("activation_budget", AUTO)
        train["activation_budget"] = ALL if budget == AUTO else budget
    if now.tile_tokens == AUTO:
        train["tile_tokens"] = then.get("tile_tokens", AUTO)
    if is_open and (now.tokens_per_step == AUTO or now.tokens_per_step >= size * row_tokens):
        train["micro_batch_size"] = size
    return _changed(config, train=train, data={"seq_len": seq_len})


def _shown(scaling: object) -> str:
    return dump_yaml(scaling, flow=True).strip()


_TOKENS_KEY = "train.tokens_per_step"


def larger_step_settings(config: Config, factor: int) -> str:
    """Return the settings of a step that is `factor` times as large; empty if the user did not set its size.

    Args:
        config: The settings as the user gave them.
        factor: The factor on the tokens of a step.
    """
    return " and ".join(f"{key}={value * factor}" for key, value in _given_sizes(config).items())


def smaller_step_settings(config: Config, part: int, step_tokens: int) -> str:
    """Return the settings with which a step is a half, a quarter, ... of its size.

    Args:
        config: The settings as the user gave them.
        part: The divisor; 2 means a half.
        step_tokens: The number of tokens of the smaller step.
    """
    sizes = {key: value // part for key, value in _given_sizes(config).items()}
    if AUTO in (config.train.micro_batch_size, config.train.grad_accumulation):
        sizes = {_TOKENS_KEY: step_tokens, **sizes}  # else they give the step already
    return " ".join(f"{key}={value}" for key, value in sizes.items())


def _given_sizes(config: Config) -> dict[str, int]:
    """Return the settings of a step's size that the user gave."""
    values = {
        _TOKENS_KEY: config.train.tokens_per_step,
        "train.grad_accumulation": config.train.grad_accumulation,
    }
    return {key: value for key, value in values.items() if value != AUTO}


def step_problems(config: Config) -> list[str]:
    """Return the contradictions among the settings of a step, as far as they are decided."""
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
