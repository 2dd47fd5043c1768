"""The stream of examples of all sources, in order or drawn by weights, which continues from a position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from megatrain.config.sections.data import DataConfig, SourceConfig
from megatrain.data.example import Example
from megatrain.data.read.parts import HoldOut, Part
from megatrain.data.read.report import ReadReport, SourceReport
from megatrain.data.read.source import SourceReader
from megatrain.errors import DataError


def read_examples(
    data: DataConfig,
    *,
    seed: int = 0,
    part: Part = Part.TRAIN,
) -> ExampleStream:
    """Read the examples of `data.path` once.

    Args:
        data: The settings of the data.
        seed: The seed of the draws of a mixture, and of the examples that `data.val_size` holds out.
        part: The part to read: the training examples, or the held-out ones.

    Raises:
        DataError: A source is missing or of an unknown kind; later, `ExampleStream` raises it as it says.
    """
    readers = [SourceReader(source, data) for source in data.sources]
    holds = _hold_outs(readers, data, seed)
    sources = [_Source(reader, hold, part) for reader, hold in zip(readers, holds, strict=True)]
    weights = [source.weight for source in data.sources]
    is_drawn = part is Part.TRAIN and any(weight is not None for weight in weights)
    return ExampleStream(
        sources,
        weights=[weight or 1.0 for weight in weights] if is_drawn else None,
        ends_with_first=data.mixture_ends == "first_exhausted",
        seed=seed,
        stops=data.on_bad_row == "stop",
    )


def read_eval_examples(data: DataConfig, *, seed: int = 0) -> dict[str, ExampleStream]:
    """Read the evaluation sets by name: `val` is what `data.val_size` holds out, others `data.eval_path`.

    Raises:
        DataError: `read_examples` raises it, or two sets have one name.
    """
    found = {}
    if data.val_size:
        found["val"] = read_examples(data, seed=seed, part=Part.EVAL)
    for name, sources in data.eval_sources.items():
        if name in found:
            raise DataError("data.eval_path names a set val, as data.val_size does; use another name")
        found[name] = _all_of(sources, data, seed)
    return found


def _all_of(sources: Sequence[SourceConfig], data: DataConfig, seed: int) -> ExampleStream:
    """Read all examples of sources other than `data.path`."""
    whole = HoldOut(Fraction(0), seed=seed)
    readers = [_Source(SourceReader(source, data), whole, Part.TRAIN) for source in sources]
    return ExampleStream(readers, seed=seed, stops=data.on_bad_row == "stop")


def _hold_outs(readers: Sequence[SourceReader], data: DataConfig, seed: int) -> list[HoldOut]:
    if data.val_size < 1:
        share = Fraction(str(data.val_size))
        return [HoldOut(share, seed=seed) for _ in readers]
    counts = [sum(1 for _ in reader.read(SourceReport(name=reader.name))) for reader in readers]
    if data.val_size >= sum(counts):
        raise DataError(
            f"data.val_size is {data.val_size:g}, and there are {sum(counts):,} examples: nothing would be "
            "left to train on; use a smaller number, or a share below 1"
        )
    share = Fraction(int(data.val_size), sum(counts))
    return [HoldOut(share, seed=seed, offset=sum(counts[:index])) for index in range(len(counts))]


class _Source:
    """A source while it is read: one part of it, over and over if need be."""

    def __init__(self, reader: SourceReader, hold_out: HoldOut, part: Part) -> None:
        others = "held out" if part is Part.TRAIN else "trained on"
        self.report = SourceReport(name=reader.name, other_part=others)
        self.num_passes = 0
        """The number of complete passes."""
        self._reader, self._hold_out, self._part = reader, hold_out, part
        self._pending: Iterator[tuple[int, Example]] | None = None

    def next(self) -> Example | None:
        """Return the next example of this part, or None at the end of a pass, after which it starts over."""
        # Only the first pass is counted, since later passes read the same rows again.
        report = self.report if self.num_passes == 0 else SourceReport(name=self.report.name)
        self._pending = self._pending or enumerate(self._reader.read(report))
        for ordinal, example in self._pending:
            if self._hold_out.part(ordinal) is self._part:
                report.num_kept += 1
                return example
            report.num_other_part += 1
        self._pending = None
        self.num_passes += 1
        return None


class ExampleStream(Iterator[Example]):
    """Examples of several sources, with a report on their rows.

    Reading raises DataError for an unusable row where `data.on_bad_row` is `stop`, for a damaged file, and
    for a source without a usable row.
    """

    def __init__(
        self,
        sources: Sequence[_Source],
        *,
        weights: Sequence[float] | None = None,
        ends_with_first: bool = False,
        seed: int,
        stops: bool,
    ) -> None:
        """Concatenate sources, or draw from them by `weights`."""
        self.report = ReadReport(stops=stops, sources=[source.report for source in sources])
        """The report on the rows that this stream has read."""
        self._sources = sources
        self._ends_with_first = ends_with_first
        self._current = 0
        self._bounds = None if weights is None else np.cumsum(weights) / np.sum(weights)
        bits = np.random.PCG64(np.random.SeedSequence([seed, len(sources)]))
        self._random = np.random.Generator(bits)

    def __next__(self) -> Example:
        return self._next_in_order() if self._bounds is None else self._next_drawn(self._bounds)

    def _next_in_order(self) -> Example:
        while self._current < len(self._sources):
            example = self._sources[self._current].next()
            if example is not None:
                return example
            self._current += 1
        raise StopIteration

    def _next_drawn(self, bounds: NDArray[np.float64]) -> Example:
        while not self._is_over():
            source = self._sources[int(np.searchsorted(bounds, self._random.random(), side="right"))]
            example = source.next()
            if example is None and not self._is_over():
                example = source.next()  # the source starts over
            if example is not None:
                return example
        raise StopIteration

    def _is_over(self) -> bool:
        complete = (source.num_passes > 0 for source in self._sources)
        return any(complete) if self._ends_with_first else all(complete)
