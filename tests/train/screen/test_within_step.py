"""A step that lasts shows how far it is, and what a signal in it brings is said at once."""

from __future__ import annotations

import ctypes
import io
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.stream.execute.passed import Passed
from megatrain.train import loop, shutdown
from megatrain.train.loop import train
from megatrain.train.screen import within_step
from megatrain.train.screen.progress import WITHIN_S, Progress
from megatrain.train.screen.within_step import AFTER_S, WithinStep
from megatrain.train.shutdown import stop_flag
from tests.reference import make_batches
from tests.stream.runs import start
from tests.train.project import make_config
from tests.train.screen.test_progress import Clock, Terminal

# -- of an engine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "checked", "emulated"])
@pytest.mark.parametrize("activations", ["keep", "recompute", "drop_boundary"])
def test_an_engine_says_how_far_its_step_is(device: str, activations: str) -> None:
    """Counted in the layers themselves: each pass of one is a visit, and the shares never fall."""
    model, _, engine, optimizer = start(
        device=device, activations=activations, lockstep=2, num_slots=2, num_micro_batches=4
    )
    assert engine.passed() is None
    seen: list[Passed] = []
    layers = model.get_decoder().layers

    def look(*_: Any) -> None:
        passed = engine.passed()
        assert passed is not None
        seen.append(passed)

    for step in range(2):
        hooks = [layer.mlp.register_forward_hook(look) for layer in layers]
        seen.clear()
        engine.forward_backward(make_batches(4, seed=step))
        optimizer.step()
        engine.settle()
        for hook in hooks:
            hook.remove()
        assert seen[0].num_visits == 0, "of this step alone"
        shares = [each.share for each in seen]
        assert shares == sorted(shares)
        assert len({each.num_foreseen for each in seen}) == 1
        assert seen[0].num_foreseen >= 4 * len(layers) * 2
        done = engine.passed()
        assert done is not None
        assert done.num_visits == done.num_foreseen
        assert done.share == 1.0
        forwards = [each.num_visits for each in seen[: 2 * len(layers)]]
        assert forwards == list(range(2 * len(layers))), "two micro-batches pass the layers one by one"


# -- on the screen -------------------------------------------------------------------------------------------


def within(clock: Clock, share: Callable[[], float], said: list[str], every_s: float = 1.0) -> WithinStep:
    def passed() -> Passed:
        num = round(share() * 400)
        return Passed(num_visits=num, num_foreseen=400, share=share(), seconds=0.0)

    return WithinStep(passed, said.append, every_s=every_s, clock=clock)


def test_a_short_step_shows_nothing_and_a_long_one_its_share_and_the_time_left() -> None:
    clock, said = Clock(), list[str]()
    looking = within(clock, lambda: clock.now_s / 3600, said)
    with looking.step(7):
        for _ in range(int(AFTER_S)):
            looking.look()
            clock.now_s += 1
        assert said == []
        looking.look()
        assert said == ["step 7: 0%, 1 of 400 passes of layers, 0m 10s so far"]
        clock.now_s = 900.0
        looking.look()
        expected = "25%, 100 of 400 passes of layers, 15m 00s so far, about 45m 00s left in it"
        assert said[1:] == [f"step 7: {expected}"]
        assert looking.describe() == f"step 7 ({expected})"
        looking.look()
        assert len(said) == 2, "a second ago"
        clock.now_s = 3600.0
        looking.look()
        assert said[2] == "step 7: 100%, 400 of 400 passes of layers, 1h 00m so far, updating the weights"
    assert looking.describe() == ""
    clock.now_s += 100
    looking.look()
    assert len(said) == 3


def test_a_step_before_its_forward_does_not_tell_of_the_one_before() -> None:
    clock, said = Clock(), list[str]()
    passed = Passed(num_visits=400, num_foreseen=400, share=1.0, seconds=100.0)
    looking = WithinStep(lambda: passed, said.append, every_s=1.0, clock=clock)
    with looking.step(1):
        clock.now_s = 20.0
        looking.look()
    assert said == ["step 1: 0m 20s so far"]


def test_a_file_gets_a_line_a_minute_and_a_terminal_one_a_second(caplog: pytest.LogCaptureFixture) -> None:
    counts = {}
    for stream in (io.StringIO(), Terminal()):
        clock = Clock()
        caplog.clear()
        progress = Progress(num_steps=4, stream=stream, clock=clock)
        with caplog.at_level(logging.INFO, logger="megatrain"), progress, progress.within.step(1):
            for _ in range(600):
                clock.now_s += 1
                progress.within.look()
        counts[type(stream)] = len(caplog.messages), stream.getvalue().count("so far")
    lines, none = counts[io.StringIO]
    assert (lines, none) == (1 + (600 - AFTER_S) // WITHIN_S, 0)
    lines, drawn = counts[Terminal]
    assert lines == 0
    assert drawn >= 590


# -- of a run ------------------------------------------------------------------------------------------------


def test_a_run_with_slow_layers_shows_its_steps_and_says_what_a_signal_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second step is asked to stop in its middle, while a layer is in a call that nothing interrupts."""
    monkeypatch.setattr(within_step, "AFTER_S", 0.2)
    monkeypatch.setattr(within_step, "LOOK_S", 0.05)
    monkeypatch.setattr("megatrain.train.screen.progress.WITHIN_S", 0.1)
    steps, said = loop.train_step, list[int]()

    def slow(run: Any) -> Any:
        layers = run.engine.model.get_decoder().layers
        hooks = [layer.mlp.register_forward_hook(lambda *_: time.sleep(0.15)) for layer in layers]
        if run.step == 1:

            def once(*_: Any) -> None:
                if said:
                    return
                threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
                # a call in C, in which Python runs no handler, and which the signal does not end
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
                ctypes.CDLL(None).usleep(400_000)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
                said.append(sum("asked to stop" in message for message in caplog.messages))

            hooks.append(layers[1].mlp.register_forward_hook(once))
        try:
            return steps(run)
        finally:
            for hook in hooks:
                hook.remove()

    monkeypatch.setattr(loop, "train_step", slow)
    saves = {"every": 1, "background": False}
    with caplog.at_level(logging.INFO, logger="megatrain"), pytest.raises(SystemExit) as stopped:
        train(make_config(tmp_path, "run", checkpoint=saves, log={"progress": "lines"}))
    assert stopped.value.code == 75
    shown = [text for text in caplog.messages if re.match(r"step \d: \d+%, \d+ of 12 passes", text)]
    assert len(shown) >= 3
    shares = [int(re.findall(r"(\d+)%", message)[0]) for message in shown if message.startswith("step 1")]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]
    (told,) = [message for message in caplog.messages if "asked to stop" in message]
    assert re.fullmatch(
        r"the run is asked to stop: it finishes step 2 \(\d+%, \d+ of 12 passes of layers, 0m 0\ds so far"
        r"(, about 0m \d\ds left in it)?\), saves \(the last time it took 0m \d\ds\) and ends; "
        "a second Ctrl-C ends it at once, without this step",
        told,
    )
    assert said[0] == 1, "while the layer goes on"


_CLEARS_UP = """
from megatrain.train import shutdown
shutdown.GRACE_S = 0.5
with shutdown.stop_flag() as stop:
    print("ready", flush=True)
    try:
        time.sleep(60)
    finally:
        time.sleep(60)
"""
"""What follows in a process that clears up for longer than it may, once it is interrupted."""


def test_a_second_signal_ends_a_process_whose_main_thread_hears_none(tmp_path: Path) -> None:
    """It clears up for longer than it may: what is not saved is lost, and the exit code is that of Ctrl-C."""
    script = """
import logging, signal, sys, time
logging.basicConfig(stream=sys.stderr)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background inherits none
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script + _CLEARS_UP], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    heard = process.stderr.readline()  # two signals at once are one
    assert process.poll() is None
    began_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    try:
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert time.monotonic() - began_s < 5
    assert process.returncode == 130
    assert "it finishes the step, saves and ends; a second Ctrl-C ends it at once" in heard
    assert "ended at once: what is not saved is lost" in said


def test_a_second_signal_ends_a_process_whose_log_hangs() -> None:
    """As that of a terminal that is stopped by Ctrl-S, which whoever writes there waits for."""
    script = """
import logging, signal, sys, time
class Hung(logging.Handler):
    def emit(self, record):
        print("hangs", flush=True)
        time.sleep(60)
logging.getLogger().addHandler(Hung())
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
    process = subprocess.Popen([sys.executable, "-c", script + _CLEARS_UP], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in ("ready", "hangs"):
        assert process.stdout.readline() == f"{line}\n"
        process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=30)
    finally:
        process.kill()
        process.stdout.close()
    assert process.returncode == 130


def test_what_hears_signals_leaves_nothing_behind() -> None:
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    names = {thread.name for thread in threading.enumerate()}
    with stop_flag():
        assert signal.set_wakeup_fd(-1) != before
    signal.set_wakeup_fd(before)
    deadline_s = time.monotonic() + 5
    while "signals" in {thread.name for thread in threading.enumerate()} - names:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert 1.5 < shutdown.GRACE_S + shutdown._WORDS_S <= 2.0
