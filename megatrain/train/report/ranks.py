"""The ranks of a run according to its files: their number, their waits, their exchanges, and lost ranks.

Rows that are not in the form that a run writes are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megatrain.train.records.metrics import AMONG_RANKS, format_bytes, format_duration
from megatrain.train.report.collect import RunFiles, is_number

_WORDS = ("weights gathered", "sums exchanged", "weights spread to other nodes", "swapped in attention")


@dataclass(frozen=True, slots=True)
class RunRanks:
    """The ranks of a run of which some part was trained by several."""

    now: str
    """The present or last number of ranks."""
    waited_s: Sequence[float]
    """The seconds of waiting for others within steps, by rank; empty if the run has not recorded it."""
    nbytes: Sequence[tuple[str, int]]
    """The bytes of the first rank in a step, by kind of exchange."""
    lost: Sequence[Mapping[str, Any]]
    """The events after each of which ranks had ended that should not."""

    @property
    def facts(self) -> list[list[str]]:
        """Return the facts in short."""
        facts = [["ranks", self.now]]
        if self.waited_s:
            least, most = format_wait(min(self.waited_s)), format_wait(max(self.waited_s))
            facts.append(["waited for other ranks", least if least == most else f"{least} to {most}"])
        if self.nbytes:
            words = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in self.nbytes)
            facts.append(["between ranks in a step", words])
        if self.lost:
            steps = ", ".join(str(row["step"]) for row in self.lost)
            facts.append(["ranks lost", f"at step {steps}"])
        return facts


def ranks_of(run: RunFiles) -> RunRanks | None:
    """Return the known facts, or None if the run has always had one rank."""
    begins = [row for row in run.events if row["event"] in ("start", "resume")]
    lost = [row for row in run.events if row["event"] == "ranks"]
    if not lost and not any(isinstance(row.get("ranks"), int) for row in begins):
        return None
    last = begins[-1] if begins else {}
    nodes, shards = last.get("nodes", 1), last.get("shards", run.config.get("parallel", {}).get("shards"))
    now = str(last.get("ranks", 1))
    now += f" on {nodes} nodes" if nodes != 1 else ""
    now += f", shards {shards}" if shards is not None else ""
    ends = [row["waited_s"] for row in run.events if row["event"] == "end" and "waited_s" in row]
    is_sound = bool(ends) and isinstance(ends[-1], list) and all(map(is_number, ends[-1]))
    columns = ((words, run.numbers(name)) for name, words in zip(AMONG_RANKS, _WORDS, strict=True))
    return RunRanks(
        now=now,
        waited_s=ends[-1] if is_sound else [],
        nbytes=[(words, int(median(column))) for words, column in columns if any(column)],
        lost=lost,
    )


def format_wait(seconds: float) -> str:
    """Return a wait with a unit."""
    return f"{seconds:.3g} s" if seconds < 60 else format_duration(seconds)
