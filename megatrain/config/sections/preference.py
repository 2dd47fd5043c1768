"""Settings of the losses that learn from judged answers: DPO and KTO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from megatrain.config.sections.section import Section
from megatrain.config.types import Rate

Loss = Literal["sft", "dpo", "kto"]
_Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PreferenceConfig(Section):
    """Learning from judged answers, with `train.loss` `dpo` or `kto`."""

    beta: Rate = 0.1
    """How much is lost by leaving the reference, which is the model before the first step."""
    loss_type: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """Loss of a pair (DPO): that of the paper (`sigmoid`), squared and per token (`ipo`), `hinge`, or without
    the bias that wrong judgements bring (`robust`)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs (DPO) whose judgement is taken to be wrong; with `sigmoid` (conservative DPO) and
    `robust`."""
    desirable_weight: _Weight = 1.0
    """Weight of good answers (KTO)."""
    undesirable_weight: _Weight = 1.0
    """Weight of bad answers (KTO)."""

    def problems(self, loss: Loss, *, is_random: bool, packing: str, too_long: str) -> Iterator[str]:
        """Yield what is set and cannot be obeyed, each with a way out.

        Args:
            loss: `train.loss`.
            is_random: The model's weights are drawn.
            packing: `data.packing`.
            too_long: `data.too_long`.
        """
        of_loss = {
            "dpo": ("beta", "loss_type", "label_smoothing"),
            "kto": ("beta", "desirable_weight", "undesirable_weight"),
        }
        for name, field in type(self).model_fields.items():
            if name not in of_loss.get(loss, ()) and getattr(self, name) != field.default:
                others = [other for other, names in of_loss.items() if name in names]
                yield (
                    f"preference.{name} is set, but train.loss is {loss}; leave it out, or use "
                    f"train.loss={' or '.join(others)}"
                )
        if loss == "dpo" and self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            yield (
                f"preference.label_smoothing is set, which preference.loss_type {self.loss_type} does not "
                "know; use sigmoid or robust, or leave it out"
            )
        if loss == "sft":
            return
        if is_random:
            yield (
                f"train.loss is {loss} and model.init is random: a model without training is no reference; "
                "use model.init=pretrained"
            )
        if packing not in ("auto", "pad"):
            yield f"data.packing is {packing}, but train.loss {loss} has one answer per sequence; use pad"
        if too_long == "split":
            yield f"data.too_long is split, but train.loss {loss} judges whole answers; use truncate or drop"
