"""ORPO: the chosen answer is learnt, and its odds gain on those of the rejected one; there is no reference.

Hong et al., 2024. Both parts are of an answer's mean log-probability per token, as in LLaMA-Factory; TRL
counts the prompt's tokens in the first part too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.objective.objective import Answers, Comparing, Objective, Shown, Theirs, rewards_of

if TYPE_CHECKING:
    from torch import Tensor

_SURE = -1e-7
"""A mean log-probability above which the odds of an answer no longer grow: they would be infinite at 0."""


class Orpo(Objective):
    """Odds-ratio preference optimisation; `preference.beta` is the weight of the odds."""

    name = "orpo"
    learns = "to give the better of two answers and prefer it"
    has_reference = False
    llamafactory = (Theirs("dpo", {"pref_beta": "beta", "pref_loss": ""}, "orpo"),)
    axolotl = (Theirs("orpo", {"rl_beta": "beta", "orpo_alpha": "beta"}),)

    def losses(self, settings: Comparing, answers: Answers) -> tuple[Tensor, Shown]:
        """Return the loss of each pair, with gradients, its rewards, and both parts of the loss."""
        import torch
        from torch.nn import functional

        means = answers.per_token(answers.log_probabilities)
        odds = means - torch.log(-torch.expm1(means.clamp(max=_SURE)))
        log_odds = odds[:, 0] - odds[:, 1]
        losses = -means[:, 0] - settings.beta * functional.logsigmoid(log_odds)
        shown = {"nll_loss": -means[:, 0].detach(), "log_odds_chosen": log_odds.detach()}
        return losses, rewards_of(settings.beta * means) | shown
