"""What an objective is: the rows that it wants, its loss of a row, its settings, and its names elsewhere.

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
"""By name, what was seen of some rows: a number for each."""

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
    """What a loss is computed from: two answers of each row of a batch, side by side."""

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
        """The model's log-probabilities less the reference's."""
        return self.log_probabilities - self.reference

    def per_token(self, values: Tensor) -> Tensor:
        """Return values of answers, (B, 2), divided by their numbers of tokens."""
        return values / self.lengths.clamp(min=1)


@dataclass(frozen=True, slots=True)
class Theirs:
    """What files of another trainer call an objective, and its settings."""

    method: str
    """The value that asks for it: of LLaMA-Factory's `stage`, of axolotl's `rl`."""
    keys: Mapping[str, str]
    """Their keys, and the settings of `preference` that they are; an empty one is said by the method."""
    variant: str | None = None
    """The value of LLaMA-Factory's `pref_loss` that asks for it; None: there is no such choice."""
    sets: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `preference` that follow from the method alone."""


class Objective:
    """What a run learns; every objective is a subclass, and `megatrain.objective.registry` lists them."""

    name: ClassVar[str]
    """The value of `train.loss`."""
    learns: ClassVar[str]
    """What is learnt, in words that follow on `to`."""
    rows: ClassVar[RowKind] = PAIRS
    settings: ClassVar[type[Settings]] = Comparing
    """The settings that the loss reads; they are named as arguments of TRL's trainers are."""
    has_reference: ClassVar[bool] = True
    """Whether the loss compares with what the model said before the first step."""
    llamafactory: ClassVar[Sequence[Theirs]] = ()
    axolotl: ClassVar[Sequence[Theirs]] = ()

    def problems(self, settings: Any) -> Iterator[str]:
        """Yield what is wrong with its own settings, each with a way out."""
        yield from ()

    def losses(self, settings: Any, answers: Answers) -> tuple[Tensor, Shown]:
        """Return the loss of each row of a batch, with gradients, and what to show of it.

        Args:
            settings: The values of `settings`.
            answers: What the model says of the batch.
        """
        raise NotImplementedError


def rewards_of(scores: Tensor) -> Shown:
    """Return what is shown of pairs: the rewards of both answers, and whether the better one has more.

    Args:
        scores: The rewards, (B, 2), the chosen answer's first.
    """
    chosen, rejected = scores.detach().unbind(1)
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).float(),
    }
