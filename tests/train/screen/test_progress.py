"""The steps of a run on the screen: few lines, every number, the time that is left."""

from __future__ import annotations

import errno
import io
import logging
from dataclasses import replace

import pytest

from megatrain.train.screen.progress import INTERVAL_S, Progress, describe_step
from tests.train.records.test_metrics import ROW


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_eta_counts_the_steps_of_this_process_but_its_first() -> None:
    clock = Clock()
    with Progress(num_steps=100, first_step=90, mode="none", clock=clock) as progress:
        clock.now_s = 1000.0  # allocated, compiled
        progress.update(replace(ROW, step=91))
        assert progress.eta_s(91) is None
        clock.now_s += 4
        assert progress.eta_s(92) == 32.0
        clock.now_s += 32
        assert progress.eta_s(100) == 0.0


def test_a_line_shows_the_numbers_of_a_step(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with (
        caplog.at_level(logging.INFO, logger="megatrain"),
        Progress(num_steps=4, stream=io.StringIO(), clock=clock) as progress,
    ):
        progress.update(ROW)
        clock.now_s = 60.0
        progress.update(replace(ROW, step=2))
    numbers = "loss 1.8342  norm 0.714  lr 9.9e-06  1,652 tokens/s  mfu 41.2%"
    assert caplog.messages == [f"step 1/4 {numbers}", f"step 2/4 {numbers}  2m 00s left"]


def test_there_is_one_line_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    """And one for the first step, the last one, and a step that is skipped."""
    clock = Clock()
    with (
        caplog.at_level(logging.INFO, logger="megatrain"),
        Progress(num_steps=200, first_step=100, stream=io.StringIO(), clock=clock) as progress,
    ):
        for step in range(101, 201):
            clock.now_s += INTERVAL_S / 16
            progress.update(replace(ROW, step=step, skipped=step == 105))
    steps = [int(message.split()[1].partition("/")[0]) for message in caplog.messages]
    assert steps == [101, 105, 121, 137, 153, 169, 185, 200]


def test_an_early_end_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, logger="megatrain"),
        Progress(num_steps=200, stream=io.StringIO(), clock=Clock()) as progress,
    ):
        for step in (1, 2, 3):
            progress.update(replace(ROW, step=step), is_last=step == 3)
    assert [message.split()[1] for message in caplog.messages] == ["1/200", "3/200"]


def test_skipped_step_and_unknown_norm_are_said() -> None:
    text = describe_step(replace(ROW, grad_norm=None, skipped=True), eta_s=None)
    assert "norm -" in text
    assert text.endswith("mfu 41.2%  SKIPPED")


def test_what_is_not_known_is_not_shown() -> None:
    assert "mfu" not in describe_step(replace(ROW, mfu=None), eta_s=None)
    row = replace(ROW, power_w=312.4, throttled=("power cap",))
    assert describe_step(row, eta_s=7.0).endswith("312 W  throttled: power cap  0m 07s left")


@pytest.mark.parametrize("columns", ["60", "200"])
def test_bar_shows_every_number_at_any_width(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with Progress(num_steps=3, stream=terminal, clock=Clock()) as progress:
        progress.update(ROW)
    shown = terminal.getvalue()
    for number in ("1/3", "1.8342", "0.714", "9.9e-06", "1,652", "41.2%"):
        assert number in shown


def test_none_shows_nothing(caplog: pytest.LogCaptureFixture) -> None:
    terminal = Terminal()
    with caplog.at_level(logging.INFO), Progress(num_steps=3, stream=terminal, mode="none") as progress:
        progress.update(ROW)
    assert (terminal.getvalue(), caplog.messages) == ("", [])


def test_a_terminal_that_is_closed_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a connection is lost: the signal that comes with it lets the run save first."""
    terminal = Terminal()
    refused: list[str] = []

    def refuse(text: str) -> int:
        refused.append(text)
        raise OSError(errno.EIO, "Input/output error")

    with Progress(num_steps=4, stream=terminal) as progress:
        progress.update(ROW)
        assert "1/4" in terminal.getvalue()
        monkeypatch.setattr(terminal, "write", refuse)
        progress.update(replace(ROW, step=2))
    assert any("2/4" in text for text in refused)
