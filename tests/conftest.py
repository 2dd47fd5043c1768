"""Settings of the whole suite."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from functools import partial

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
from megatrain.plan.search.planner import make_plan
from megatrain.stream import resolve
from megatrain.train.planning import allocation
from tests.counts import counted_once

torch.set_num_threads(1)
gc.disable()  # while thousands of items are made, of which none goes


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Leave the rows of full products out before 12 thousand items are made of them, where none is wanted."""
    yield
    if metafunc.config.option.markexpr == "not parity":
        calls = [call for call in metafunc._calls if all(mark.name != "parity" for mark in call.marks)]
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
    """Their tests ask what a plan does, not how good it is; those of the search and `plan` have all of it."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (resolve, allocation):
            patch.setattr(module, "make_plan", partial(make_plan, budget=3000))
        yield
