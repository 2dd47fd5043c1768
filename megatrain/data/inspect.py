"""Inspection of data before training: rows kept and dropped, lengths, and examples with marks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain.data.example import ChatExample, Example, JudgedExample, texts_of
from megatrain.data.flagged_tokens import num_trained
from megatrain.data.read.examples import ExampleStream
from megatrain.data.read.report import ReadReport
from megatrain.data.tokens.encode import Encoder, Refused, show
from megatrain.data.tokens.left_out import held_by
from megatrain.data.tokens.rendering import RenderError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EXAMPLES_AT_ONCE = 256
_BAR = 40
_MOST_TOKENS_SHOWN = 1024
_MOST_CHARACTERS_SHOWN = 4000

Pieces = list[tuple[str, bool]]
"""Pieces of text, each with whether it is trained on."""


@dataclass(kw_only=True)
class Inspection:
    """The findings about one set of data."""

    report: ReadReport
    unit: str
    """The unit of lengths: `tokens`, or `characters` where no tokenizer is known."""
    seq_len: int | None
    lengths: array[int] = field(default_factory=lambda: array("q"))
    """The length of each example; for a pair, that of the longer answer with the prompt."""
    total: int = 0
    """The sum of all lengths; the prompt of a pair counts with each answer."""
    num_trained: int = 0
    """The number of tokens that are trained on."""
    samples: list[tuple[str, Pieces]] = field(default_factory=list)
    """The sample examples, each with its place."""
    warnings: list[str] = field(default_factory=list)
    """The warnings about what the chat template does with such data."""

    @property
    def is_trainable(self) -> bool:
        """Whether there is anything to train on."""
        return bool(self.lengths) and (self.unit == "characters" or self.num_trained > 0)

    def add(self, length: int, total: int = 0, num_trained: int = 0) -> None:
        """Count an example; `total` is the number of its tokens where that is not the length."""
        self.lengths.append(length)
        self.total += total or length
        self.num_trained += num_trained

    def lines(self, *, colour: bool) -> list[str]:
        """Return the report's lines; trained text is green with `colour`, otherwise in double brackets."""
        lines = self.report.lines()
        if not self.lengths:
            return [*lines, "nothing is left to train on"]
        lengths = np.frombuffer(self.lengths, dtype=np.int64)
        total = f"{self.total:,} {self.unit}"
        if self.unit == "tokens":
            share = self.num_trained / max(1, self.total)
            total += f", {self.num_trained:,} trained on ({share:.1%})"
        median, most, longest = (int(np.quantile(lengths, share)) for share in (0.5, 0.95, 1))
        lines += ["", f"{total}; of an example: median {median:,}, 95 % up to {most:,}, longest {longest:,}"]
        lines += [f"  {line}" for line in _histogram(lengths)]
        if self.seq_len is not None and longest > self.seq_len:
            beyond = int((lengths > self.seq_len).sum())
            lines.append(f"  {beyond:,} longer than data.seq_len {self.seq_len:,} (data.too_long)")
        lines += [line for warning in self.warnings for line in ("", f"warning: {warning}")]
        for place, pieces in self.samples:
            marked = "green" if colour else "in [[ ]]"
            trained_on = f", trained on what is {marked}" if self.unit == "tokens" else ""
            lines += [
                "",
                f"example {place}{trained_on}:",
                "".join(_marked(*piece, colour) for piece in pieces),
            ]
        return lines

    def json(self) -> dict[str, Any]:
        """Return the findings as plain values."""
        lengths = np.frombuffer(self.lengths, dtype=np.int64) if self.lengths else np.zeros(0, np.int64)
        return {
            **self.report.json(),
            "unit": self.unit,
            "total": self.total,
            "trained": self.num_trained if self.unit == "tokens" else None,
            "longer_than_seq_len": None if self.seq_len is None else int((lengths > self.seq_len).sum()),
            "lengths": [{"most": most, "examples": count} for most, count in _bins(lengths)],
            "warnings": self.warnings,
            "samples": [{"place": place, "pieces": pieces} for place, pieces in self.samples],
        }


def inspect_examples(
    stream: ExampleStream,
    *,
    encoder: Encoder | None,
    tokenizer: PreTrainedTokenizerBase | None,
    seq_len: int | None,
    num_samples: int = 1,
) -> Inspection:
    """Read all examples, and measure them as training would see them.

    Args:
        stream: The stream of examples.
        encoder: The encoder that tokenises them; if None, lengths are in characters.
        tokenizer: The tokenizer of the encoder.
        seq_len: The number of tokens of a sequence.
        num_samples: The number of examples to show; the first that are kept are shown.

    Raises:
        DataError: The stream cannot be read.
        ConfigError: The examples need a chat template, and there is none.
    """
    found = Inspection(
        report=stream.report, unit="characters" if encoder is None else "tokens", seq_len=seq_len
    )
    held: set[str] = set()
    has_chats = False
    while examples := list(islice(stream, _EXAMPLES_AT_ONCE)):
        held.update(*map(held_by, examples))
        has_chats = has_chats or any(isinstance(example, ChatExample) for example in examples)
        if encoder is None or tokenizer is None:
            for example in examples:
                _add_text(found, example, num_samples)
        else:
            _add_tokens(found, examples, encoder, tokenizer, num_samples)
    if encoder is not None and found.lengths:
        said = (encoder.untrained_end() if has_chats else None, encoder.left_out(held))
        found.warnings = [one for one in said if one is not None]
    return found


def _add_text(found: Inspection, example: Example, num_samples: int) -> None:
    texts = list(texts_of(example))
    found.add(sum(map(len, texts)))
    if len(found.samples) < num_samples:
        text = "\n".join(texts)
        more = len(text) - _MOST_CHARACTERS_SHOWN
        end = f" ... ({more:,} characters more)" if more > 0 else ""
        found.samples.append((str(example.source), [(text[:_MOST_CHARACTERS_SHOWN] + end, False)]))


def _add_tokens(
    found: Inspection,
    examples: Sequence[Example],
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerBase,
    num_samples: int,
) -> None:
    pairs = [example for example in examples if isinstance(example, JudgedExample)]
    plain = [example for example in examples if not isinstance(example, JudgedExample)]
    for pair in pairs:
        try:
            judged = encoder.encode_pair(pair)
        except RenderError as error:
            found.report.drop(pair.source, str(error))
            continue
        found.add(max(judged.lengths), sum(judged.lengths), sum(map(len, judged.answers)))
        if len(found.samples) < num_samples:
            found.samples.append((str(pair.source), judged.show(tokenizer)))
    for example, words in zip(plain, encoder.encode(plain), strict=True):
        if isinstance(words, Refused):
            found.report.drop(example.source, words.reason)
            continue
        found.add(len(words), num_trained=num_trained(words))
        if len(found.samples) < num_samples:
            pieces = show(words[:_MOST_TOKENS_SHOWN], tokenizer)
            more = len(words) - _MOST_TOKENS_SHOWN
            pieces += [(f" ... ({more:,} tokens more)", False)] if more > 0 else []
            found.samples.append((str(example.source), pieces))


def _marked(text: str, is_trained: bool, colour: bool) -> str:
    if not is_trained:
        return text
    return f"\x1b[32m{text}\x1b[0m" if colour else f"[[{text}]]"


def _bins(lengths: Any) -> list[tuple[int, int]]:
    """Count lengths by powers of two: return the largest length of each bin and its count."""
    if not len(lengths):
        return []
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    counts = np.bincount(powers)
    first = int(powers.min())
    return [(2**power, int(count)) for power, count in enumerate(counts) if power >= first]


def _histogram(lengths: Any) -> list[str]:
    bins = _bins(lengths)
    largest = max(count for _, count in bins)
    wide = len(f"{bins[-1][0]:,}")
    return [
        f"<= {most:{wide},}  {'#' * -(-_BAR * count // largest):{_BAR}}  {count:,}".rstrip()
        for most, count in bins
    ]
