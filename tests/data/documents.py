"""Documents of text files as rows in memory: the plain way, beside which prepared data are held."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatrain.config.sections.data import DataConfig
from megatrain.data.example import TextExample
from megatrain.data.packing import Joining
from megatrain.data.read.examples import read_examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_texts(paths: Iterable[str], *, text_column: str = "text") -> Iterator[TextExample]:
    """Yield the documents of `paths` in order; a row that is none is an error."""
    data = DataConfig(path=tuple(paths), format="text", text_column=text_column, on_bad_row="stop")
    for example in read_examples(data):
        assert isinstance(example, TextExample)
        yield example


def tokenize(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, end_id: int
) -> Iterator[Sequence[int]]:
    """Yield each text's token ids with the special tokens the tokenizer adds itself, and `end_id` last."""
    for text in texts:
        encoded: Any = tokenizer(text, verbose=False)  # a text beyond the model's context is expected
        ids = encoded["input_ids"]
        yield ids if ids and ids[-1] == end_id else [*ids, end_id]


def join_documents(documents: Iterable[Sequence[int]], seq_len: int) -> NDArray[np.int32]:
    """Join documents of token ids into (num_rows, seq_len) rows in memory; a partial last row is dropped."""
    packer = Joining(seq_len)
    rows = [row for ids in documents for row in packer.add(np.asarray(ids, dtype=np.int32))]
    return np.concatenate([np.empty((0, seq_len), dtype=np.int32), *rows, *packer.finish()])
