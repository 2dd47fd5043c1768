"""Machine files of any JSON are read or refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from megatrain.hardware.machines import load_machine, machine_json, machine_names
from megatrain.stream.lanes.devices import read_machine
from megatrain.stream.lanes.emulated_spec import EmulatedMachine
from tests.fuzz.judge import attack, counts
from tests.fuzz.mutators import mutated_json


def read(file: Path, machines: list[dict[str, Any]], random: Random) -> None:
    file.write_bytes(mutated_json(random, random.choice(machines)))
    load_machine(file)


@counts(sample=1500, soak=60_000)
def test_any_machine_file_is_read_or_refused(tmp_path: Path, num: int) -> None:
    machines = [machine_json(load_machine(name)) for name in machine_names()]
    assert attack(num, partial(read, tmp_path / "machine.json", machines), tmp_path) > num // 2


RATES = dict.fromkeys((*EmulatedMachine.RATES, "device_bytes"), 1e9)


def read_rates(file: Path, random: Random) -> None:
    file.write_bytes(mutated_json(random, RATES))
    read_machine(str(file))


@counts(sample=1500, soak=20_000)
def test_any_file_of_an_emulated_machine_is_read_or_refused(tmp_path: Path, num: int) -> None:
    assert attack(num, partial(read_rates, tmp_path / "rates.json"), tmp_path) > num // 2
