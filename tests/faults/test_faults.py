"""A call into the system that fails ends in one sentence, and leaves a run that goes on to the same bits.

Every call of a command that names a file, with every error that it can end with, once and from there on: the
full product is parity, and a sample is in every run of the tests.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.judge import judge
from tests.faults.scenarios import NUMBERS, Bench, Fault, bench, cases

SAMPLED = {"train": 251, "resume": 1999, "finish": 997, "export": 503, "drives": 383}
"""Of how many cases of a scenario the sample takes one."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Thousands of small runs: in memory where that can be."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else tmp_path_factory.mktemp("faults")
    with tempfile.TemporaryDirectory(dir=parent) as directory, bench(Path(directory).resolve()) as made:
        yield made


def cases_of(files: Bench, scenario: str) -> list[tuple[Fault, str]]:
    """List the faults of a scenario; of state on drives, and of I/O threads, only what is on the drives."""
    found = cases(calls_of(files, scenario))
    return [case for case in found if " drive" in case[1]] if scenario == "drives" else found


def calls_of(files: Bench, scenario: str) -> list[str]:
    """Run a scenario without a fault; `train` only as far as `resume` does not go."""
    files.begin(scenario)
    answer = files.server.ask(files.command(scenario))
    assert answer["code"] == 0, answer["err"]
    calls: list[str] = answer["calls"]
    names = {call.partition(" ")[0] for call in calls}
    assert {"open", "read", "close", "fsync", "mkdir", "rename"} <= {
        name.removesuffix("64") for name in names
    }
    if scenario != "train":
        return calls
    return calls[: next(at for at, call in enumerate(calls) if "checkpoints/.tmp-" in call)]


@pytest.mark.parametrize("scenario", SAMPLED)
def test_sampled_fault_ends_in_a_sentence_and_the_run_goes_on(files: Bench, scenario: str) -> None:
    listed, sample = cases_of(files, scenario), []
    for place, number in enumerate(NUMBERS):
        found = [case for case in listed if case[0].number == number]
        start = place * SAMPLED[scenario] // len(NUMBERS) % len(found)
        sample += found[start :: SAMPLED[scenario]]
    assert {fault.number for fault, _ in sample} == set(NUMBERS)
    problems = [problem for fault, call in sample for problem in judge(files, scenario, fault, call)]
    assert not problems, "\n".join(problems[:20])


def test_state_that_cannot_be_listed_is_not_of_another_model(files: Bench) -> None:
    calls = calls_of(files, "resume")
    listing = "opendir run/checkpoints/step-00000001/state"
    count = calls.count(listing)
    assert count >= 2
    for at in range(count):  # among these alone: threads make the numbers of others differ from run to run
        fault = Fault(at=at, number=errno.EACCES, only="opendir *step-00000001/state")
        assert judge(files, "resume", fault, listing) == []


@pytest.mark.parity
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("scenario", SAMPLED)
def test_every_fault_ends_in_a_sentence_and_the_run_goes_on(
    files: Bench, scenario: str, number: int, always: bool
) -> None:
    chosen = [
        (fault, call)
        for fault, call in cases_of(files, scenario)
        if (fault.number, fault.always) == (number, always)
    ]
    assert len(chosen) > 40
    problems = [problem for fault, call in chosen for problem in judge(files, scenario, fault, call)]
    assert not problems, f"{len(problems)} of {len(chosen)} cases:\n" + "\n".join(problems[:20])


def test_rust_and_threads_are_seen(files: Bench) -> None:
    """The calls of safetensors and tokenizers go through the shim as those of Python do."""
    files.begin("resume")
    calls = files.server.ask(files.command("resume"))["calls"]
    for call, name in (
        ("mmap", "model.safetensors"),
        ("write", "tokenizer.json"),
        ("read", "tokenizer.json"),
    ):
        assert any(seen.startswith(call) and seen.endswith(name) for seen in calls), (call, name)


def test_fault_is_injected(files: Bench) -> None:
    """A fault that is not met would prove nothing: one in the write of a checkpoint is in the message."""
    files.begin("train")
    fault = Fault(at=0, number=errno.ENOSPC, only="write *tokenizer.json")
    answer = files.server.ask(files.command("train"), fault)
    assert answer["code"] == 0, "the fault was a single one, and the run goes on"
    assert "step 1 is not saved: megatrain cannot write the tokenizer to " in answer["err"]
    assert "No space left on device; free some space there" in answer["err"]
