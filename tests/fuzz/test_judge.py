"""The judge of odd inputs sees each fault that it is there for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from random import Random

import pytest

from megatrain.errors import DataError
from tests.fuzz import judge
from tests.fuzz.judge import attack
from tests.fuzz.mutators import mutated_bytes, mutated_json, mutated_value


def test_what_is_refused_is_counted(tmp_path: Path) -> None:
    def one(random: Random) -> None:
        (tmp_path / "mine").write_text("x")
        if random.random() < 0.5:
            raise DataError("this file is empty; fill it")

    expected = sum(Random(seed).random() < 0.5 for seed in range(40))
    assert attack(40, one, tmp_path) == expected > 10


def _opens(random: Random) -> None:
    os.close(os.open("/etc/hostname", os.O_RDONLY))


def _runs(random: Random) -> None:
    subprocess.run(["true"], check=True)


def _lasts(random: Random) -> None:
    while True:
        pass


def _says_nothing(random: Random) -> None:
    raise DataError("")


def _fails(random: Random) -> None:
    raise KeyError("member")


def _takes(random: Random) -> None:
    assert len(bytes(2**26)) == 2**26


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (_takes, "MiB of memory"),
        (_opens, "open /etc/hostname outside of"),
        (_runs, "subprocess.Popen"),
        (_lasts, "Hang"),
        (_says_nothing, "no sentence"),
        (_fails, "seed 0: "),
    ],
)
def test_each_fault_is_seen(one: object, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "LONGEST_S", 0.05)
    taken = iter(range(0, 2**40, 2**31))
    if one is _takes:
        monkeypatch.setattr(judge, "_most_bytes", lambda: next(taken))
    with pytest.raises(pytest.fail.Exception, match=said):
        attack(1, one, tmp_path)  # type: ignore[arg-type]


def test_mutations_are_those_of_their_seed_and_change_something() -> None:
    value = {"a": [1, 2, {"b": "text"}], "c": None}
    for make in (mutated_value, mutated_json):
        assert [repr(make(Random(n), value)) for n in range(50)] == [
            repr(make(Random(n), value)) for n in range(50)
        ]
        assert len({repr(make(Random(n), value)) for n in range(200)}) > 100
    assert value == {"a": [1, 2, {"b": "text"}], "c": None}
    data = bytes(range(100))
    assert sum(mutated_bytes(Random(n), data) != data for n in range(200)) > 190
