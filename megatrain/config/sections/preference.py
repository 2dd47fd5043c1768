"""Settings of the objectives that learn from judged answers: the section `preference`."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.config.sections.section import Section
from megatrain.objective.objective import Objective
from megatrain.objective.registry import OBJECTIVES, AllSettings


class PreferenceConfig(Section, AllSettings):
    """Learning from judged answers, with any `train.loss` but `sft`."""

    def problems(
        self, objective: Objective, *, is_random: bool, packing: str, too_long: str
    ) -> Iterator[str]:
        """Yield what is set and cannot be obeyed, each with a way out.

        Args:
            objective: The objective that `train.loss` names.
            is_random: Whether the model's weights are drawn.
            packing: The value of `data.packing`.
            too_long: The value of `data.too_long`.
        """
        loss = objective.name
        for name, field in type(self).model_fields.items():
            if name not in objective.settings.model_fields and getattr(self, name) != field.default:
                others = [other.name for other in OBJECTIVES.values() if name in other.settings.model_fields]
                yield (
                    f"preference.{name} is set, but train.loss is {loss}; leave it out, or use "
                    f"train.loss={' or '.join(others)}"
                )
        yield from objective.problems(self)
        if is_random and objective.has_reference:
            yield (
                f"train.loss is {loss} and model.init is random: a model without training is no reference; "
                "use model.init=pretrained"
            )
        if not objective.rows.is_judged:
            return
        if packing not in ("auto", "pad"):
            yield f"data.packing is {packing}, but train.loss {loss} has one answer per sequence; use pad"
        if too_long == "split":
            yield f"data.too_long is split, but train.loss {loss} judges whole answers; use truncate or drop"
