"""The section `log`: the display, records and messages of a run."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from megatrain.config.sections.section import Section
from megatrain.config.types import Count, Name, as_tuple, reads_as

Event = Literal[
    "start",
    "resume",
    "checkpoint",
    "unsaved",
    "skipped",
    "spike",
    "evaluation",
    "best",
    "replan",
    "sample",
    "ranks",
    "stop",
    "end",
    "error",
]
"""The events of a run.

start: a new run. resume: goes on from `step`. checkpoint: `step` is saved, which took `seconds`, of which
the run waited `waited_s`. unsaved: `step` could not be saved, with the reason; the run goes on. skipped: an
update was left out, with the reason. spike: the `loss` jumped, `above` what. evaluation: on held-out data,
with `loss`, `perplexity` and the `name` of the set. best: the best evaluation so far. replan: a new plan,
with its reason. sample: a `prompt` and the `text` after it. ranks: several have not ended as they should,
with their exit `codes`, their `sentences`, and how many are `left` to go on. stop: a signal, or an early
stop, with the reason. end: all steps are done. error: the run ended, with `text` and `exit_code`.
"""

EVENTS: tuple[str, ...] = get_args(Event)

Address = Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$"), reads_as("an http(s) address")]


class LogConfig(Section):
    """These settings say what is shown, recorded and told."""

    every: Count = 1
    """Steps between rows of `metrics.jsonl` and progress updates."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """A bar, plain lines (the first and the last step, and one every 10 s), or neither. `auto` = a bar on a
    terminal, lines elsewhere. A step of more than 10 s shows how far it is: in the bar every second, in lines
    once a minute."""
    to: Annotated[tuple[Name, ...], BeforeValidator(as_tuple), reads_as("a list of names")] = ()
    """Other places to log to, by the names of transformers' integrations: `tensorboard`, `wandb`, `trackio`,
    `mlflow` and others, each with its package installed."""
    report: bool = True
    """Write `report.html` when the run ends, however it ends, if the extra `report` is installed (5 MB)."""
    webhook: (
        Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$"), reads_as("an http(s) address")] | None
    ) = None
    """Address that is told of events of the run: a POST of one JSON object with `text` and the row of
    `events.jsonl`. A run never waits or ends because of it. null = nobody."""
    webhook_on: Annotated[
        tuple[Event, ...],
        BeforeValidator(as_tuple),
        reads_as(f"a list of {', '.join(EVENTS)}"),
    ] = ("stop", "end", "error")
    """Events that it is told of."""
