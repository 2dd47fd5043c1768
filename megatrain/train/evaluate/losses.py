"""The loss of a model on held-out sets, which changes nothing of training, not one bit."""

from __future__ import annotations

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
from megatrain.model.head.head import count_targets
from megatrain.objective.objective import Shown
from megatrain.stream.engine import Engine
from megatrain.stream.evaluate import losses
from megatrain.train.evaluate.tally import Tally, as_values

if TYPE_CHECKING:
    from megatrain.distributed.ranks import Ranks


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

    @property
    def numbers(self) -> dict[str, float]:
        """Return the findings by name: `loss`, `perplexity` for tokens, and the count."""
        found = {"loss": self.loss, **self.shown, self.unit: self.count}
        return found | ({"perplexity": self.perplexity} if self.unit == "tokens" else {})

    @property
    def perplexity(self) -> float:
        """The exponential of the loss, or infinity if no float is as large."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def describe(self) -> str:
        """Return the findings in a few words."""
        others = [
            f"{name} {value:.4g}" for name, value in self.numbers.items() if name not in ("loss", self.unit)
        ]
        return ", ".join([f"loss {self.loss:.4f}", *others, counted(self.count, self.unit.removesuffix("s"))])


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
    seen: list[Shown] = []  # read only at the end, so that nobody waits for the device before
    counts: list[int] = []

    def own() -> Iterator[Mapping[str, Any]]:
        for number, batch in enumerate(islice(one.batches(), most_batches)):
            if number % ranks.size == ranks.rank and count_targets(batch):
                numbers.append(number)
                yield batch

    if one.measure is None:
        for loss, count in losses(engine, own()):
            seen.append({"loss": loss.double().view(1) * count})
            counts.append(count)
    else:
        for shown in one.measure(engine, own()):
            seen.append(shown)
            counts.append(len(shown["loss"]))
    found = list(zip(numbers, map(as_values, seen), counts, strict=True))
    found = sorted(map(tuple, chain.from_iterable(ranks.gather_values(found))), key=itemgetter(0))
    count = sum(count for *_, count in found)
    if count == 0:
        raise DataError(f"the eval set {one.name} has no token with a label; leave it out, or check its data")
    tally = Tally()
    for _, values, _ in found:
        tally.add({name: torch.tensor(each, dtype=torch.float64) for name, each in values.items()})
    mean = tally.take_sum("loss") / count
    seconds, unit = time.perf_counter() - began_s, "tokens" if one.measure is None else "rows"
    return Evaluation(name=one.name, loss=mean, count=count, unit=unit, shown=tally.means(), seconds=seconds)


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
