"""The data of a run, tokenised and packed, and the step that follows from it, for a run and for its plan."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.config import Config
from megatrain.config.decided import with_step
from megatrain.data.cache import Rows
from megatrain.data.loader import PackedLoader, in_batches
from megatrain.data.prepare import Prepared
from megatrain.data.templates import why_not_suited
from megatrain.data.tokens.template import template_source
from megatrain.model.head.positions import FIRST_TOKENS
from megatrain.train.evaluate.losses import EvalSet
from megatrain.train.inputs import (
    Packer,
    choose_tokenizer,
    hold_out,
    holds_out,
    is_on_cpu,
    rows_of,
    with_rows_for,
)
from megatrain.train.preference.answers import loss_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """The training data of a run, and the size of its step."""

    config: Config
    """The settings, in which rows and the step are decided."""
    tokenizer: PreTrainedTokenizerBase
    packed: Prepared
    rows: Rows
    """The training rows, without those that are held out of joined text."""

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of one pass over the data."""
        return -(-len(self.rows) // self.config.rows_per_step)

    @property
    def num_steps(self) -> int:
        """The number of steps of the whole run."""
        train = self.config.train
        return train.steps or math.ceil((train.epochs or 1) * self.steps_per_epoch)


def read_data(
    config: Config,
    model_config: PretrainedConfig,
    *,
    checkpoint: Path | None = None,
    folder: Path | None = None,
    day: str | None = None,
    on_cpu: bool | None = None,
) -> RunData:
    """Tokenise and pack the training data, or find it prepared, and decide the step.

    Args:
        config: The settings of the run; open ones of rows and steps are decided.
        model_config: The configuration of its model, which gets as many words as its tokenizer needs.
        checkpoint: The checkpoint from which the run resumes, or None.
        folder: The folder of prepared data, as in `Packer`.
        day: The date that the chat template was given before, in a resumed run.
        on_cpu: Whether a CPU computes; None leaves it to `train.device`.

    Raises:
        DataError: `Packer.train` raises it, nothing is left to train on, or nothing is held out.
        ConfigError: `Packer` raises it, or settings of the step contradict each other.
    """
    on_cpu = is_on_cpu(config) if on_cpu is None else on_cpu
    config = with_rows_for(config, model_config, on_cpu=on_cpu)
    tokenizer = choose_tokenizer(config, checkpoint, model_config)
    if config.data.chat_template is not None:  # a later chat needs the template of the training
        tokenizer.chat_template = template_source(config.data.chat_template, tokenizer)
        if (why := why_not_suited(config.data.chat_template, tokenizer)) is not None:
            _log.warning("%s", why)
    packed = Packer(config, tokenizer, model_config, folder, day).train()
    rows = hold_out(config, packed)[0] if holds_out(config, packed) else rows_of(packed)
    config = with_step(config, on_cpu=on_cpu, num_rows=len(rows))
    return RunData(config=config, tokenizer=tokenizer, packed=packed, rows=rows)


def make_loader(data: RunData, config: Config) -> PackedLoader:
    """Return the micro-batches of a run, in its order.

    Args:
        data: The data of the run.
        config: The settings, in which nothing is open.
    """
    packed, name = data.packed, data.packed.fingerprint
    if holds_out(config, packed):
        name = f"{len(data.rows)}x{name.partition('x')[2]}-less-{config.data.val_size:g}"
    return PackedLoader(
        data.rows,
        micro_batch_size=config.train.micro_batch_size,
        num_micro_batches=config.train.grad_accumulation,
        seed=config.data_seed,
        shuffle=config.data.shuffle,
        packing=packed.packing,
        name=name,
        day=packed.day,
    )


def make_eval_sets(config: Config, packed: Mapping[str, tuple[Rows, str]]) -> list[EvalSet]:
    """Return sets in micro-batches as large as in training.

    Args:
        config: The settings, in which nothing is open.
        packed: The result of `Packer.evaluation`.
    """
    measure, size = loss_of(config).measure, config.train.micro_batch_size
    return [
        EvalSet(
            name=name,
            batches=partial(in_batches, rows, size, way),
            measure=measure,
            rows=rows,
            by_position=config.eval.by_position and measure is None and rows.shape[1] > 2 * FIRST_TOKENS,
        )
        for name, (rows, way) in packed.items()
    ]
