"""What a run reads: its tokenizer, and its data, tokenised and packed, in the order of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.config import Config
from megatrain.data.context import check_seq_len, context_length
from megatrain.data.loader import PackedLoader
from megatrain.data.packing import PackedWindows, pack, tokenize
from megatrain.data.text import read_texts
from megatrain.data.tokenizer import (
    check_vocabulary,
    end_of_document,
    has_tokenizer,
    load_tokenizer,
    train_tokenizer,
)

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


def make_loader(config: Config, packed: PackedWindows) -> PackedLoader:
    """Return the micro-batches of a run, in its order."""
    return PackedLoader(
        packed.windows,
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
