"""SimPO: the chosen answer's mean log-probability gains on the rejected one's, by a margin; no reference.

Meng et al., 2024. With a weight of the chosen answer's own loss it is CPO-SimPO.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.objective.objective import Answers, Comparing, Objective, Shown, Theirs, Weight, rewards_of

if TYPE_CHECKING:
    from torch import Tensor


class SimpoSettings(Comparing):
    """Settings of SimPO."""

    simpo_gamma: Weight = 0.5
    """Margin by which the reward of the chosen answer should be higher (SimPO); rewards are `beta` times the
    mean log-probability of an answer's tokens."""
    sft_weight: Weight = 0.0
    """Weight of the chosen answer's own loss, the mean over its tokens, beside that of the pair (SimPO)."""


class Simpo(Objective):
    """Simple preference optimisation."""

    name = "simpo"
    learns = "to prefer the better of two answers per token, by a margin"
    settings = SimpoSettings
    has_reference = False
    llamafactory = (
        Theirs(
            "dpo",
            {
                "pref_beta": "beta",
                "simpo_gamma": "simpo_gamma",
                "pref_ftx": "sft_weight",
                "pref_loss": "",
            },
            "simpo",
        ),
    )
    axolotl = (
        Theirs(
            "simpo",
            {"rl_beta": "beta", "simpo_gamma": "simpo_gamma", "cpo_alpha": "sft_weight"},
            sets={"sft_weight": 1.0},
        ),
    )

    def losses(self, settings: SimpoSettings, answers: Answers) -> tuple[Tensor, Shown]:
        """Return the loss of each pair, with gradients, and its rewards."""
        from torch.nn import functional

        means = answers.per_token(answers.log_probabilities)
        margin = means[:, 0] - means[:, 1] - settings.simpo_gamma / settings.beta
        losses = -functional.logsigmoid(settings.beta * margin) - settings.sft_weight * means[:, 0]
        return losses, rewards_of(settings.beta * means) | {"nll_loss": -means[:, 0].detach()}
