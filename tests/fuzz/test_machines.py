"""Machine files of any JSON are read or refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from megatrain.hardware.machines import load_machine, machine_json, machine_names
from tests.fuzz.judge import attack, counts
from tests.fuzz.mutators import mutated_json


def read(file: Path, machines: list[dict[str, Any]], random: Random) -> None:
    file.write_bytes(mutated_json(random, random.choice(machines)))
    load_machine(file)


@counts(sample=4000, soak=60_000)
def test_any_machine_file_is_read_or_refused(tmp_path: Path, num: int) -> None:
    machines = [machine_json(load_machine(name)) for name in machine_names()]
    assert attack(num, partial(read, tmp_path / "machine.json", machines), tmp_path) > num // 2
