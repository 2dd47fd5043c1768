"""Documents of text files, where every row must be a document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatrain.config.sections.data import DataConfig
from megatrain.data.example import TextExample
from megatrain.data.read.examples import read_examples


def read_texts(paths: Iterable[str], *, text_column: str = "text") -> Iterator[TextExample]:
    """Yield the documents of `paths` in order; documents of white space only are left out.

    Args:
        paths: The paths, as in `data.path`.
        text_column: The column that holds the text of a row.

    Raises:
        DataError: A file is missing, empty or of another kind, text is not UTF-8, a row cannot be read or has
            no text, or a file has no usable document. The error names the file and the row.
    """
    data = DataConfig(path=tuple(paths), format="text", text_column=text_column, on_bad_row="stop")
    for example in read_examples(data):
        assert isinstance(example, TextExample)
        yield example
