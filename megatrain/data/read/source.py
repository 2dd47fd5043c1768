"""Reader of one source of a mixture: its rows become examples, are counted, and can be read from anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice

from megatrain.config.sections.data import DataConfig, SourceConfig
from megatrain.data.example import Example, Source
from megatrain.data.formats.detect import Converter, Recipe, detect
from megatrain.data.read.dataset_info import entry_of, registry
from megatrain.data.read.files import Reading, RowFile, row_files
from megatrain.data.read.report import SourceReport
from megatrain.data.row import Row, RowError, Start
from megatrain.errors import DataError

_ROWS_LOOKED_AT = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePosition:
    """The position of the next example in a source."""

    file: int = 0
    number: int = 0
    """The number of the last row of that file that has been used up."""
    end: int = 0
    taken: int = 0
    """The number of examples already taken from the row behind it."""
    ordinal: int = 0
    """The number of examples of the source so far."""

    def json(self) -> dict[str, int]:
        """Return the position as plain values."""
        return asdict(self)


class SourceReader:
    """Reads a source, each time from the beginning or from a position, with equal results."""

    def __init__(self, source: SourceConfig, data: DataConfig) -> None:
        is_entry = source.dataset is not None or registry(source.path) is not None
        self.config = entry_of(source) if is_entry else source
        self.name = self.config.name or self.config.path
        self._stops = data.on_bad_row == "stop"
        self._text_column = data.text_column
        said = replace(_said(self.config), is_closed=is_entry)
        self._files = row_files(
            self.config.path,
            Reading(
                text_column=said.columns.get("text", data.text_column),
                txt_by_line=is_entry,
                split=self.config.split,
                subset=self.config.subset,
                folder=self.config.folder,
                revision=self.config.revision,
                streaming=data.streaming,
            ),
        )
        self.recipe = said if is_entry else self._detect(said)

    def _detect(self, said: Recipe) -> Recipe:
        """Detect the format of most of the first rows; a source of documents is raw text."""
        column = self._text_column
        as_text = replace(said, format="text", columns={"text": column} | dict(said.columns))
        is_text = all(file.is_text for file in self._files) or column != "text"
        if said.format == "text" or (said.format == "auto" and is_text):
            return as_text
        rows = (row.value for file in self._files for row in file.read(Start()))
        found: dict[str, list[Recipe]] = {}
        for value in islice(rows, _ROWS_LOOKED_AT):
            if not isinstance(value, RowError) and (recipe := detect(value, said, text_column=column)):
                found.setdefault(str(recipe), []).append(recipe)
        if found:
            return max(found.values(), key=len)[0]
        return as_text if said.format == "auto" else said

    def read(
        self, report: SourceReport, start: SourcePosition = SourcePosition()
    ) -> Iterator[tuple[Example, SourcePosition]]:
        """Yield each example with the position behind it.

        Raises:
            DataError: No row can be used, one cannot and `data.on_bad_row` is `stop`, or a file is damaged.
        """
        report.format = str(self.recipe)
        converter = Converter(self.recipe)
        position = start
        for index in range(start.file, len(self._files)):
            file = self._files[index]
            report.files.add(file.name)
            if index != start.file:
                position = SourcePosition(file=index, ordinal=position.ordinal)
            for row in file.read(Start(position.number, position.end)):
                if position.ordinal == self.config.max_samples:
                    return
                examples = self._examples(row, file, converter, report)
                before = position
                for taken, example in enumerate(examples, start=1):
                    if taken <= start.taken and before == start:
                        continue
                    if position.ordinal == self.config.max_samples:
                        return
                    position = replace(before, taken=taken, ordinal=position.ordinal + 1)
                    if taken == len(examples):
                        position = replace(position, number=row.number, end=row.end, taken=0)
                    yield example, position
                if not examples:
                    position = replace(position, number=row.number, end=row.end, taken=0)
        if position.ordinal == 0:
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
        if set(report.dropped) == {"empty text"}:
            return DataError(
                f"{self.name}: no text in the file, only empty documents; remove it from data.path"
            )
        if not report.num_rows:
            return DataError(f"{self.name} has no rows; remove it from data.path")
        first = next((tally for reason, tally in report.dropped.items() if reason != "empty text"))
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
