"""Types of settings, each with the reader of a user's value, its allowed values, and its description."""

from __future__ import annotations

import os
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from megatrain.config.budgets import BUDGETS
from megatrain.config.sizes import read_bytes


def one_or_more(value: object) -> object:
    """Return a value, or the values of a list, as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def as_tuple(value: object) -> object:
    """Return a list, as YAML has it, as a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _as_day(value: str) -> str:
    return date.fromisoformat(value).isoformat()


def _as_budget(value: str | float) -> str | float:
    if value != "auto" and value not in BUDGETS:
        raise ValueError(f"use {', '.join(map(str, BUDGETS))} or auto")
    return value


def reads_as(kind: str) -> WithJsonSchema:
    """Give a type the words that help, documentation and errors use for it."""
    return WithJsonSchema({"kind": kind})


def one_of(*names: str) -> Any:
    """Return the type of text that is one of a few names, with its description."""
    return Field(pattern=f"^({'|'.join(names)})$", json_schema_extra={"kind": " | ".join(names)})


Name = Annotated[str, Field(min_length=1)]
LocalPath = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser), reads_as("a path")]
Paths = Annotated[
    tuple[LocalPath, ...],
    BeforeValidator(one_or_more),
    Field(min_length=1),
    reads_as("a path or a list of paths"),
]
Patterns = Annotated[tuple[str, ...], BeforeValidator(as_tuple), reads_as("a list of patterns")]
Bytes = Annotated[int, BeforeValidator(read_bytes), Field(ge=1), reads_as("bytes or a size such as 24GiB")]
Day = Annotated[
    str, Field(pattern=r"^\d{4}-\d\d-\d\d$"), AfterValidator(_as_day), reads_as("a day such as 2026-11-23")
]
Count = Annotated[int, Field(ge=1)]
Steps = Annotated[
    Annotated[int, Field(ge=0)] | Annotated[float, Field(gt=0, lt=1)],
    reads_as("a whole number (0 or more), or a share of all steps below 1"),
]
Every = Annotated[
    Count | Annotated[str, Field(pattern=r"^epoch(/[1-9]\d{0,3})?$")],
    reads_as("a number of steps (1 or more), epoch, or epoch/4 for four times in each"),
]
SaveEvery = Annotated[
    Count | Annotated[str, Field(pattern=r"^(auto|epoch(/[1-9]\d{0,3})?|[1-9]\d{0,4}(min|h))$")],
    reads_as("auto, a number of steps (1 or more), a time such as 30min or 2h, epoch, or epoch/4"),
]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
OpenSeconds = Annotated[Literal["auto"] | Rate, reads_as("auto, or a number (above 0)")]
Share = Annotated[float, Field(gt=0, le=1)]
Watch = Annotated[Literal["auto", "off"] | Share, reads_as("auto, off, or a share (above 0, at most 1)")]
Device = Annotated[
    str,
    Field(pattern=r"^(auto|cpu|cuda|xpu|emulated(:.+)?)$"),
    reads_as("auto | cpu | cuda | xpu | emulated | emulated:FILE"),
]
Seed = Annotated[int, Field(ge=0, lt=2**63), reads_as("a whole number (0 to 2^63 - 1)")]
Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(as_tuple), reads_as("two numbers from 0 to below 1")]
Schedule = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]
Role = Literal["system", "user", "assistant", "tool"]
TrainedPart = Annotated[
    Literal["assistant", "last", "all"] | Annotated[tuple[Role, ...], Field(min_length=1)],
    BeforeValidator(as_tuple),
    reads_as("assistant | last | all | a list of roles (system, user, assistant, tool)"),
]


def seconds_between(every: int | str | None) -> float | None:
    """Return the seconds of a value of `SaveEvery` that is a time; None of any other."""
    if not isinstance(every, str) or not every[0].isdigit():
        return None
    return 60.0 * int(every[:-3]) if every.endswith("min") else 3600.0 * int(every[:-1])


def steps_between(every: int | str | None, steps_per_epoch: int) -> int | None:
    """Return the number of steps after which something is due again; None means never.

    Args:
        every: The value of `Every`. Parts of an epoch that are no whole number of steps are rounded up.
        steps_per_epoch: The number of steps of one pass over the data.
    """
    if not isinstance(every, str):
        return every
    _, _, times = every.partition("/")
    return -(-steps_per_epoch // int(times or 1))


if TYPE_CHECKING:  # decided types: `megatrain.config.decided` replaces `auto`
    OpenCount = int
    OpenLength = int
    OpenPrecision = Literal["fp32", "bf16"]
    OpenBudget = float
else:
    OpenCount = Literal["auto"] | Count
    OpenLength = Literal["auto"] | Annotated[int, Field(ge=2)]
    OpenPrecision = Literal["auto", "fp32", "bf16"]
    OpenBudget = Annotated[
        Literal["auto"] | float,
        AfterValidator(_as_budget),
        reads_as(" | ".join(["auto", *map(str, BUDGETS)])),
    ]
