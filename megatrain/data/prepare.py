"""Examples become packed rows: they are encoded by one process or several, packed in order, and counted."""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain.config.sizes import counted
from megatrain.data.cache import Kept, RowFile, RowWriter, find_rows, kept_rows
from megatrain.data.example import ChatExample, TextExample
from megatrain.data.fitting import Counts, Packing, fit
from megatrain.data.flagged_tokens import START, Words
from megatrain.data.packing import BestFit, Joining, OnePerRow, Packer
from megatrain.data.pairs import Judged, PairPacker
from megatrain.data.read.examples import ExampleStream
from megatrain.data.read.report import ReadReport
from megatrain.data.tokens.encode import EncoderRecipe, show
from megatrain.data.tokens.ends import TrainedEnds
from megatrain.data.tokens.left_out import held_by
from megatrain.data.tokens.processes import encode_all
from megatrain.errors import ConfigError, DataError
from megatrain.objective.rows import RowKind, kind_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

_SAMPLE_TOKENS = 2000
_SHOWN_CHARACTERS = 300
_PROGRESS_S = 10.0
_MULTIPLE = 8
"""The number of which the advised number of tokens of a row is a multiple."""
_MEASURED_ROWS = 64
"""The most rows in which the length of documents is looked up."""
_DOCUMENT_MULTIPLE = 64
"""The number of which the length of documents is a multiple, so that counts of a model serve several data."""
_MOST_CUT_OFF = 0.05
"""The share of examples that may be cut off entirely without a warning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Packed rows, and the counts of what became of the examples."""

    rows: RowFile
    """The rows, each a sequence of words."""
    packing: str
    """The way in which the rows are packed."""
    fingerprint: str
    """A name for exactly these rows."""
    counts: Counts
    sample: list[tuple[str, bool]]
    """The first example that was kept, decoded in pieces, each with whether it is trained on."""
    read: list[str]
    """The lines that say what became of the rows that were read."""
    warning: str | None
    """The fault of the chat template, if it has one."""
    ends: list[int] | None
    """The special tokens that are trained on; None for text, or if `warning` says that there is no end."""
    day: str | None
    """The date that the chat template was given, as `2026-11-23`; None if it has not asked."""

    @property
    def max_id(self) -> int:
        """Return the largest token id."""
        return self.counts.max_id

    @property
    def kind(self) -> RowKind:
        """Return the kind of the rows."""
        return kind_of(self.packing)

    @property
    def seq_len(self) -> int:
        """Return the number of tokens of a sequence."""
        return self.rows.shape[1] // self.kind.sequences

    @property
    def padding(self) -> float:
        """Return the share of the rows' tokens that belong to no example."""
        return self.counts.filled / (self.rows.shape[0] * self.rows.shape[1])

    @property
    def document_len(self) -> int | None:
        """Return the tokens of the document that a token is in, on average, up to a multiple; None: of a row.

        A sample of the rows is read, evenly spread.
        """
        if self.packing != "best_fit":
            return None
        number, length = self.rows.shape
        sample = np.linspace(0, number - 1, min(number, _MEASURED_ROWS)).astype(int).tolist()
        squares = 0
        for place in sample:  # one at a time: a row may have a million tokens
            starts = np.append(np.flatnonzero(self.rows[[place]] & START), length)
            squares += int(np.square(np.diff(starts)).sum())
        mean = squares / (len(sample) * length)
        return min(-(-int(mean) // _DOCUMENT_MULTIPLE) * _DOCUMENT_MULTIPLE, length)

    def describe(self) -> str:
        """Return the counts as one line."""
        counts, num_rows, seq_len = self.counts, self.rows.shape[0], self.seq_len
        sequences = f"{counted(num_rows, 'sequence')} of {seq_len:,}"
        if self.kind.one is not None:
            return (
                f"{counted(counts.kept, 'example')}, {counted(counts.tokens, 'token')}, "
                f"{counted(num_rows, self.kind.one)} of {self.kind.sequences} sequences, {seq_len:,} each"
            )
        if self.packing == "join":
            left = counts.tokens - num_rows * seq_len
            return (
                f"{counted(counts.examples, 'document')}, {counted(counts.tokens, 'token')}, {sequences} "
                f"({counted(left, 'token')} at the end cut)"
            )
        how = "packed best-fit, documents apart" if self.packing == "best_fit" else "one example in each"
        return (
            f"{counted(counts.kept, 'example')}, {counted(counts.tokens, 'token')}, "
            f"{counts.trained:,} trained on ({counts.trained / counts.tokens:.1%}), {sequences} ({how}, "
            f"{self.padding:.1%} padding)"
        )

    def show_sample(self) -> str:
        """Return the first example as one line, with trained text between double brackets."""
        parts = []
        for text, is_trained in self.sample:
            line = text.replace("\\", "\\\\").replace("\n", "\\n")
            if len(line) > _SHOWN_CHARACTERS:
                half = _SHOWN_CHARACTERS // 2
                line = f"{line[:half]} ... {line[-half:]}"
            parts.append(f"[[{line}]]" if is_trained else line)
        return "".join(parts)

    def faults(self) -> list[str]:
        """Return lines about what was dropped, repaired or cut; none if everything is there."""
        cut = self._cut()
        is_whole = not cut and not any(line.startswith(" ") for line in self.read)
        return [] if is_whole else [*self.read, *cut]

    def say_faults(self) -> None:
        """Log the faults."""
        for line in self.faults():
            _log.info("%s", line)

    def _cut(self) -> list[str]:
        counts = self.counts
        if not counts.too_long or self.packing == "join":
            return []
        return [
            f"{counted(counts.too_long, 'example')} longer than data.seq_len {self.seq_len:,}; "
            f"{counted(counts.cut_tokens, 'token')} cut (data.too_long)"
        ]

    def _too_wide(self) -> list[str]:
        """Advise shorter rows, where each has one example and the longest fills at most half of it."""
        longest = self.counts.longest
        fits = -(-longest // _MULTIPLE) * _MULTIPLE
        if self.packing == "best_fit" or not longest or 2 * fits > self.seq_len:
            return []
        return [
            f"{self.padding:.0%} of what is computed is padding: the longest row has "
            f"{counted(longest, 'token')}, so data.seq_len={fits} trains on the same in less time"
        ]

    def notes(self) -> list[str]:
        """Return lines about the contents, the cuts, the dropped rows with their reasons, and a sample.

        Plain text that is trained on as a whole gives no lines.
        """
        if self.packing == "join":
            return self.faults()
        lines = [*self.read, *self._cut(), *self._too_wide()]
        if self.day is not None:
            lines.append(f"the chat template writes the day, here and when a run is resumed {self.day}")
        return [*lines, f"first example, trained on what is in [[ ]]: {self.show_sample()}"]


def prepare_rows(
    examples: Callable[[], ExampleStream],
    recipe: EncoderRecipe,
    packing: Packing,
    *,
    folder: Path | None,
    key: str,
    workers: int = 1,
    show_progress: Callable[[str], object] = _log.info,
) -> Prepared:
    """Return the packed rows of examples: the cached rows of a key, or new ones.

    Args:
        examples: The function that opens the examples; it is called only if they have to be read.
        recipe: The recipe of the encoder.
        packing: The settings by which examples become rows.
        folder: The folder of all cached rows; if None, nothing is cached.
        key: The name of the files, settings and software that the rows come from.
        workers: The number of processes that encode; with 1, this process does.
        show_progress: The function that is given a line of progress from time to time.

    Raises:
        DataError: There is not one row, or nothing to train on.
        ConfigError: The examples need a chat template, and there is none.
        OutputError: The rows cannot be written.
    """
    if workers > 1 and multiprocessing.parent_process() is not None:
        raise ConfigError("data is prepared by several processes (data.workers) in the first process only")

    def make(place: Path) -> dict[str, Any]:
        return _make(place, examples(), recipe, packing, workers, show_progress)

    return _said(_as_prepared(kept_rows(folder, key, make, _as_prepared)))


def find_prepared(folder: Path, key: str) -> Prepared | None:
    """Return the cached rows of a key, or None if there are none that can be used."""
    found = find_rows(folder, key, _as_prepared)
    return None if found is None else _said(_as_prepared(found))


def _said(prepared: Prepared) -> Prepared:
    if prepared.warning:
        _log.warning("%s", prepared.warning)
    return prepared


def _as_prepared(kept: Kept) -> Prepared:
    manifest = kept.manifest
    return Prepared(
        rows=kept.rows,
        counts=Counts(**manifest["counts"]),
        sample=[(text, is_trained) for text, is_trained in manifest["sample"]],
        **{name: manifest[name] for name in ("packing", "fingerprint", "read", "day", "warning", "ends")},
    )


def _make(
    place: Path,
    examples: ExampleStream,
    recipe: EncoderRecipe,
    packing: Packing,
    workers: int,
    show_progress: Callable[[str], object],
) -> dict[str, Any]:
    """Write the rows, and return the manifest."""
    packer, counts = _packer(packing), Counts()
    sample: list[tuple[str, bool]] = []
    ends, has_chats, is_text = TrainedEnds(recipe.tokenizer), False, True
    held: set[str] = set()
    started = shown = time.monotonic()
    with RowWriter(place, packing.width) as writer:
        for example, encoded in encode_all(examples, recipe, workers):
            counts.examples += 1
            has_chats = has_chats or isinstance(example, ChatExample)
            is_text = is_text and isinstance(example, TextExample)
            held |= held_by(example)
            pieces = fit(example, encoded, packing, counts, examples.report)
            if pieces and not sample:
                sample = _show(pieces[0], recipe.tokenizer)
            for piece in pieces:
                if not isinstance(example, TextExample):
                    for words in piece.sides(packing.seq_len) if isinstance(piece, Judged) else (piece,):
                        ends.add(words)
                for rows in packer.add(piece):
                    writer.write(rows)
            now = time.monotonic()
            if now - shown > _PROGRESS_S:
                shown = now
                rate = counts.tokens / (now - started)
                show_progress(
                    f"preparing data: {counts.examples:,} examples, {counts.tokens:,} tokens, {rate:,.0f}/s"
                )
        for rows in packer.finish():
            writer.write(rows)
        fingerprint = writer.close()
    counts.filled = packer.num_filled
    if writer.num_rows == 0:
        raise _no_rows(counts, packing, examples.report)
    encoder = recipe.make()
    unended = encoder.untrained_end() if has_chats else None
    return {
        "packing": packing.way,
        "shape": [writer.num_rows, packing.width],
        "fingerprint": fingerprint,
        "counts": asdict(counts),
        "sample": sample,
        "read": examples.report.lines(),
        "day": recipe.day.isoformat() if has_chats and recipe.asks_day else None,
        "warning": _warning(counts, packing, [unended, encoder.left_out(held)]),
        "ends": None if is_text or unended is not None else sorted(ends.found),
    }


def _warning(counts: Counts, packing: Packing, more: Sequence[str | None]) -> str | None:
    """Return the warning that a user should see before the first step, with the lines of `more`."""
    warnings = [one for one in more if one is not None]
    if counts.cut_off > counts.examples * _MOST_CUT_OFF:
        warnings.append(
            f"{counts.cut_off:,} of {counts.examples:,} examples are left out, since what is trained on "
            f"begins behind data.seq_len {packing.seq_len:,}; raise data.seq_len to train on them"
        )
    if packing.too_long == "drop" and counts.too_long > counts.examples * _MOST_CUT_OFF:
        warnings.append(
            f"{counts.too_long:,} of {counts.examples:,} examples are left out, since they are longer than "
            f"data.seq_len {packing.seq_len:,}; raise data.seq_len, or cut them with data.too_long=truncate"
        )
    return "\n".join(warnings) or None


def _packer(packing: Packing) -> Packer | PairPacker:
    if (rows := kind_of(packing.way)).is_judged:
        return PairPacker(packing.seq_len, packing.fill_id, borrows=rows.borrows)
    if packing.way == "join":
        return Joining(packing.seq_len)
    kind = {"best_fit": BestFit, "pad": OnePerRow}[packing.way]
    return kind(packing.seq_len, packing.fill_id)


def _show(piece: Words | Judged, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """Decode a piece's first trained part, each part with whether it is trained on."""
    return piece.show(tokenizer) if isinstance(piece, Judged) else show(piece[:_SAMPLE_TOKENS], tokenizer)


def _no_rows(counts: Counts, packing: Packing, report: ReadReport) -> DataError:
    if packing.way == "join":
        advice = "add text or lower data.seq_len"
        if report.num_dropped:
            advice = f"rows were dropped: {'; '.join(map(str.strip, report.lines()))}"
        return DataError(
            f"the data has {counts.tokens} tokens, too few for one sequence of data.seq_len "
            f"{packing.seq_len}; {advice}"
        )
    if counts.examples == 0 and any(source.num_other_part for source in report.sources):
        return DataError(
            f"data.val_size leaves nothing here: {'; '.join(map(str.strip, report.lines()))}; use a size "
            "that leaves some of both, or name other files with data.eval_path"
        )
    return DataError(
        f"none of {counted(counts.examples, 'example')} can be trained on ({counts.too_long:,} longer than "
        f"data.seq_len {packing.seq_len:,}): {'; '.join(map(str.strip, report.lines()))}; see "
        "data.train_on, data.too_long and data.chat_template"
    )
