"""Entries of LLaMA-Factory's `dataset_info.json` say where rows are, and what their columns are called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.config.sections.data import COLUMNS, TAGS, SourceConfig
from megatrain.errors import DataError, os_errors

FILE = "dataset_info.json"
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
"""LLaMA-Factory's field names, where they are not ours; each is also the column's default name."""
_OTHER_HUBS = ("ms_hub_url", "om_hub_url")


def registry(path: str) -> Path | None:
    """Return the `dataset_info.json` that a path is or contains; None if there is none.

    A directory written by `save_to_disk` has a file of this name too, which is not a registry.
    """
    place = Path(path)
    file = place if place.name == FILE else place / FILE
    saved = ("state.json", "dataset_dict.json")
    with os_errors("read", path, DataError):
        is_one = file.is_file() and not any((file.parent / name).is_file() for name in saved)
    return file if is_one else None


def entry_of(source: SourceConfig) -> SourceConfig:
    """Return the source that an entry stands for; settings of `source` itself override the entry's.

    Raises:
        DataError: There is no such file or entry, or its rows are of a kind that is not read.
    """
    file = registry(source.path)
    if file is None:
        raise DataError(f"{source.path} has no {FILE}, and data.dataset names {source.dataset} of it")
    with os_errors("read", str(file), DataError):
        raw = file.read_bytes()
    try:
        entries = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not valid JSON ({error})") from error
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise DataError(f"{file} must be an object of entries, each of which is an object")
    if source.dataset is None:
        raise DataError(f"{file} has {len(entries)} entries; choose with data.dataset: {_some(entries)}")
    if source.dataset not in entries:
        raise DataError(f"{file} has no entry {source.dataset}; it has {_some(entries)}; check data.dataset")
    entry = entries[source.dataset]
    where = f"{file}, entry {source.dataset}"
    own = {key: value for key, value in source if value not in (None, {}, "auto")}
    try:
        found = {
            "path": _path(entry, file.parent, where),
            "name": source.dataset,
            "max_samples": entry.get("num_samples"),
            "split": entry.get("split"),
            "subset": entry.get("subset"),
            "folder": entry.get("folder"),
            **_meaning(entry, where),
        }
        return SourceConfig(**(found | {key: value for key, value in own.items() if key != "path"}))
    except (TypeError, ValueError, AttributeError, LookupError) as error:  # pydantic's error is a ValueError
        raise DataError(
            f"{where} is not as LLaMA-Factory has it ({' '.join(str(error).split())[:200]})"
        ) from error


def _some(entries: Mapping[str, Any]) -> str:
    return ", ".join(list(entries)[:12]) + (", ..." if len(entries) > 12 else "")


def _path(entry: Mapping[str, Any], folder: Path, where: str) -> str:
    if "hf_hub_url" in entry:
        return str(entry["hf_hub_url"])
    if "file_name" in entry:
        return str(folder / entry["file_name"])
    other = next((key for key in (*_OTHER_HUBS, "script_url", "cloud_file_name") if key in entry), None)
    raise DataError(f"{where}: its rows are at {other}, which is not read; download them and name the file")


def _meaning(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return format, columns and tags, with LLaMA-Factory's defaults spelled out."""
    formatting = entry.get("formatting", "alpaca")
    is_alpaca = formatting == "alpaca"
    if formatting not in ("alpaca", "sharegpt", "openai"):
        raise DataError(
            f"{where}: formatting {formatting} is not known; it must be alpaca, sharegpt or openai"
        )
    given = entry.get("columns")
    if given is None:
        given = dict(_ALPACA) if is_alpaca else {"messages": "conversations"}
    names = {**_ALPACA, "kto_tag": "label"}
    columns = {
        names.get(name, name): column for name, column in given.items() if names.get(name, name) in COLUMNS
    }
    tags = {name: tag for name, tag in entry.get("tags", {}).items() if name in TAGS}
    if entry.get("ranking"):
        kind, columns = "preference", {"chosen": "chosen", "rejected": "rejected"} | columns
    elif "label" in columns:
        kind = "kto"
    elif not is_alpaca:
        kind = "messages" if formatting == "openai" else "sharegpt"
    elif "output" in columns:
        kind = "alpaca"
    else:  # a prompt alone is pre-training text
        kind, columns = "text", {"text": columns.get("instruction", "text")}
    return {"format": kind, "columns": columns, "tags": tags}
