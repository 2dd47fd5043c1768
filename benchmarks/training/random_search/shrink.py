"""Takes away from a run's settings what its fault does not need."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from benchmarks.training.random_search.forks import Outcome, played
from benchmarks.training.random_search.settings import NUM_LAYERS, Settings

PLAIN: Settings = {
    "dropout": False,
    "lora": None,
    "frozen": [],
    "tiers": None,
    "moments": "fp32",
    "head_chunk_tokens": None,
    "device": "cpu",
    "precision": "fp32",
    "family": "llama",
    "num_runs": 1,
    "num_micro_batches": 1,
}
PLAIN_CHOICE: Settings = {
    "extra_slots": 1,
    "extra_buffers": 0,
    "activations": ["recompute"] * NUM_LAYERS,
    "boundaries": "device",
    "fragments": False,
    "resident_layers": 0,
    "outer_resident": False,
    "outer_streams": False,
    "lockstep": 1,
    "updates": "deferred",
    "gradients": ["host"] * NUM_LAYERS,
    "sums": "device",
}


def shrunk(settings: Settings, outcome: Outcome, limit_s: float) -> tuple[Settings, Outcome]:
    """Return the least settings found that have the same fault, and their outcome."""
    goes_on = True
    while goes_on:
        goes_on = False
        for smaller in _smaller(settings):
            found = played(smaller, limit_s)
            if found.kind == outcome.kind and _gist(found.what) == _gist(outcome.what):
                settings, outcome, goes_on = smaller, found, True
                break
    return settings, outcome


def _gist(what: str) -> str:
    """Return what stays of a sentence when a run gets smaller: no names, no numbers."""
    event, _, rest = what.partition(": ")
    return re.sub(r"[\w.]*\d[\w.]*|of [\w.]+", "", rest or event)[:40]


def _smaller(settings: Settings) -> Iterator[Settings]:
    """Yield settings that have one thing less, the largest steps first."""

    def changed(**values: Any) -> Settings:
        return copy.deepcopy(settings) | copy.deepcopy(values)

    events = settings["events"]
    for number in range(len(events)):
        if len(events) > 1:
            yield changed(events=events[:number] + events[number + 1 :])
    for name, value in PLAIN.items():
        if settings[name] != value:
            yield changed(**{name: value})
    if settings["num_micro_batches"] > 2:
        yield changed(num_micro_batches=2 * settings["num_runs"])
    data = settings["data"]
    for key, value in (("kind", "plain"), ("rows", 1), ("tokens", [16] * 4)):
        if data[key] != value:
            yield changed(data=data | {key: value})
    if settings["adamw"]["max_grad_norm"] is not None:
        yield changed(adamw=settings["adamw"] | {"max_grad_norm": None})
    for choice in _smaller_choices(settings["choice"]):
        yield changed(choice=choice)
    for number, event in enumerate(events):
        for other in _smaller_events(event):
            yield changed(events=[*events[:number], other, *events[number + 1 :]])


def _smaller_choices(choice: Settings) -> Iterator[Settings]:
    for name, value in PLAIN_CHOICE.items():
        if choice[name] != value:
            yield choice | {name: copy.copy(value)}
    for name in ("activations", "gradients"):
        for place, value in enumerate(choice[name]):
            if value != PLAIN_CHOICE[name][place]:
                one_less = [*choice[name][:place], PLAIN_CHOICE[name][place], *choice[name][place + 1 :]]
                yield choice | {name: one_less}


def _smaller_events(event: Settings) -> Iterator[Settings]:
    for key, value in (("reads", False), ("compares", False), ("how", "engine"), ("tiers", None)):
        if key in event and event[key] != value:
            yield event | {key: value}
    if "choice" in event:
        for choice in _smaller_choices(event["choice"]):
            yield event | {"choice": choice}
