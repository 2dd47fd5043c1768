"""KTO: answers that are marked good gain on a reference, and bad ones lose.

Ethayarajh et al., 2024. The divergence of the model from the reference is estimated by the mean over the
batch's borrowed answers, each after the prompt of another row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.objective.objective import Answers, Comparing, Objective, Shown, Theirs, Weight
from megatrain.objective.rows import MARKED

if TYPE_CHECKING:
    from torch import Tensor


class KtoSettings(Comparing):
    """Settings of KTO."""

    desirable_weight: Weight = 1.0
    """Weight of good answers (KTO)."""
    undesirable_weight: Weight = 1.0
    """Weight of bad answers (KTO)."""


class Kto(Objective):
    """Kahneman-Tversky optimisation."""

    name = "kto"
    learns = "to tell good answers from bad ones"
    rows = MARKED
    settings = KtoSettings
    llamafactory = (
        Theirs(
            "kto",
            {
                "pref_beta": "beta",
                "kto_chosen_weight": "desirable_weight",
                "kto_rejected_weight": "undesirable_weight",
            },
        ),
    )
    axolotl = (
        Theirs(
            "kto",
            {
                "rl_beta": "beta",
                "kto_desirable_weight": "desirable_weight",
                "kto_undesirable_weight": "undesirable_weight",
            },
        ),
    )

    def losses(self, settings: KtoSettings, answers: Answers) -> tuple[Tensor, Shown]:
        """Return the loss of each answer, with gradients, its reward, and the estimate of the divergence."""
        import torch

        is_good = answers.is_good
        answered, borrowed = answers.ratios.unbind(1)
        divergence = borrowed.detach().mean().clamp(min=0)
        rewards = settings.beta * answered.detach()
        sign = torch.where(is_good, 1.0, -1.0)
        weight = torch.where(is_good, settings.desirable_weight, settings.undesirable_weight)
        losses = weight * (1 - torch.sigmoid(settings.beta * sign * (answered - divergence)))
        shown = {
            "rewards/chosen": rewards[is_good],
            "rewards/rejected": rewards[~is_good],
            "kl": divergence.expand(len(rewards)),
        }
        return losses, shown
