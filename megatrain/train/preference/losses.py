"""The losses of judged answers, from log-probabilities: of pairs (DPO), and of single answers (KTO)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.config.sections.preference import PreferenceConfig
from megatrain.model.head import IGNORED

Shown = dict[str, Tensor]
"""By name, what was seen of some rows: a number for each."""


def losses_of(
    settings: PreferenceConfig, log_probabilities: Tensor, batch: Mapping[str, Any]
) -> tuple[Tensor, Shown]:
    """Return the loss of each row of a batch, with gradients, and what to show of it.

    Args:
        settings: Of the loss.
        log_probabilities: (2 B,) of the model, of each answer after its prompt.
        batch: As `judged_batch` makes it, with `reference`; with `is_good` the loss is KTO's, else DPO's.
    """
    ratios = log_probabilities.view(-1, 2) - batch["reference"].to(log_probabilities.device)
    if "is_good" in batch:
        return _kto(settings, ratios, batch["is_good"].to(ratios.device))
    return _dpo(settings, ratios, (batch["labels"] != IGNORED).sum(-1).view(-1, 2).to(ratios.device))


def _dpo(settings: PreferenceConfig, ratios: Tensor, lengths: Tensor) -> tuple[Tensor, Shown]:
    """Rafailov et al., 2023; `ipo`: Azar et al., 2023; `robust`: Chowdhury et al., 2024."""
    beta, smoothing = settings.beta, settings.label_smoothing
    margin = ratios[:, 0] - ratios[:, 1]
    if settings.loss_type == "ipo":
        per_token = ratios / lengths.clamp(min=1)
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
    chosen, rejected = (beta * ratios.detach()).unbind(1)
    shown = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).float(),
    }
    return losses, shown


def _kto(settings: PreferenceConfig, ratios: Tensor, is_good: Tensor) -> tuple[Tensor, Shown]:
    """Ethayarajh et al., 2024: how far the model has gone is the mean over the batch's other answers."""
    answered, others = ratios.unbind(1)
    gone = others.detach().mean().clamp(min=0)
    rewards = settings.beta * answered.detach()
    sign = torch.where(is_good, 1.0, -1.0)
    weight = torch.where(is_good, settings.desirable_weight, settings.undesirable_weight)
    losses = weight * (1 - torch.sigmoid(settings.beta * sign * (answered - gone)))
    shown = {
        "rewards/chosen": rewards[is_good],
        "rewards/rejected": rewards[~is_good],
        "kl": gone.expand(len(rewards)),
    }
    return losses, shown


class Tally:
    """Adds up what was seen of a step's or a set's rows; nobody waits for the device until the end."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._parts: dict[str, list[Tensor]] = {}

    @property
    def num_rows(self) -> int:
        """Rows with a loss."""
        return sum(map(len, self._parts.get("loss", ())))

    def add(self, shown: Shown) -> None:
        """Take a batch in."""
        for name, values in shown.items():
            self._parts.setdefault(name, []).append(values.detach())

    def means(self) -> dict[str, float]:
        """Return the mean of each over all rows, of those that have one, and the margin of the rewards."""
        rows = {name: torch.cat(parts).double() for name, parts in self._parts.items()}
        means = {name: float(values.mean()) for name, values in rows.items() if len(values)}
        if {"rewards/chosen", "rewards/rejected"} <= means.keys():
            means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        return means
