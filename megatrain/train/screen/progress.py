"""The progress of a run on the screen."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

from megatrain.stream.execute.passed import Passed
from megatrain.train.records.metrics import StepMetrics, format_duration
from megatrain.train.screen.within_step import LOOK_S, WithinStep

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

_log = logging.getLogger(__name__)

INTERVAL_S = 10.0
"""The seconds between two lines, where there is no bar."""
WITHIN_S = 60.0
"""The seconds between two lines on one step that lasts, where there is no bar."""


class _Lasting:
    """A terminal that may be closed while a run goes on: output that cannot be shown any more is no error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class Progress:
    """Shows a run: a bar on a terminal, log lines elsewhere. Use as a context manager.

    There is a line for the first step, the last one and those that were skipped, and else one per interval.

    The time left counts the steps of this process only, since those before a resume took none of its time.
    """

    def __init__(
        self,
        *,
        num_steps: int,
        first_step: int = 0,
        mode: Literal["auto", "bar", "lines", "none"] = "auto",
        passed: Callable[[], Passed | None] = lambda: None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clock.

        Args:
            num_steps: The number of steps of the whole run.
            first_step: The number of steps done before this process.
            mode: The form of display; `auto` takes a bar if `stream` is a terminal.
            passed: The function that says how far the step is that is going on, as `Engine.passed`.
            stream: The stream on which the bar is drawn; None means standard error.
            clock: The clock in seconds, for tests.
        """
        self._num_steps = num_steps
        self._first_step = first_step
        self._stream = stream or sys.stderr
        self._mode = mode if mode != "auto" else "bar" if self._stream.isatty() else "lines"
        self._clock = clock
        self._shown_s = -math.inf
        self._first_s: float | None = None
        self._first_shown = 0
        self._bar: RichProgress | None = None
        every_s = LOOK_S if self._mode == "bar" else WITHIN_S
        self.within = WithinStep(passed, self._show_within, every_s=every_s, clock=clock)
        """What looks at the step that is going on."""

    def __enter__(self) -> Progress:
        self.within.__enter__()
        if self._mode == "bar":
            self._bar = _make_bar(self._stream)
            self._bar.add_task("", total=self._num_steps, completed=self._first_step, text="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.within.__exit__()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show_within(self, text: str) -> None:
        """Show how far a step is: in place of the bar's numbers, or as a line."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], text=text, refresh=True)
        elif self._mode != "none":
            _log.info("%s", text)

    def update(self, row: StepMetrics, *, is_last: bool = False) -> None:
        """Show a step; the last one is always shown."""
        if self._first_s is None:
            self._first_s, self._first_shown = self._clock(), row.step
        if self._mode == "none":
            return
        text = describe_step(row, eta_s=self.eta_s(row.step))
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=row.step, text=text, refresh=True)
            return
        now_s = self._clock()
        is_due = is_last or row.skipped or row.step == self._num_steps or now_s - self._shown_s >= INTERVAL_S
        if is_due:
            self._shown_s = now_s
            _log.info("step %d/%d %s", row.step, self._num_steps, text)

    def eta_s(self, step: int) -> float | None:
        """Return the seconds left after `step`, at the pace of this process; None before its second step.

        The first step is left out, since it allocates and compiles.
        """
        if self._first_s is None or step <= self._first_shown:
            return None
        return (self._clock() - self._first_s) / (step - self._first_shown) * (self._num_steps - step)


def _make_bar(stream: TextIO) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column

    numbers = TextColumn(
        "{task.fields[text]}", markup=False, table_column=Column()
    )  # lines wrap, so that nothing is cut off
    console = Console(file=cast(TextIO, _Lasting(stream)))
    return RichProgress(MofNCompleteColumn(), BarColumn(bar_width=20), numbers, console=console)


def describe_step(row: StepMetrics, *, eta_s: float | None) -> str:
    """Return a step as one line, without its number."""
    norm = "-" if row.grad_norm is None else f"{row.grad_norm:.3g}"
    parts = [f"loss {row.loss:.4f}", f"norm {norm}", f"lr {row.lr:.3g}"]
    parts += [f"{name} {value:.4g}" for name, value in row.shown.items()]
    parts.append(f"{row.tokens_per_s:,.0f} tokens/s")
    if row.mfu is not None:
        parts.append(f"mfu {row.mfu:.1%}")
    if row.experts:
        parts.append(_experts(row.experts))
    if row.power_w is not None:
        parts.append(f"{row.power_w:.0f} W")
    if row.throttled:
        parts.append(f"throttled: {', '.join(row.throttled)}")
    if eta_s is not None:
        parts.append(f"{format_duration(eta_s)} left")
    return "  ".join([*parts, "SKIPPED"] if row.skipped else parts)


def _experts(loads: Mapping[str, Mapping[str, float]]) -> str:
    """Return the share of the busiest expert of all routers, and how many experts got no token."""
    busiest = max(load["busiest"] for load in loads.values())
    unused = round(sum(load["unused"] for load in loads.values()))
    return f"busiest expert {busiest:.1%}" + (f", {unused} unused in all layers" if unused else "")
