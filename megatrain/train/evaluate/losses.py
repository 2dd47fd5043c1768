"""The loss of a model on held-out sets, which changes nothing of training, not one bit."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from megatrain.checkpoint.rng import encode_rng, restore_rng
from megatrain.config.sizes import counted
from megatrain.data.cache import Rows
from megatrain.distributed.alone import ALONE, Alone
from megatrain.errors import DataError
from megatrain.model.head.positions import PositionSums, means_by_position
from megatrain.model.shares import count_targets
from megatrain.objective.objective import Shown
from megatrain.stream.engine import Engine
from megatrain.stream.evaluate import batch_losses
from megatrain.train.evaluate.tally import Tally, as_values
from megatrain.train.records.names import LOSS_AT, TOKENS_AT

if TYPE_CHECKING:
    from megatrain.distributed.ranks import Ranks


_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSet:
    """A named set of held-out data."""

    name: str
    batches: Callable[[], Iterable[Mapping[str, Any]]]
    """The function that begins a pass over micro-batches: `input_ids`, `labels` and other arguments."""
    measure: Measure | None = None
    """The function that computes the loss of batches, where that is not the model's own."""
    rows: Rows | None = None
    """The rows of its batches."""
    by_position: bool = False
    """Whether the loss is wanted by ranges of positions too; only of the model's own loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The findings on one set."""

    name: str
    loss: float
    """The mean over all counted items, each of the same weight."""
    count: int
    """The number of tokens with a label, or of rows of judged answers."""
    seconds: float
    unit: str = "tokens"
    """The unit of `count`: `tokens` or `rows`."""
    shown: Mapping[str, float] = field(default_factory=dict)
    """The other means, by name."""
    by_position: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """The mean loss and the number of tokens in each range of positions, by the range's name (`1k-2k`)."""

    @property
    def numbers(self) -> dict[str, float]:
        """Return the findings by name: `loss`, `perplexity` for tokens, the count, and both by positions."""
        found = self._means | {self.unit: self.count}
        for name, (loss, count) in self.by_position.items():
            found |= {f"{LOSS_AT}{name}": loss, f"{TOKENS_AT}{name}": count}
        return found

    @property
    def _means(self) -> dict[str, float]:
        return {
            "loss": self.loss,
            **self.shown,
            **({"perplexity": self.perplexity} if self.unit == "tokens" else {}),
        }

    @property
    def perplexity(self) -> float:
        """The exponential of the loss, or infinity if no float is as large."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def describe(self) -> str:
        """Return the findings in a few words."""
        others = [f"{name} {value:.4g}" for name, value in self._means.items() if name != "loss"]
        found = [f"loss {self.loss:.4f}", *others, counted(self.count, self.unit.removesuffix("s"))]
        at = [f"{name} {loss:.4f}" for name, (loss, _) in self.by_position.items()]
        return ", ".join(found) + (f"; loss by position: {', '.join(at)}" if at else "")


Measure = Callable[[Engine, Iterable[Mapping[str, Any]]], Iterator[Shown]]
"""A function that yields, for each batch, the values of its rows, with their `loss` among them."""


def evaluate(
    engine: Engine, sets: Sequence[EvalSet], *, most_batches: int | None, ranks: Ranks | Alone = ALONE
) -> list[Evaluation]:
    """Return the loss of each set, with the state streaming as in training.

    Several ranks share the batches out, and every one returns the same.

    Args:
        engine: The engine of the model, between two steps.
        sets: The sets to evaluate on.
        most_batches: The number of batches of each set; None means all.
        ranks: The ranks that call this together.

    Raises:
        DataError: A set has no token with a label.
    """
    with undisturbed(engine):
        return [_evaluate(engine, one, most_batches, ranks) for one in sets]


def _evaluate(engine: Engine, one: EvalSet, most_batches: int | None, ranks: Ranks | Alone) -> Evaluation:
    began_s = time.perf_counter()
    numbers: list[int] = []
    ranges: list[PositionSums | None] = []
    seen: list[Shown] = []  # read only at the end, so that nobody waits for the device before
    counts: list[int] = []

    def own() -> Iterator[Mapping[str, Any]]:
        for number, batch in enumerate(islice(one.batches(), most_batches)):
            if number % ranks.size == ranks.rank and count_targets(batch):
                numbers.append(number)
                yield batch

    if one.measure is None:
        for loss, count, sums in batch_losses(engine, own(), by_position=one.by_position):
            seen.append({"loss": loss.double().view(1) * count})
            counts.append(count)
            ranges.append(sums)
    else:
        for shown in one.measure(engine, own()):
            seen.append(shown)
            counts.append(len(shown["loss"]))
            ranges.append(None)
    of_ranges = [None if each is None else each.as_values() for each in ranges]
    found = list(zip(numbers, map(as_values, seen), counts, of_ranges, strict=True))
    found = sorted(map(tuple, chain.from_iterable(ranks.gather_values(found))), key=itemgetter(0))
    count = sum(count for _, _, count, _ in found)
    if count == 0:
        raise DataError(f"the eval set {one.name} has no token with a label; leave it out, or check its data")
    tally = Tally()
    for _, values, *_ in found:
        tally.add({name: torch.tensor(each, dtype=torch.float64) for name, each in values.items()})
    mean = tally.take_sum("loss") / count
    seconds, unit = time.perf_counter() - began_s, "tokens" if one.measure is None else "rows"
    by_position = means_by_position([each for *_, each in found]) if one.by_position else {}
    if one.by_position and not by_position:
        _log.warning(
            "the loss by position (eval.by_position) on %s is not known: this model computes its loss whole",
            one.name,
        )
    return Evaluation(
        name=one.name,
        loss=mean,
        count=count,
        unit=unit,
        shown=tally.means(),
        by_position=by_position,
        seconds=seconds,
    )


@contextmanager
def undisturbed(engine: Engine) -> Iterator[None]:
    """Put the model into the mode without dropout, and afterwards restore modes and random states."""
    modes = {module: module.training for module in engine.model.modules()}
    states = encode_rng()
    engine.model.eval()
    try:
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training
        restore_rng(states)
