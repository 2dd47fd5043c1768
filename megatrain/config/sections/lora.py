"""Settings of low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from megatrain.config.adaptation import ALL_LINEAR, AS_STORED, LoraChoice
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
    base: Literal["dequantised", "as_stored"] = "dequantised"
    """Form in which host memory and the link have the base of a checkpoint in MXFP4 or FP8: `dequantised`, at
    2 bytes per parameter in bf16, or `as_stored`, in its codes and scales (about 0.53 or 1 byte), of which
    the device makes the same values: no bit of a result changes."""
    load_in_4bit: bool = False
    """Only `false`: nothing is quantised here. `lora.base=as_stored` keeps a base that is quantised so."""

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

    def problems_of_base(self, *, uses_drives: bool, mirrors: bool) -> Iterator[str]:
        """Yield what a base that is kept as stored rules out, each with a way out.

        Args:
            uses_drives: Settings name drives.
            mirrors: Resident blocks may have their places in RAM too.
        """
        if self.base != AS_STORED:
            return
        way = "or use lora.base=dequantised"
        if uses_drives:
            yield (
                "lora.base is as_stored and memory.tiers names drives, but codes are kept in RAM alone; "
                f"leave memory.tiers.nvme out, {way}"
            )
        if not mirrors:
            yield (
                "lora.base is as_stored and memory.mirror_resident is false, but codes are at home in RAM; "
                f"use memory.mirror_resident=auto, {way}"
            )

    def problems(self, *, freezes: bool, is_random: bool) -> Iterator[str]:
        """Yield what cannot be obeyed, each with a way out.

        Args:
            freezes: Settings name parameters that are not trained, or that alone are.
            is_random: The model has random weights.
        """
        if self.load_in_4bit:
            yield (
                "lora.load_in_4bit is true, but a base is never quantised here, which would cost exactness: "
                "it waits in host memory, and the device holds a few of its layers at a time; use "
                "lora.load_in_4bit=false, and `megatrain plan` shows that it fits, or a checkpoint in MXFP4 "
                "or FP8 with lora.base=as_stored"
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
