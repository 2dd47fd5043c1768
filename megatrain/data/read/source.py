"""Reader of one source of a mixture: its rows become examples, and are counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from megatrain.config.sections.data import DataConfig, SourceConfig
from megatrain.data.example import Example, Source
from megatrain.data.formats.detect import Converter, Recipe, detect
from megatrain.data.read.dataset_info import entry_of, registry
from megatrain.data.read.files import RowFile, row_files
from megatrain.data.read.report import SourceReport
from megatrain.data.row import EMPTY_TEXT, Row, RowError
from megatrain.errors import DataError

_ROWS_LOOKED_AT = 100


class SourceReader:
    """Reads a source, each time from the beginning, with equal results."""

    def __init__(self, source: SourceConfig, data: DataConfig) -> None:
        is_entry = source.dataset is not None or registry(source.path) is not None
        self.config = entry_of(source) if is_entry else source
        self.name = self.config.name or self.config.path
        self._stops = data.on_bad_row == "stop"
        self._text_column = data.text_column
        said = replace(_said(self.config), is_closed=is_entry)
        text_column = said.columns.get("text", data.text_column)
        self._files = row_files(
            self.config, text_column=text_column, txt_by_line=is_entry, streaming=data.streaming
        )
        self.recipe = said if is_entry else self._detect(said)

    def _detect(self, said: Recipe) -> Recipe:
        """Detect the format of most of the first rows; a source of documents is raw text."""
        column = self._text_column
        as_text = replace(said, format="text", columns={"text": column} | dict(said.columns))
        is_text = all(file.is_text for file in self._files) or column != "text"
        if said.format == "text" or (said.format == "auto" and is_text):
            return as_text
        rows = (row.value for file in self._files for row in file.read())
        found: dict[str, list[Recipe]] = {}
        for value in islice(rows, _ROWS_LOOKED_AT):
            if not isinstance(value, RowError) and (recipe := detect(value, said, text_column=column)):
                found.setdefault(str(recipe), []).append(recipe)
        if found:
            return max(found.values(), key=len)[0]
        return as_text if said.format == "auto" else said

    def read(self, report: SourceReport) -> Iterator[Example]:
        """Yield the examples.

        Raises:
            DataError: No row can be used, one cannot and `data.on_bad_row` is `stop`, or a file is damaged.
        """
        report.format = str(self.recipe)
        converter = Converter(self.recipe)
        number, most = 0, self.config.max_samples
        for file in self._files:
            report.files.add(file.name)
            for row in file.read():
                if number == most:
                    return
                for example in self._examples(row, file, converter, report):
                    if number == most:
                        return
                    number += 1
                    yield example
        if number == 0:
            raise self._useless(report)

    def _examples(self, row: Row, file: RowFile, converter: Converter, report: SourceReport) -> list[Example]:
        report.num_rows += 1
        place = Source(file=file.name, row=row.number)
        try:
            if isinstance(row.value, RowError):
                raise row.value
            examples = converter.examples(row.value, place)
        except RowError as error:
            if self._stops and error.is_fault:
                raise DataError(f"{file.name}, {row.unit} {row.number}: {error.detail}") from error
            report.drop(place, error.reason, f"{row.unit} {row.number}: {error.detail}")
            return []
        fields = converter.fields
        report.columns.update(row.value)
        report.read_columns, report.turn_keys = fields.read_columns, fields.turn_keys
        for what in dict.fromkeys(fields.repairs):
            report.repair(place, what)
        return examples

    def _useless(self, report: SourceReport) -> DataError:
        """Return the error of a source without a usable row, which names its first fault."""
        if set(report.dropped) == {EMPTY_TEXT}:
            return DataError(f"{self.name} has no text, only empty documents; remove it from data.path")
        if not report.num_rows:
            return DataError(f"{self.name} has no rows; remove it from data.path")
        first = next((tally for reason, tally in report.dropped.items() if reason != EMPTY_TEXT))
        file = first.places[0].file
        where = f"{file}, {first.detail}"
        return DataError(
            f"{where} (none of {report.num_rows:,} rows can be used)" if report.num_rows > 1 else where
        )


def _said(source: SourceConfig) -> Recipe:
    """Return what the settings say of rows; LLaMA-Factory's field names are translated to ours."""
    given = dict(source.columns or {})
    if "query" in given or "response" in given:
        names = {"prompt": "instruction", "query": "input", "response": "output"}
        given = {names.get(name, name): column for name, column in given.items()}
    if "kto_tag" in given:
        given["label"] = given.pop("kto_tag")
    return Recipe(format=source.format or "auto", columns=given, tags=dict(source.tags or {}))
