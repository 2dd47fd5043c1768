"""The interface of an objective: its rows, its loss of a row, its settings, and its names elsewhere.

Configuration and data know objectives too, so torch is imported where a loss is computed, and not before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from megatrain.objective.rows import PAIRS, RowKind

if TYPE_CHECKING:
    from torch import Tensor

Shown = dict[str, "Tensor"]
"""The shown values of some rows by name, a number for each row."""

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Settings(BaseModel):
    """Settings of an objective, which are keys of the section `preference`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)


class Comparing(Settings):
    """Settings of every objective that compares answers."""

    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    """Scale of what answers are compared by. With a reference, which is the model before the first step, it
    is how much is lost by leaving that."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The inputs of a loss: two answers of each row of a batch, side by side."""

    log_probabilities: Tensor
    """The model's log-probability of each answer after its prompt, (B, 2), with gradients."""
    lengths: Tensor
    """The number of tokens of each answer, (B, 2)."""
    reference: Tensor
    """The reference's log-probabilities, (B, 2); zeros where the objective has none."""
    is_good: Tensor
    """Whether the first answer of a row is marked good, (B,)."""

    @property
    def ratios(self) -> Tensor:
        """The model's log-probabilities minus the reference's."""
        return self.log_probabilities - self.reference

    def per_token(self, values: Tensor) -> Tensor:
        """Return values of answers, (B, 2), divided by their numbers of tokens."""
        return values / self.lengths.clamp(min=1)


@dataclass(frozen=True, slots=True)
class Theirs:
    """The names of an objective and its settings in files of another trainer."""

    method: str
    """The value that asks for it: of LLaMA-Factory's `stage`, or of axolotl's `rl`."""
    keys: Mapping[str, str]
    """Their keys, each with its setting of `preference`; an empty one follows from the method."""
    variant: str | None = None
    """The value of LLaMA-Factory's `pref_loss` that asks for it; None if there is no such choice."""
    sets: Mapping[str, Any] = field(default_factory=dict)
    """The settings of `preference` that follow from the method alone."""


class Objective:
    """The objective of a run; objectives are subclasses, which `megatrain.objective.registry` lists."""

    name: ClassVar[str]
    """The value of `train.loss`."""
    learns: ClassVar[str]
    """The learnt behaviour, in words that follow on `to`."""
    rows: ClassVar[RowKind] = PAIRS
    settings: ClassVar[type[Settings]] = Comparing
    """The settings that the loss reads; they are named as arguments of TRL's trainers are."""
    has_reference: ClassVar[bool] = True
    """Whether the loss compares with the model before the first step."""
    llamafactory: ClassVar[Sequence[Theirs]] = ()
    axolotl: ClassVar[Sequence[Theirs]] = ()

    def problems(self, settings: Any) -> Iterator[str]:
        """Yield the faults of its own settings, each with a way out."""
        yield from ()

    def losses(self, settings: Any, answers: Answers) -> tuple[Tensor, Shown]:
        """Return the loss of each row of a batch, with gradients, and the values to show of it.

        Args:
            settings: The values of `settings`.
            answers: The model's results for the batch.
        """
        raise NotImplementedError


def rewards_of(scores: Tensor) -> Shown:
    """Return the shown values of pairs: the rewards of both answers, and whether the better one has more.

    Args:
        scores: The rewards, (B, 2), the chosen answer's first.
    """
    chosen, rejected = scores.detach().unbind(1)
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).float(),
    }
