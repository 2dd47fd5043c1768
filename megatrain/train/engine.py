"""The engine of a run: its model is read or drawn straight into host state, and attached."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.checkpoint.reader import CheckpointReader
from megatrain.config import Config
from megatrain.config.choice import Choice
from megatrain.distributed.alone import ALONE, Alone
from megatrain.model.adapters.adapt import adapters_off
from megatrain.model.documents.able import has_varlen, say_masked
from megatrain.stream.attach.attach import attach
from megatrain.stream.attach.load import load
from megatrain.stream.engine import Engine
from megatrain.stream.lanes.devices import compute_device
from megatrain.train.attention import attention_of, why_masked
from megatrain.train.evaluate.losses import undisturbed
from megatrain.train.resume.state_commits import drives_apart, require_laid_out, restore_buffers, tiers_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PretrainedConfig

    from megatrain.distributed.ranks import Ranks
    from megatrain.model.weights.files import OpenFile

_log = logging.getLogger(__name__)


def make_engine(
    config: Config,
    choice: Choice,
    source: str | PretrainedConfig,
    *,
    adapter: Path | None = None,
    committed: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    ranks: Ranks | Alone = ALONE,
    planned_tokens: int = 0,
    reader: CheckpointReader | None = None,
) -> Engine:
    """Load the model of a run into host state, with its adapters, and attach it.

    Args:
        config: The complete and checked settings.
        choice: The choice by which the engine is arranged.
        source: The place of the weights; a configuration has them drawn at random.
        adapter: A directory with trained adapters; None starts those of `lora`, if any, at zero.
        committed: The record of the commit on drives from which the run resumes.
        vocab_size: The vocabulary size of the model with its new tokens; None if there are none.
        ranks: The ranks that train together and keep one state.
        planned_tokens: The number of tokens that pass together without gradients, as planned for this choice;
            0 means as many as a round of training has.
        reader: The reader of the checkpoint that `source` may be, which compares what it reads; None: the
            files of weights are mapped.

    Raises:
        DamagedError: The checkpoint is not what its manifest says.
        CheckpointError: The choice lays out another state than is committed.
        MegatrainError: `load` or `attach` raises it.
    """
    memory, is_random = config.memory, not isinstance(source, str)
    if committed is not None:
        require_laid_out(committed, choice, memory.drives[0])
    settings: dict[str, Any] = {
        "precision": config.train.precision,
        "batch": config.batch,
        "optimizer": config.optim.name,
        "optimizer_state": config.optim.state,
        "host_limit": memory.host_budget,
        "tiers": tiers_of(config, choice, resumes=committed is not None),
        "ranks": ranks,
    }
    model = load(
        None if is_random else source,
        choice,
        config=source if is_random else None,
        seed=config.train.seed,
        attn_implementation=_attention(config),
        adaptation=config.adaptation,
        adapter=adapter,
        vocab_size=vocab_size,
        rope_scaling=config.model.rope_scaling,
        opened=_opener(reader, source),
        **settings,
    )
    if committed is not None:
        restore_buffers(model, committed["buffers"])
    engine = attach(
        model.train(),
        choice,
        device=config.train.device,
        compile=config.train.compile,
        activation_budget=config.activation_budget,
        deterministic=config.train.deterministic,
        device_limit=memory.device_budget,
        **settings,
    )
    _log.debug(
        "%s; compiled: %s; optimizer state: %s",
        engine.choice.describe(),
        "no" if engine.compiler is None else "yes",
        config.optimizer.describe(),
    )
    engine.together.planned_tokens = planned_tokens
    return engine


def _opener(reader: CheckpointReader | None, source: str | PretrainedConfig) -> OpenFile | None:
    """Return what opens files of weights that are compared as they are read; None: these are not."""
    if reader is None or not reader.later or source != str(reader.path):
        return None
    return lambda file: reader.open_tensors(file.name)


def _attention(config: Config) -> str | None:
    """Return the attention to ask for, and say where packed rows get a mask on an accelerator."""
    device = compute_device(config.train.device)
    has = has_varlen(device)
    reason = why_masked(config, has_varlen=has)
    if reason is not None and device.type != "cpu" and config.model.attn_implementation is None:
        say_masked(reason)
    return attention_of(config, has_varlen=has)


@contextmanager
def engine_of_base(
    config: Config, choice: Choice, vocab_size: int | None, planned_tokens: int
) -> Iterator[Engine]:
    """Lend an engine of the model that a run began with, without dropout; its drives stay as they are."""
    with drives_apart(config) as apart:
        engine = make_engine(
            apart, choice, config.model.path, vocab_size=vocab_size, planned_tokens=planned_tokens
        )
        try:
            with untouched(engine):
                yield engine
        finally:
            engine.close(removes=True)


@contextmanager
def untouched(engine: Engine) -> Iterator[Engine]:
    """Lend an engine whose model is still untrained, without its adapters and without dropout."""
    with undisturbed(engine), adapters_off(engine.model):
        yield engine
