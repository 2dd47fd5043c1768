"""Settings of low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import BeforeValidator, Field

from megatrain.config.adaptation import ALL_LINEAR, LoraChoice
from megatrain.config.sections.section import Section
from megatrain.config.types import Count, Rate, one_or_more, reads_as

_Names = Annotated[tuple[str, ...], BeforeValidator(one_or_more), reads_as("a name or a list of names")]


class LoraConfig(Section):
    """Low-rank adapters (LoRA): the model stays as it is, and small matrices beside its own are trained."""

    r: Count | None = None
    """Rank of the adapters. null = no adapters: the model itself is trained."""
    alpha: Rate | None = None
    """What an adapter gives is scaled by alpha / r, or by alpha / sqrt(r) with `lora.rslora`. null = 2 r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is dropped at random in training."""
    target_modules: Annotated[_Names, Field(min_length=1)] = (ALL_LINEAR,)
    """Modules that get an adapter, by the ends of their names, as in PEFT, such as `[q_proj, v_proj]`.
    `all-linear` = all linear layers but the head."""
    rslora: bool = False
    """Scale by alpha / sqrt(r), which suits high ranks (rsLoRA)."""
    dora: bool = False
    """Train a magnitude for each output beside the adapter (DoRA)."""
    modules_to_save: _Names = ()
    """Modules that are trained whole and saved with the adapters, such as `[embed_tokens, lm_head]`."""
    load_in_4bit: bool = False
    """Only `false`: QLoRA's quantised base saves nothing that is short here, where the base streams."""

    @property
    def chosen(self) -> LoraChoice | None:
        """The adapters; None: the model gets none."""
        if self.r is None:
            return None
        return LoraChoice(
            r=self.r,
            alpha=2.0 * self.r if self.alpha is None else self.alpha,
            dropout=self.dropout,
            target_modules=self.target_modules,
            rslora=self.rslora,
            dora=self.dora,
            modules_to_save=self.modules_to_save,
        )

    def problems(self, *, freezes: bool, is_random: bool) -> Iterator[str]:
        """Yield what cannot be obeyed, each with a way out.

        Args:
            freezes: Settings name parameters that are not trained, or that alone are.
            is_random: The model has random weights.
        """
        if self.load_in_4bit:
            yield (
                "lora.load_in_4bit is true, but the base is never quantised: it waits in host memory in bf16 "
                "at 2 bytes per parameter, and the device holds a few of its layers at a time, so 4 bits "
                "would make room where none is short, and cost exactness; use lora.load_in_4bit=false with "
                "train.precision=bf16, and `megatrain plan` shows that it fits"
            )
        given = [name for name in sorted(self.model_fields_set) if name not in ("r", "load_in_4bit")]
        given = [name for name in given if getattr(self, name) != type(self).model_fields[name].default]
        if self.r is None and given:
            yield f"lora.{given[0]} is given, but lora.r is null, so there are no adapters; set lora.r=16"
        if self.r is not None and freezes:
            yield (
                "lora.r is given with train.freeze or train.only, but adapters freeze the whole model: "
                "leave these out, and name what is to be trained beside the adapters in lora.modules_to_save"
            )
        if self.r is not None and is_random:
            yield (
                "lora.r is given and model.init is random, but adapters are saved without the model, whose "
                "random weights nobody could find again; use model.init=pretrained"
            )
