"""DPO: the better of two answers gains on the other, measured from a reference.

Rafailov et al., 2023; `ipo`: Azar et al., 2023; `robust`: Chowdhury et al., 2024.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megatrain.objective.objective import Answers, Comparing, Objective, Shown, Theirs, rewards_of

if TYPE_CHECKING:
    from torch import Tensor

_LLAMAFACTORY = {"pref_beta": "beta", "pref_loss": "loss_type", "dpo_label_smoothing": "label_smoothing"}
_AXOLOTL = {"rl_beta": "beta"}


class DpoSettings(Comparing):
    """Settings of DPO."""

    loss_type: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """Loss of a pair (DPO): that of the paper (`sigmoid`), squared and per token (`ipo`), `hinge`, or without
    the bias that wrong judgements bring (`robust`)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs (DPO) whose judgement is taken to be wrong; with `sigmoid` (conservative DPO) and
    `robust`."""


class Dpo(Objective):
    """Direct preference optimisation."""

    name = "dpo"
    learns = "to prefer the better of two answers"
    settings = DpoSettings
    llamafactory = tuple(Theirs("dpo", _LLAMAFACTORY, variant) for variant in ("sigmoid", "hinge", "ipo"))
    axolotl = (
        Theirs("dpo", _AXOLOTL | {"dpo_label_smoothing": "label_smoothing"}),
        Theirs("ipo", _AXOLOTL, sets={"loss_type": "ipo"}),
    )

    def problems(self, settings: DpoSettings) -> Iterator[str]:
        """Yield the faults of its own settings, each with a way out."""
        if settings.label_smoothing and settings.loss_type not in ("sigmoid", "robust"):
            yield (
                f"preference.label_smoothing is set, which preference.loss_type {settings.loss_type} does "
                "not know; use sigmoid or robust, or leave it out"
            )

    def losses(self, settings: DpoSettings, answers: Answers) -> tuple[Tensor, Shown]:
        """Return the loss of each pair, with gradients, and its rewards: the distances from the reference."""
        import torch
        from torch.nn import functional

        beta, smoothing, ratios = settings.beta, settings.label_smoothing, answers.ratios
        margin = ratios[:, 0] - ratios[:, 1]
        if settings.loss_type == "ipo":
            per_token = answers.per_token(ratios)
            losses = (per_token[:, 0] - per_token[:, 1] - 1 / (2 * beta)) ** 2
        elif settings.loss_type == "hinge":
            losses = torch.relu(1 - beta * margin)
        else:
            right, wrong = -functional.logsigmoid(beta * margin), -functional.logsigmoid(-beta * margin)
            if settings.loss_type == "robust":
                losses = ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
            elif smoothing:
                losses = (1 - smoothing) * right + smoothing * wrong
            else:
                losses = right
        return losses, rewards_of(beta * ratios.detach())
