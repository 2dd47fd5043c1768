"""Machine files: every bundled one is whole and sourced, and every mistake in a file is one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli.machine import planned_machine
from megatrain.config.sizes import parse_bytes
from megatrain.errors import ConfigError, OutputError
from megatrain.hardware import HardwareSpec, load_machine, machine_names, save_machine

BUNDLED = Path(__file__).parents[2] / "megatrain/hardware/machines"
PROMISED = {
    *(
        "rtx-3080",
        "rtx-3090",
        "rtx-4090",
        "rtx-4090-server",
        "rtx-5090",
        "a100",
        "h100",
        "h200",
        "gh200",
        "b200",
        "mi300x",
    ),
    *("mi400", "pcie6-host", "cxl-node", "cpu-laptop", "rtx-pro-6000", "rtx-5060-ti"),
    *("4xrtx-4090", "8xh100", "8xh200", "8xb200", "8xrtx-pro-6000", "2xdgx-spark"),
}


def raw_of(name: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((BUNDLED / f"{name}.json").read_text(encoding="utf-8"))
    return raw


def write(folder: Path, raw: object) -> Path:
    path = folder / "box.json"
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw), encoding="utf-8")
    return path


def problem_of(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_machine(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_promised_machines_are_bundled() -> None:
    assert set(machine_names()) == PROMISED


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_bundled_machine_is_whole_and_every_figure_has_a_source(name: str) -> None:
    raw, spec = raw_of(name), load_machine(name)
    assert spec.name == name
    every_field = {field.name for field in fields(HardwareSpec)}
    assert set(raw) == every_field
    assert set(raw["sources"]) == every_field - {"name", "sources"}
    assert spec.is_cpu == (name == "cpu-laptop")
    assert (spec.device_bytes is None) == spec.is_cpu
    most_threads = max(spec.update_params_per_s)
    assert most_threads <= spec.num_cores
    assert spec.update_params_per_s[most_threads] == spec.update_rate, "more threads are never slower"
    assert spec.update_rate * 26 <= spec.host_bytes_per_s, "an update moves 26 bytes per parameter"


@pytest.mark.parametrize(
    ("name", "flops_per_s", "link", "host_rate", "device_bytes", "host_bytes"),
    [
        ("rtx-4090", 1.77e14, 2.5e10, 7.0e10, 2.4e10, 1.28e11),
        ("h100", 6.95e14, 5.5e10, 3.0e11, 8.0e10, 1.0e12),
        ("gh200", 6.95e14, 3.5e11, 4.0e11, 9.6e10, 4.8e11),
    ],
)
def test_rates_are_those_that_their_sources_name(
    name: str, flops_per_s: float, link: float, host_rate: float, device_bytes: int, host_bytes: int
) -> None:
    spec = load_machine(name)
    assert spec.matmul_flops_per_s["bf16"] == flops_per_s
    assert (spec.h2d_bytes_per_s, spec.d2h_bytes_per_s, spec.host_bytes_per_s) == (link, link, host_rate)
    assert (spec.device_bytes, spec.host_bytes) == (device_bytes, host_bytes)


def test_name_is_read_in_any_case_and_a_path_as_a_file(tmp_path: Path) -> None:
    assert load_machine("H200") == load_machine("h200")
    assert load_machine(write(tmp_path, raw_of("h200"))) == load_machine("h200")
    minimal = {key: raw_of("h200")[key] for key in raw_of("h200") if key not in ("drives", "sources")}
    assert load_machine(write(tmp_path, minimal)).drives is None


@pytest.mark.parametrize("name", ["cpu-laptop", "h200", "cxl-node"])
def test_saved_machine_is_read_back_the_same(tmp_path: Path, name: str) -> None:
    spec = replace(load_machine(name), name="mine", both_share=1 / 3)
    save_machine(spec, tmp_path / "mine.json")
    assert load_machine(tmp_path / "mine.json") == spec
    assert [file.name for file in tmp_path.iterdir()] == ["mine.json"]
    with pytest.raises(
        OutputError, match=r"the machine file .*no/mine\.json cannot be written \(No such file"
    ):
        save_machine(spec, tmp_path / "no" / "mine.json")


def test_unknown_name_is_answered_with_the_nearest() -> None:
    message = problem_of("h20")
    assert "there is no machine 'h20'; did you mean h200?" in message
    assert "rtx-4090" in message
    assert "the bundled machines are 2xdgx-spark" in problem_of("zzzzzz")


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(ConfigError, match=r"model\.json is larger than 1 MiB, and no machine file is"):
        load_machine(tmp_path / "model.json")


def test_path_that_is_no_file_is_named(tmp_path: Path) -> None:
    assert problem_of(tmp_path / "no.json").endswith("no.json cannot be read (No such file or directory)")
    assert problem_of(tmp_path).endswith("cannot be read (Is a directory)")
    (tmp_path / "latin.json").write_bytes(b'{"name": "caf\xe9"}')
    assert "not UTF-8 text (byte 13)" in problem_of(tmp_path / "latin.json")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "not JSON (line 1"),
        ("{\n  'name': 1}", "not JSON (line 2"),
        ("[1]", "the machine is [1]; it must be an object"),
        ("null", "the machine is null; it must be an object"),
        ('{"name": "a", "name": "b"}', "the key name is given twice"),
        ("[" * 100_000, "not a machine file"),
        ('{"num_cores": ' + "9" * 5000 + "}", "not a machine file"),
    ],
)
def test_text_that_is_no_machine_is_one_sentence(tmp_path: Path, text: str, part: str) -> None:
    message = problem_of(write(tmp_path, text))
    assert "box.json" in message
    assert part in message


def with_value(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        target: Any = raw
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = value

    return change


def without(*path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        target: Any = raw
        for step in path[:-1]:
            target = target[step]
        del target[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (without("h2d_bytes_per_s"), "the field h2d_bytes_per_s is missing"),
        (without("memory", 0, "nbytes"), "the field memory[0].nbytes is missing"),
        (without("drives", "read_bytes_per_s"), "the field drives.read_bytes_per_s is missing"),
        (with_value("h2d_byte_per_s", value=1), "h2d_byte_per_s; did you mean h2d_bytes_per_s?"),
        (
            with_value("memory", 0, "bytes", value=1),
            "there is no field memory[0].bytes; did you mean nbytes?",
        ),
        (with_value("drives", "zzz", value=1), "there is no field drives.zzz; the fields are nbytes"),
        (with_value("sources", "hd2_bytes_per_s", value="x"), "did you mean h2d_bytes_per_s?"),
        (with_value("device_bytes", value=-5), "device_bytes is -5; it must be a whole number of at least 1"),
        (with_value("device_bytes", value=1.5), "device_bytes is 1.5; it must be a whole number"),
        (with_value("device_bytes", value="80GB"), "device_bytes is '80GB'; it must be a whole number"),
        (with_value("device_bytes", value=True), "device_bytes is true; it must be a whole number"),
        (with_value("num_cores", value=0), "num_cores is 0; it must be a whole number of at least 1"),
        (with_value("num_cores", value=10**400), "num_cores is 1000"),
        (with_value("h2d_bytes_per_s", value=0), "h2d_bytes_per_s is 0; it must be a number above 0"),
        (with_value("h2d_bytes_per_s", value=float("nan")), "h2d_bytes_per_s is nan; it must be a number"),
        (with_value("h2d_bytes_per_s", value=float("inf")), "h2d_bytes_per_s is inf; it must be a number"),
        (with_value("h2d_bytes_per_s", value=None), "h2d_bytes_per_s is null; it must be a number"),
        (with_value("both_share", value=1.5), "both_share is 1.5; it must be a number above 0 and at most 1"),
        (with_value("price_usd", value=-1), "price_usd is -1; it must be a number of at least 0"),
        (with_value("device", value=""), "device is ''; it must be text"),
        (with_value("matmul_flops_per_s", value=5), "it must be an object with the keys bf16 and fp32"),
        (without("matmul_flops_per_s", "fp32"), "it must be an object with the keys bf16 and fp32"),
        (with_value("matmul_flops_per_s", "bf16", value=-1), "matmul_flops_per_s.bf16 is -1"),
        (with_value("update_params_per_s", value={}), "an object from numbers of threads to rates"),
        (with_value("update_params_per_s", "0", value=1), "update_params_per_s has the key '0'"),
        (with_value("update_params_per_s", "two", value=1), "update_params_per_s has the key 'two'"),
        (with_value("update_params_per_s", "2", value=-1), "update_params_per_s.2 is -1"),
        (with_value("memory", value=[]), "memory is []; it must be a list of at least one memory node"),
        (with_value("memory", 1, value=7), "memory[1] is 7; it must be an object"),
        (with_value("memory", 1, "nbytes", value=-1), "memory[1].nbytes is -1"),
        (with_value("memory", 1, "kind", value="hbm"), "memory[1].kind is 'hbm'; it must be dram or cxl"),
        (with_value("memory", value=[{"nbytes": 1, "bytes_per_s": 1, "kind": "cxl"}]), "no node of the kind"),
        (with_value("drives", value=3), "drives is 3; it must be an object"),
        (with_value("drives", "nbytes", value=-1), "drives.nbytes is -1"),
        (with_value("drives", "is_direct", value=1), "drives.is_direct is 1; it must be true or false"),
        (with_value("sources", value="mine"), "sources is 'mine'; it must be an object"),
        (with_value("sources", "device", value=3), "sources.device is 3; it must be text"),
    ],
)
def test_wrong_field_is_one_sentence_with_the_file_and_the_field(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], part: str
) -> None:
    raw = raw_of("h200")
    change(raw)
    message = problem_of(write(tmp_path, raw))
    assert "box.json" in message
    assert part in message


def test_all_missing_fields_are_named_at_once(tmp_path: Path) -> None:
    message = problem_of(write(tmp_path, {"name": "x", "device": "cpu"}))
    assert "the fields device_bytes, matmul_flops_per_s, " in message
    assert "num_cores are missing" in message
    assert "drives" not in message


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [("1536GiB", 1536 * 2**30), ("8TB", 8 * 10**12), ("0", 0), ("0 GiB", 0), ("4096", 4096), (17, 17)],
)
def test_size_means_what_it_looks_like(value: object, nbytes: int) -> None:
    assert parse_bytes(value, "--ram") == nbytes


@pytest.mark.parametrize(
    "value", ["-5GiB", "5GX", "5iB", "9" * 400 + "B", "", "0.1B", "lots", -1, 1.5, True, None]
)
def test_size_that_is_none_is_one_sentence(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^--ram is .*; use bytes or a size such as 24GiB or 8TB$"):
        parse_bytes(value, "--ram")


def test_ram_without_its_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--ram is 64 bytes; .* with its unit, such as 64GiB"):
        planned_machine("h100", "64")


def test_machines_are_read_without_torch() -> None:
    code = (
        "import sys\n"
        "from megatrain.hardware import load_machine\n"
        "load_machine('h200')\n"
        "assert not {'torch', 'numba', 'numpy', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_rank_has_its_part_of_what_the_devices_of_a_node_share() -> None:
    node = load_machine("8xh100")
    rank = node.of_rank()
    assert node.num_ranks == 8
    assert rank.host_bytes_per_s == node.host_bytes_per_s / 8
    assert rank.update_rate == node.update_rate / 8
    assert rank.compressed_params_per_s["int8"] == node.compressed_params_per_s["int8"] / 8
    assert node.drives is not None
    assert rank.drives is not None
    assert rank.drives.read_bytes_per_s == node.drives.read_bytes_per_s / 8
    assert (rank.h2d_bytes_per_s, rank.host_bytes) == (node.h2d_bytes_per_s, node.host_bytes)
    assert node.with_ranks(1).of_rank() == node.with_ranks(1), "one device has it all"
