"""The resolver of data paths: files, directories, patterns, saved datasets and hub datasets."""

from __future__ import annotations

import glob
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatrain.config.sections.data import SourceConfig
from megatrain.data.read.arrow_rows import read_columnar, read_hub, read_saved
from megatrain.data.read.csv_rows import read_csv
from megatrain.data.read.json_rows import read_json
from megatrain.data.read.text_rows import UTF_16, open_bytes, read_txt
from megatrain.data.row import Row
from megatrain.errors import DataError, os_errors
from megatrain.hub import may_be_on_hub

_READERS: dict[str, Callable[..., Iterator[Row]]] = {
    ".txt": read_txt,
    ".jsonl": read_json,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiter="\t"),
    ".parquet": partial(read_columnar, builder="parquet"),
    ".arrow": partial(read_columnar, builder="arrow"),
}
_PACKED = (".txt", ".jsonl", ".json", ".csv", ".tsv")
"""The file types that may be packed, as in `.jsonl.gz`."""
KINDS = ", ".join(_READERS)
_SAVED = ("state.json", "dataset_dict.json")
"""The files of which any one marks a directory as written by `save_to_disk`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFile:
    """The rows of one place, in order."""

    name: str
    """The name in reports and errors."""
    is_text: bool
    """Whether the file is a document without columns."""
    read: Callable[[], Iterator[Row]]


def row_files(
    source: SourceConfig, *, text_column: str = "text", txt_by_line: bool = False, streaming: bool = False
) -> list[RowFile]:
    """List the files or datasets that a source's path stands for.

    Args:
        source: The source.
        text_column: The column of the text of a `.txt` file.
        txt_by_line: Whether each line of such a file is a document, as in LLaMA-Factory; otherwise the
            file is one.
        streaming: Whether a dataset of the hub is read while it is downloaded.

    Raises:
        DataError: The path matches nothing, or a file of a kind that is not read, or no disk has such a name.
    """
    with os_errors("read", source.path, DataError):
        return _row_files(source, text_column=text_column, txt_by_line=txt_by_line, streaming=streaming)


def _row_files(
    source: SourceConfig, *, text_column: str, txt_by_line: bool, streaming: bool
) -> list[RowFile]:
    path, place = source.path, Path(source.path)
    file_of = partial(_file, text_column=text_column, is_by_line=txt_by_line)
    if place.is_dir() and any((place / name).is_file() for name in _SAVED):
        return [RowFile(name=path, is_text=False, read=partial(read_saved, path, split=source.split))]
    if place.is_dir():
        files = [
            str(file) for file in sorted(place.rglob("*")) if _kind(file) and not _is_hidden(file, place)
        ]
        if not files:
            raise DataError(f"{path} is a directory without a file that is read ({KINDS}); check data.path")
        return [file_of(file) for file in files]
    if not place.exists() and glob.has_magic(path):
        files = sorted(file for file in glob.glob(path, recursive=True) if Path(file).is_file())
        if not files:
            raise DataError(f"{path}: no file has such a name; check data.path")
        return [file_of(file) for file in files]
    if is_of_hub(path):
        names = ("split", "subset", "folder", "revision")
        read = partial(read_hub, path, streaming=streaming, **{name: getattr(source, name) for name in names})
        return [RowFile(name=path, is_text=False, read=read)]
    return [file_of(path)]


def is_of_hub(path: str) -> bool:
    """Return whether a path is the name of a hub dataset, and no file of this machine."""
    return "/" in path and may_be_on_hub(path) and not _kind(Path(path))


def check_path(path: str) -> None:
    """Refuse a path at which there is nothing; nothing is read of existing files and of hub ids.

    Raises:
        DataError: There is nothing at the path.
    """
    if not Path(path).exists():
        row_files(SourceConfig(path=path))


def _kind(file: Path) -> str:
    """Return the suffix that selects a file's reader; empty if there is none."""
    suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
    if suffixes[-1:] == [".gz"]:
        return suffixes[0] if suffixes[0] in _PACKED else ""
    return suffixes[-1] if suffixes and suffixes[-1] in _READERS else ""


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _file(path: str, *, text_column: str, is_by_line: bool) -> RowFile:
    file = Path(path)
    if not file.exists():
        raise DataError(f"{path} does not exist; check data.path")
    kind = _kind(file)
    if not kind:
        raise DataError(f"{path}: files of this kind are not read; data.path takes {KINDS}")
    if file.stat().st_size == 0:
        raise DataError(f"{path} is empty; remove it from data.path or fill it")
    reader = _READERS[kind]
    if kind == ".txt":
        reader = partial(reader, text_column=text_column, is_by_line=is_by_line)

    def read() -> Iterator[Row]:
        try:
            with os_errors("read", path, DataError):
                if kind in (".txt", ".json", ".jsonl"):
                    _check_encoding(path)
                yield from reader(path)
        except (EOFError, zlib.error) as error:
            raise DataError(f"{path}: the packed file is damaged ({error})") from error

    return RowFile(name=path, is_text=kind == ".txt", read=read)


def _check_encoding(path: str) -> None:
    with open_bytes(path) as file:
        if file.read(2) in UTF_16:
            raise DataError(
                f"{path} is UTF-16, and text is read as UTF-8; convert it, as with iconv -f UTF-16 -t UTF-8"
            )
