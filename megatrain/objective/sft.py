"""Supervised fine-tuning and pre-training: the model's own loss, the mean over the tokens of a step."""

from __future__ import annotations

from megatrain.objective.objective import Objective, Settings
from megatrain.objective.rows import TEXTS


class Sft(Objective):
    """Next-token prediction."""

    name = "sft"
    learns = "to give the texts and answers of the data"
    rows = TEXTS
    settings = Settings
    has_reference = False
