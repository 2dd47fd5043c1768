"""The settings of a run that differ from those of its checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatrain.config import Config
from megatrain.config.choice import AUTO
from megatrain.config.optimizers.registry import DEFAULT
from megatrain.errors import CheckpointError
from megatrain.model.shares import adds_router_loss
from megatrain.train.records.shareable import shareable

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_log = logging.getLogger(__name__)


def changed_settings(saved: Mapping[str, Any], config: Config) -> list[str]:
    """Name every setting that differs from a checkpoint's and bears on the numbers, as `key old -> new`."""
    now = flatten(shareable(config.model_dump(mode="json")))
    saved = shareable(saved)  # older ones have paths as they were given
    # Older ones lack newer settings; the tokens of a step follow from settings that they have.
    derived = {"train.tokens_per_step": now["train.tokens_per_step"]}
    then = {key: _default(config, key) for key in now} | derived | flatten(saved)
    numeric = ("model.", "data.", "train.", "lora.", "optim.", "parallel.", "memory.head_chunk_tokens")
    return [
        f"{key} {then[key]} -> {value}"
        for key, value in now.items()
        if key.startswith(numeric)
        and key not in ("train.device", "parallel.gather", "lora.base")
        and then[key] != value
        and (key, value) not in _LEFT_OPEN
    ]


_LEFT_OPEN = (
    ("parallel.shards", None),
    ("train.precision", AUTO),
    ("train.tokens_per_step", AUTO),
    ("train.micro_batch_size", AUTO),
    ("train.grad_accumulation", AUTO),
    ("train.activation_budget", AUTO),
    ("train.tile_tokens", AUTO),
    ("data.seq_len", AUTO),
)
"""The settings that take the checkpoint's value where they are left open."""


def _default(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return type(getattr(config, section)).model_fields[name].default


def require_same_kind(config: Config, meta: Mapping[str, Any]) -> None:
    """Refuse settings by which the state would be of another kind than the checkpoint's.

    Args:
        config: The complete and checked settings.
        meta: The record of the checkpoint's manifest.

    Raises:
        CheckpointError: The precision or the optimizer's state differs.
    """
    precision = meta["config"]["train"]["precision"]
    if precision != config.train.precision:
        raise CheckpointError(
            f"the checkpoint was trained with train.precision={precision}, not {config.train.precision}; use "
            "the same, or start a new run from its model directory"
        )
    for key in ("name", "state"):  # older ones lack what there was one of
        then, now = meta["config"]["optim"].get(key, getattr(DEFAULT, key)), getattr(config.optim, key)
        if then != now:
            raise CheckpointError(
                f"the checkpoint was trained with optim.{key}={then}, not {now}; use the same, or start a "
                "new run from its model directory"
            )


def report_changes(config: Config, meta: Mapping[str, Any], model: PretrainedConfig | None = None) -> None:
    """Log the settings that differ from the checkpoint's, and what this version computes otherwise.

    Args:
        config: The complete and checked settings.
        meta: The record of the checkpoint's manifest.
        model: The model's configuration; None if there is no model.

    Raises:
        CheckpointError: `require_same_kind` raises it.
    """
    require_same_kind(config, meta)
    changed = changed_settings(meta["config"], config)
    if changed:
        _log.warning("resuming the checkpoint's weights with changed settings: %s", "; ".join(changed))
    number = config.train.grad_accumulation
    is_added = model is not None and not config.objective.rows.is_judged and adds_router_loss(model)
    if is_added and number > 1 and "router_loss" not in meta:
        _log.warning(
            "from here on the loss of this model's routers (output_router_logits) is the mean over a step's "
            "%d micro-batches; the version that wrote the checkpoint added it up, to %d times the weight",
            number,
            number,
        )


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a dumped configuration by their keys, such as `optim.lr`."""
    return {
        f"{section}.{key}": value
        for section, values in tree.items()
        if isinstance(values, Mapping)
        for key, value in values.items()
    }
