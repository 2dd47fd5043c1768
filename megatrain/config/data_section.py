"""Settings of the data: where rows come from, and how they become batches."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megatrain.config.section import Section
from megatrain.config.types import LocalPath, Name, Paths, Seed


class DataConfig(Section):
    """The text, and how it becomes batches."""

    path: Paths
    """Text files, one or a list: `.txt` (one document), `.jsonl`, `.json` or `.parquet` (one per row)."""
    text_column: Name = "text"
    """Column of `.jsonl`, `.json` and `.parquet` files that holds the text."""
    seq_len: Annotated[int, Field(ge=2)] = 512
    """Tokens per sequence. Documents are joined and cut to this length; not beyond the model's context."""
    tokenizer: LocalPath | None = None
    """Tokenizer directory or hub id. null = the model's own, or one trained on the data if `model.init` is
    `random` and the model has none."""
    vocab_size: Annotated[int, Field(ge=257)] | None = None
    """Entries of a tokenizer trained on the data. null = the model's vocabulary size."""
    shuffle: bool = True
    """Visit the sequences in a new random order in each pass over the data; false = in file order."""
    seed: Seed | None = None
    """Seed of the order of the data. null = `train.seed`."""
