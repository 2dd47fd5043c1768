"""Settings of the whole suite."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

# One thread per test process: the suite runs in parallel processes, and threads that wait for each other's
# turn on a busy core slow everything down many times over.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():
    # Triton asks when it is first imported, by whomever: its kernels then run on the CPU, in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

from megatrain.files import FileCalls
from tests.counts import counted_once
from tests.cpu_seconds import CpuSeconds
from tests.products import sample
from tests.searches import searched_for_a_moment

for absent in (torch.cuda, torch.mtia, torch.xpu):
    if not absent.is_available():  # each `torch.manual_seed` would describe the whole stack to each of them
        for module in (absent, getattr(absent, "random", absent)):  # which has imported the name
            setattr(module, "_lazy_call", lambda call, **which: None)  # noqa: B010

torch.set_num_threads(1)
gc.disable()  # while thousands of items are made, of which none goes


def pytest_configure(config: pytest.Config) -> None:
    """Tell at the end what each folder has cost."""
    config.pluginmanager.register(CpuSeconds(config))


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Sample, and leave full products out before 12 thousand items are made of them, if none is wanted."""
    yield
    for sampled in metafunc.definition.iter_markers("sampled"):
        rows = [call for call in metafunc._calls if all(mark.name != "parity" for mark in call.marks)]
        chosen = sample([call.indices for call in rows], *sampled.args)
        for place, call in enumerate(rows):
            if place not in chosen:
                call.marks.append(pytest.mark.parity.mark)
    if metafunc.config.option.markexpr == "not parity and not soak":
        left_out = {"parity", "soak"}
        calls = [call for call in metafunc._calls if left_out.isdisjoint(mark.name for mark in call.marks)]
        metafunc._calls = calls or metafunc._calls  # a test of parity alone is deselected as ever


def pytest_collection_finish() -> None:
    """Let no collection look again at modules and items, which stay."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(autouse=True, scope="module")
def _models_are_counted_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of counting itself count every time."""
    if "/model/profile/" in request.path.as_posix():
        yield
        return
    with counted_once():
        yield


@pytest.fixture(autouse=True, scope="session")
def _nothing_waits_for_the_disk() -> Iterator[None]:
    """No test in this process can see the difference; those of crashes have calls of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileCalls, "fsync", lambda self, descriptor: os.fstat(descriptor))
        yield


@pytest.fixture(autouse=True, scope="session")
def _runs_search_for_a_moment() -> Iterator[None]:
    with searched_for_a_moment():
        yield


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C interrupt: a process that a shell has put into the background inherits that it does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
