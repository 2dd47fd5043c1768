"""Events and names in words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.distributed.processes import how_ended
from megatrain.hub import may_be_on_hub
from megatrain.train.records.names import LOSS_AT, TOKENS_AT


def event_text(row: Mapping[str, Any]) -> str:
    """Return a row of `events.jsonl` as a sentence without its time."""
    codes, waited_s = row.get("codes"), row.get("waited_s")
    if row.get("event") == "ranks" and isinstance(codes, Mapping):
        return f"ranks at step {row.get('step')}: {_lost(codes, row.get('sentences'), row.get('left'))}"
    if isinstance(waited_s, list):
        waits = ", ".join(f"rank {rank} {seconds} s" for rank, seconds in enumerate(waited_s))
        row = {name: value for name, value in row.items() if name != "waited_s"}
        return event_text({**row, "waited for others": waits})
    details = [
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if name not in ("event", "time", "step", "reason", "text", "prompt") and value is not None
        if not name.startswith(TOKENS_AT)  # of ranges of positions, whose losses are told
    ]
    why = [str(row[name]) for name in ("reason", "text") if row.get(name)]
    more = "; ".join([*why, ", ".join(details)] if details else why)
    return f"{row.get('event')} at step {row.get('step')}" + (f": {more}" if more else "")


def losses_by_position(row: Mapping[str, Any]) -> str:
    """Return the losses of an evaluation by ranges of positions in words; it is empty if there are none."""
    return ", ".join(
        f"{name.removeprefix(LOSS_AT)} {value:.4f}"
        for name, value in row.items()
        if name.startswith(LOSS_AT) and isinstance(value, float)
    )


def _lost(codes: Mapping[str, Any], sentences: Any, left: Any) -> str:
    """Describe how ranks have ended, the first one first, and how many go on."""
    said = sentences if isinstance(sentences, Mapping) else {}
    ended = [f"rank {rank} {how_ended(code)}" for rank, code in codes.items()]
    first = next((f" ({said[rank]})" for rank in codes if said.get(rank)), "")
    return f"{', '.join(ended)}{first}; {f'{left} of the ranks go on' if left else 'none goes on'}"


def model_name(place: str) -> tuple[str, bool]:
    """Return the name of the model in a place, and whether that is a name of the hub.

    A directory is named by its last part; one of a run (`RUN/hf`, `RUN/checkpoints/step-*`) by the run, and
    the hub's cache by the name on the hub.
    """
    if may_be_on_hub(place):
        return place, True
    path = Path(place).absolute()
    for part in path.parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/"), True
    if path.parent.name == "checkpoints":
        path = path.parents[1]
    elif path.name == "hf" and path.parent not in (
        Path.home(),
        Path("/"),
    ):  # a user's name is not the model's
        path = path.parent
    return path.name, False
