"""What a run reads: its tokenizer, and its data, tokenised and packed, in the order of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatrain.config import Config
from megatrain.data.context import check_seq_len, context_length
from megatrain.data.loader import PackedLoader, epoch_order, in_batches
from megatrain.data.packing import PackedWindows, pack, tokenize
from megatrain.data.text import read_texts
from megatrain.data.tokenizer import (
    check_vocabulary,
    end_of_document,
    has_tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from megatrain.errors import DataError
from megatrain.train.evaluate.losses import EvalSet

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def pack_data(
    config: Config, tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig
) -> PackedWindows:
    """Tokenise and pack the data, and check it against the model.

    Raises:
        DataError: The data cannot be read, or has a token that the model does not know.
        ConfigError: Sequences longer than the model's context.
    """
    check_seq_len(config.data.seq_len, context_length(model_config))
    packed = pack(tokenize(_texts(config), tokenizer, end_id=end_of_document(tokenizer)), config.data.seq_len)
    check_vocabulary(packed.max_id, model_config.get_text_config().vocab_size, tokenizer_size=len(tokenizer))
    return packed


def _hold_out(config: Config, packed: PackedWindows) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the sequences that are trained on, and those that `data.val_size` holds out, drawn by its seed.

    Raises:
        DataError: Nothing is left to train on, or nothing is held out.
    """
    size, windows = config.data.val_size, packed.windows
    count = round(size * len(windows)) if size < 1 else int(size)
    if size == 0:
        return windows, windows[:0]
    if not 0 < count < len(windows):
        raise DataError(
            f"data.val_size is {size:g} of {len(windows):,} sequences, which leaves {count:,} to evaluate on "
            f"and {max(0, len(windows) - count):,} to train on; use a size that leaves some of both"
        )
    is_held_out = np.zeros(len(windows), dtype=bool)
    is_held_out[epoch_order(len(windows), seed=config.data_seed, epoch=_HELD_OUT)[:count]] = True
    return windows[~is_held_out], windows[is_held_out]


_HELD_OUT = 2**64 - 1
"""In the place of an epoch's number: draws what is held out."""


def make_eval_sets(
    config: Config,
    packed: PackedWindows,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PretrainedConfig,
) -> list[EvalSet]:
    """Return the sets of a run: `val`, which is held out of its data, and those of `data.eval_path`.

    Raises:
        DataError: Files that cannot be read, or have too few tokens.
    """
    held_out = _hold_out(config, packed)[1]
    windows = {"val": held_out} if len(held_out) else {}
    for name, paths in (config.data.eval_path or {}).items():
        data = config.data.model_copy(update={"path": paths})
        windows[name] = pack_data(config.model_copy(update={"data": data}), tokenizer, model_config).windows
    rows = config.train.micro_batch_size
    return [EvalSet(name=name, batches=partial(in_batches, own, rows)) for name, own in windows.items()]


def make_loader(config: Config, packed: PackedWindows) -> PackedLoader:
    """Return the micro-batches of a run, in its order; what is held out is not among them."""
    return PackedLoader(
        _hold_out(config, packed)[0],
        micro_batch_size=config.train.micro_batch_size,
        num_micro_batches=config.train.grad_accumulation,
        seed=config.data_seed,
        shuffle=config.data.shuffle,
    )


def _texts(config: Config) -> Iterator[str]:
    return (document.text for document in read_texts(config.data.path, text_column=config.data.text_column))


def choose_tokenizer(
    config: Config, checkpoint: Path | None, model_config: PretrainedConfig
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a checkpoint, or the one that is named, or the model's, or train one."""
    if checkpoint is not None:
        return load_tokenizer(str(checkpoint))
    if config.data.tokenizer is not None:
        return load_tokenizer(config.data.tokenizer)
    if config.model.init == "random" and not has_tokenizer(config.model.path):
        vocab_size = config.data.vocab_size or model_config.get_text_config().vocab_size
        return train_tokenizer(_texts(config), vocab_size)
    return load_tokenizer(config.model.path)
