"""All objectives by their names in `train.loss`, and all of their settings."""

from __future__ import annotations

from collections.abc import Mapping

from megatrain.objective.dpo import Dpo, DpoSettings
from megatrain.objective.kto import Kto, KtoSettings
from megatrain.objective.objective import Objective
from megatrain.objective.orpo import Orpo
from megatrain.objective.rows import RowKind
from megatrain.objective.sft import Sft
from megatrain.objective.simpo import Simpo, SimpoSettings

DEFAULT = Sft()

OBJECTIVES: Mapping[str, Objective] = {one.name: one for one in (DEFAULT, Dpo(), Kto(), Orpo(), Simpo())}


class AllSettings(SimpoSettings, KtoSettings, DpoSettings):
    """Settings of all objectives; those of the class that is named last come first."""


def names_for(rows: RowKind) -> str:
    """Return the names of the objectives for rows of a kind."""
    return " or ".join(one.name for one in OBJECTIVES.values() if one.rows == rows)


def aliases() -> dict[str, str]:
    """Return TRL's and LLaMA-Factory's names of settings of `preference`, each with its setting here."""
    found: dict[str, str] = {}
    for one in OBJECTIVES.values():
        found |= {name: name for name in one.settings.model_fields}
        for theirs in one.llamafactory:
            found |= {name: key for name, key in theirs.keys.items() if key}
    return found
