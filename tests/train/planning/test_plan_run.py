"""`megatrain plan`: what it prints, what it refuses with which way out, and what it takes as a question."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, ViTConfig

from megatrain.cli import main
from megatrain.config import build_config, config_keys
from megatrain.config.sizes import parse_bytes, parse_tokens
from megatrain.errors import ConfigError
from megatrain.hardware import load_machine, save_machine
from megatrain.model import masks
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.cost.economics import economics
from megatrain.plan.search.request import PROGRAM_BYTES, USABLE_DEVICE, USABLE_HOST
from megatrain.recipes import shapes
from megatrain.train.loop import train
from megatrain.train.planning import micro_batches, plan_report
from megatrain.train.planning.asking import ask
from megatrain.train.planning.plan_report import plan_text
from megatrain.train.planning.plan_run import plan_run
from megatrain.train.screen import status_line
from tests.plan.anatomies import Shape, llama_like
from tests.searches import planned_for_a_moment
from tests.train.project import make_config


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No counts of an earlier test, nor of the user, and no word of how long a plan takes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr("megatrain.train.planning.counting._COUNTED", {})
    monkeypatch.setattr(status_line, "AFTER_S", 1e6)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The best choice that is found soon."""
    monkeypatch.setattr(micro_batches, "micro_batch_sizes", lambda *_: [1])  # none is looked for
    with planned_for_a_moment(1_000):
        yield


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, soon: None) -> None:
    """Anatomies in closed form too: what is tested is around them."""
    monkeypatch.setattr("megatrain.model.profile.count.count_anatomy", _in_closed_form)


def _in_closed_form(config: LlamaConfig, **options: Any) -> Anatomy:
    shape = Shape(
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        vocab=config.vocab_size,
    )
    keys = ("micro_batch_size", "seq_len", "precision")
    return llama_like(shape, **{key: options[key] for key in keys})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configurations of two shapes: 1 B and 70 B parameters, with few layers of another kind to count."""
    root = tmp_path_factory.mktemp("models")
    shapes = {
        "small": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
        "large": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
    }
    for name, shape in shapes.items():
        config = LlamaConfig(
            **shape,
            vocab_size=32000,
            num_attention_heads=16,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            architectures=["LlamaForCausalLM"],
        )
        config.save_pretrained(root / name)
    return root


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    _, out, _ = plan(capsys, *arguments, "--json")
    result = json.loads(out)
    assert isinstance(result, dict)
    return result


@pytest.mark.usefixtures("soon")
def test_a_plan_that_fits(capsys: pytest.CaptureFixture[str], models: Path) -> None:
    arguments = ["--model", str(models / "small"), "--machine", "rtx-4090", "--tokens", "20B"]
    code, out, err = plan(capsys, *arguments)
    assert code == 0, err
    assert err == ""
    for words in ("FITS", "tokens/s", "MFU", "kWh", "bound by", "rent", "20,000,000,000 tokens"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 112
    found = plan_json(capsys, *arguments)
    assert found["fits"]
    assert found["problem"] is None
    assert found["tokens"] == 20 * 10**9
    tokens = found["batch"]["tokens"]
    assert tokens == 131072
    assert found["tokens_per_s"] == pytest.approx(tokens / found["step_s"])
    assert found["days"] == pytest.approx(-(-20 * 10**9 // tokens) * found["step_s"] / 86400)
    assert found["usd"] == pytest.approx(found["days"] * 24 * 0.45)
    assert found["step_s"] >= 0.999 * max(found["bounds_s"].values())
    assert 0 < found["mfu"] <= found["hardware_mfu"] < 1
    for tier, limit in found["limits"].items():
        assert sum(pool["nbytes"] for pool in found["pools"] if pool["tier"] == tier) <= limit


@pytest.mark.usefixtures("soon")
def test_policy_can_be_pasted_into_a_config_and_planned_again(
    capsys: pytest.CaptureFixture[str], models: Path, tmp_path: Path
) -> None:
    arguments = ["--model", str(models / "small"), "--machine", "rtx-3080", "--seq-len", "1024"]
    found = plan_json(capsys, *arguments)
    batch = found["batch"]
    train = {
        "precision": "bf16",
        "micro_batch_size": batch["micro_batch_size"],
        "grad_accumulation": batch["num_micro_batches"],
    }
    raw = {
        "model": {"path": str(models / "small")},
        "data": {"path": "none", "seq_len": 1024},
        "train": train,
    }
    config = tmp_path / "pasted.json"  # JSON is YAML
    config.write_text(json.dumps({**raw, **found["policy"]}))
    build_config({**raw, **found["policy"]})
    again = plan_json(capsys, str(config), "--machine", "rtx-3080")
    assert again["policy"] == found["policy"]
    assert again["step_s"] < found["step_s"] * (1 + 2e-3)  # faster where the first search ran out of time


@pytest.mark.usefixtures("quick")
def test_explain_says_why_with_numbers(capsys: pytest.CaptureFixture[str], models: Path) -> None:
    arguments = ["--model", str(models / "small"), "--machine", "rtx-4090", "--nvme", "0", "--explain"]
    found = plan_json(capsys, *arguments, "memory.num_slots=3")
    lines = found["explain"]
    assert "memory.num_slots" in lines[1]
    assert found["policy"]["memory"]["num_slots"] == 3
    assert any("twice the host memory" in line for line in lines)
    assert any("clipping" in line for line in lines)
    assert all(line.endswith(".") for line in lines)
    assert sum(bool(re.search(r"\d", line)) for line in lines) >= 3
    _, out, _ = plan(capsys, *arguments)
    assert " why " in out


@pytest.mark.usefixtures("quick")
def test_a_config_is_planned_as_it_would_run(
    capsys: pytest.CaptureFixture[str], models: Path, tmp_path: Path
) -> None:
    """Its batch, its clipping and its settings are kept; the data are not needed."""
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{path: {models / 'small'}}}\ndata: {{seq_len: 2048}}\n"
        "train: {steps: 50, micro_batch_size: 2, grad_accumulation: 4, precision: bf16}\n"
        "optim: {max_grad_norm: null}\nmemory: {activations: recompute, lockstep: 2}\n"
    )
    found = plan_json(capsys, str(file), "--machine", "h200", "memory.boundaries=host")
    assert found["batch"] == {
        "micro_batch_size": 2,
        "seq_len": 2048,
        "num_micro_batches": 4,
        "num_passes_before": 0,
        "runs_are_rounds": False,
        "rows_each": 1,
        "num_runs": 1,
        "num_ranks": 1,
        "num_nodes": 1,
        "sequence": 1,
        "gathers": False,
        "tile_tokens": None,
        "tokens": 16384,
    }
    assert found["clips"] is False
    assert found["tokens"] == 50 * 16384
    assert found["steps"] == 50
    memory = found["policy"]["memory"]
    assert (memory["activations"], memory["lockstep"], memory["boundaries"]) == ("recompute", 2, "host")
    assert not any("not given" in note for note in found["notes"])


@pytest.mark.usefixtures("quick")
def test_options_change_the_machine(capsys: pytest.CaptureFixture[str], models: Path, tmp_path: Path) -> None:
    save_machine(load_machine("rtx-4090").with_ram(77 << 30), tmp_path / "mine.json")
    found = plan_json(capsys, "--model", str(models / "small"), "--machine", str(tmp_path / "mine.json"))
    free = int(0.05 * (77 << 30))
    assert found["limits"]["ram"] == int(USABLE_HOST * (77 << 30)) - free - PROGRAM_BYTES
    step_tokens = found["batch"]["tokens"]
    found = plan_json(capsys, "--model", str(models / "small"), "--machine", "8xh100", "--gpus", "4")
    host = load_machine("8xh100").host_bytes
    assert found["limits"]["ram"] == int(USABLE_HOST * host) - (8 << 30) - 4 * PROGRAM_BYTES
    assert found["batch"]["tokens"] == step_tokens, "of all GPUs together, as a run's"
    found = plan_json(
        capsys,
        *("--model", str(models / "small"), "--machine", "rtx-4090", "--ram", "1.5TiB", "--nvme", "3TB"),
        *("--price-per-hour", "2", "--no-clip", "--precision", "fp32", "--micro-batch-size", "2"),
    )
    assert 0.9 * (3 << 39) < found["limits"]["ram"] <= 3 << 39
    assert found["limits"]["nvme"] == 3 * 10**12
    assert found["usd"] == pytest.approx(found["days"] * 48)
    assert (found["clips"], found["precision"], found["batch"]["micro_batch_size"]) == (False, "fp32", 2)


_SMALL = ("--model", "small", "--nvme", "0")
_LARGE = ("--model", "large", "--nvme", "0")
REFUSED: dict[str, tuple[tuple[str, ...], str, str]] = {
    "too little RAM": (
        (*_SMALL, "--machine", "rtx-4090", "--ram", "9GiB", "--no-clip", "memory.mirror_resident=true"),
        "host memory",
        "--nvme",
    ),
    "too little RAM to clip": (
        (*_LARGE, "--machine", "h200", "--ram", "900GiB", "data.seq_len=512", "train.grad_accumulation=4"),
        "host memory",
        "optim.max_grad_norm=null",
    ),
    "RAM limit": (
        (*_SMALL, "--machine", "h200", "memory.host_limit=2GiB"),
        "host memory",
        "memory.host_limit=",
    ),
    "device limit": (
        (*_SMALL, "--machine", "h200", "memory.device_limit=800MiB"),
        "device memory",
        "memory.device_limit=",
    ),
    "both limits": (
        (*_SMALL, "--machine", "h200", "memory.device_limit=100MB", "memory.host_limit=1GB"),
        "memory",
        "memory.host_limit=null",
    ),
    "everything kept": (
        (*_SMALL, "--machine", "rtx-3080", "memory.activations=keep", "--seq-len", "16384"),
        "device memory",
        "memory.activations=",
    ),
    "everything resident": (
        (*_SMALL, "--machine", "rtx-3080", "memory.resident_blocks=16"),
        "device memory",
        "memory.resident_blocks=0",
    ),
    "too many slots": (
        (*_LARGE, "--machine", "rtx-4090", "--ram", "2TiB", "memory.num_slots=20"),
        "device memory",
        "memory.num_slots=",
    ),
    "too long sequences": (
        (*_SMALL, "--machine", "rtx-3080", "--ram", "1TiB", "--seq-len", "131072"),
        "device memory",
        "data.seq_len=",
    ),
    "too many rows": (
        (*_SMALL, "--machine", "rtx-3080", "--micro-batch-size", "64"),
        "device memory",
        "train.micro_batch_size=1",
    ),
    "fp32": (
        (
            *_LARGE,
            "--machine",
            "h200",
            "--ram",
            "1050GiB",
            "--precision",
            "fp32",
            "--tokens-per-step",
            "4096",
        ),
        "host memory",
        "train.precision=bf16",
    ),
    "too small a device": (
        ("--model", "large", "--machine", "rtx-3080", "--seq-len", "256", "--ram", "4TiB"),
        "device memory",
        "a machine with 11GiB on its device",
    ),
}
SLOW = ("RAM limit", "too little RAM to clip")
"""As others that are planned sooner, in the way out that they name."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.parity] if case in SLOW else []) for case in REFUSED],
)
@pytest.mark.usefixtures("quick")
def test_refusal_names_pool_need_limit_and_an_option_that_fits(
    capsys: pytest.CaptureFixture[str], models: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(models)
    arguments, pool, option = REFUSED[case]
    code, out, err = plan(capsys, *arguments)
    assert code == 3, (out, err)
    assert "Traceback" not in err
    assert "error" not in err, "the verdict is said once, where the plan is"
    assert out.count("DOES NOT FIT") == 1
    found = plan_json(capsys, *arguments)
    assert pool in found["problem"]
    assert len(re.findall(r"\d(?: GiB| MiB)", found["problem"])) >= 2, "need and limit"
    ways = found["remedies"]
    rows = [line[9:] for line in out.splitlines() if re.match(" (use|or) ", line)]
    assert rows == ways
    assert any(way.startswith(option) for way in ways), ways
    for way in ways:
        device = re.fullmatch(r"a machine with (\S+) on its device", way)
        if device is not None:
            larger = replace(load_machine("rtx-3080"), device_bytes=parse_bytes(device[1], "the device"))
            save_machine(larger, models / "larger.json")
            way = "--machine larger.json"
        again = plan_json(capsys, *changed(arguments, shlex.split(way)))
        assert again["fits"], way


def changed(arguments: tuple[str, ...], options: list[str]) -> list[str]:
    """Return the arguments of a command with some of them set anew: what is set twice is refused."""
    flags = {
        "data.seq_len": "--seq-len",
        "train.micro_batch_size": "--micro-batch-size",
        "train.grad_accumulation": "--grad-accumulation",
        "train.precision": "--precision",
    }
    result = list(arguments)
    for option in options:
        key = option.partition("=")[0]  # an override, a flag, or the value of one
        result = [argument for argument in result if argument.partition("=")[0] != key or "=" not in argument]
        flag = flags.get(key, key)
        if flag.startswith("--") and flag in result:
            at = result.index(flag)
            del result[at : at + 2]
        if key == "optim.max_grad_norm":
            result = [argument for argument in result if argument not in ("--clip", "--no-clip")]
    return [*result, *options]


@pytest.mark.usefixtures("quick")
def test_refusal_as_json_has_the_problem(capsys: pytest.CaptureFixture[str], models: Path) -> None:
    code, out, err = plan(
        capsys, "--model", str(models / "large"), "--machine", "cpu-laptop", "--nvme", "0", "--json"
    )
    found = json.loads(out)
    assert code == 3
    assert found["fits"] is False
    assert found["problem"]
    assert found["remedies"]
    assert err == ""


def missing_fields(folder: Path) -> None:
    (folder / "machine.json").write_text('{"name": "mine", "device": "cpu"}')


def no_config(folder: Path) -> None:
    (folder / "notes.json").write_text("[1, 2]")


def no_language_model(folder: Path) -> None:
    ViTConfig(num_hidden_layers=1).save_pretrained(folder / "vision")


def no_json(folder: Path) -> None:
    (folder / "model.txt").write_text("hidden_size: 3")


WRONG: dict[str, tuple[Any, list[str], str]] = {
    "no model": (None, ["--machine", "h200"], "--model"),
    "no such model": (None, ["--model", "./nowhere", "--machine", "h200"], "nowhere"),
    "no such config": (None, ["--hf-config", "./nowhere.json", "--machine", "h200"], "nowhere.json"),
    "not a config": (no_config, ["--hf-config", "notes.json", "--machine", "h200"], "notes.json"),
    "not JSON": (no_json, ["--hf-config", "model.txt", "--machine", "h200"], "model.txt"),
    "no language model": (no_language_model, ["--model", "vision", "--machine", "h200"], "not a causal"),
    "unknown machine": (None, ["--model", "small", "--machine", "h20"], "did you mean h200"),
    "machine without fields": (
        missing_fields,
        ["--model", "small", "--machine", "machine.json"],
        "matmul_flops_per_s",
    ),
    "no such machine file": (None, ["--model", "small", "--machine", "./nowhere.json"], "nowhere.json"),
    "negative RAM": (None, ["--model", "small", "--machine", "h200", "--ram", "-5GiB"], "--ram"),
    "RAM of zero": (None, ["--model", "small", "--machine", "h200", "--ram", "0"], "--ram"),
    "RAM without unit": (None, ["--model", "small", "--machine", "h200", "--ram", "lots"], "--ram"),
    "negative drives": (None, ["--model", "small", "--machine", "h200", "--nvme", "-1"], "--nvme"),
    "no tokens": (None, ["--model", "small", "--machine", "h200", "--tokens", "0"], "--tokens"),
    "negative tokens": (None, ["--model", "small", "--machine", "h200", "--tokens", "-3B"], "--tokens"),
    "tokens in words": (None, ["--model", "small", "--machine", "h200", "--tokens", "many"], "--tokens"),
    "budget of zero": (
        None,
        ["--model", "small", "--machine", "h200", "memory.device_limit=0"],
        "memory.device_limit",
    ),
    "negative budget": (
        None,
        ["--model", "small", "--machine", "h200", "memory.host_limit=-1"],
        "memory.host_limit",
    ),
    "negative length": (None, ["--model", "small", "--machine", "h200", "--seq-len=-4"], "data.seq_len"),
    "beyond the context": (None, ["--model", "small", "--machine", "h200", "--seq-len", "131073"], "131073"),
    "more layers than there are": (
        None,
        ["--model", "small", "--machine", "h200", "memory.resident_blocks=17"],
        "memory.resident_blocks",
    ),
    "too few slots for fragments": (
        None,
        ["--model", "small", "--machine", "h200", "memory.fragments=true", "memory.num_slots=1"],
        "memory.num_slots",
    ),
    "immediate and clipped": (
        None,
        ["--model", "small", "--machine", "h200", "optim.updates=immediate", "--clip"],
        "optim.max_grad_norm",
    ),
    "unknown key": (None, ["--model", "small", "--machine", "h200", "memory.num_slot=1"], "num_slots"),
    "two configs": (None, ["a.yaml", "b.yaml", "--machine", "h200"], "a.yaml"),
    "set twice": (
        None,
        ["--model", "small", "--machine", "h200", "--seq-len", "512", "data.seq_len=256"],
        "data.seq_len",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.usefixtures("quick")
def test_mistake_ends_in_one_sentence(
    capsys: pytest.CaptureFixture[str],
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    spoil, arguments, words = WRONG[case]
    for name in ("small", "large"):
        (tmp_path / name).symlink_to(models / name)
    if spoil is not None:
        spoil(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, out, err = plan(capsys, *arguments)
    assert code == 2, err
    assert out == ""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, err
    assert words in errors[0]
    assert "Traceback" not in err


@pytest.mark.usefixtures("quick")
def test_larger_budget_than_the_machine_has_is_fine(capsys: pytest.CaptureFixture[str], models: Path) -> None:
    found = plan_json(
        capsys, "--model", str(models / "small"), "--machine", "h200", "memory.device_limit=900GiB"
    )
    assert found["fits"]
    assert found["limits"]["device"] == int(USABLE_DEVICE * (load_machine("h200").device_bytes or 0))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1e9", 10**9),
        ("20B", 20 * 10**9),
        ("1.5T", 15 * 10**11),
        ("500m", 5 * 10**8),
        ("1_000", 1000),
        ("7", 7),
    ],
)
def test_tokens_are_read(text: str, count: int) -> None:
    assert parse_tokens(text) == count


def test_every_setting_that_a_plan_names_exists() -> None:
    from megatrain.config.choice import KEYS

    missing = {key for key in KEYS.values() if key not in config_keys()}
    assert missing <= {"memory.gradients"}, "reported as settings only where they are"


@pytest.mark.usefixtures("quick")
def test_settings_name_the_drives_on_which_only_gradients_wait(models: Path) -> None:
    """A commit after every step would write all of the state, which the plan leaves in RAM."""
    spec = load_machine("rtx-4090").with_drive_bytes(10**12)
    found = plan_run({"model": {"path": str(models / "small")}}, spec, source="test")
    layers = len(found.plan.choice.gradients)
    named = []
    for places in ("host", "nvme"):
        choice = replace(found.plan.choice, gradients=(places,) * layers)
        changed = replace(found, plan=replace(found.plan, choice=choice))
        text = plan_text(changed, economics(changed.plan, spec, found.request.anatomy, tokens=1), [])
        text = " ".join(text.split())
        named.append([words in text for words in ("memory.tiers='{nvme: [DIR", "memory.commit_every=null")])
    assert named == [[False, False], [True, True]]


def test_rows_that_need_a_long_mask_are_refused_by_plan_and_by_train(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MistralConfig(
        **small,
        num_key_value_heads=2,
        vocab_size=128,
        sliding_window=4096,
        architectures=["MistralForCausalLM"],
    )
    config.save_pretrained(tmp_path / "mistral")
    asked = ("--model", str(tmp_path / "mistral"), "--machine", "rtx-4090", "--seq-len", "16385")
    found = plan_json(capsys, *asked)
    assert "attention of 1 of 1 layer goes by tiles of torch's own operations (tiled)" in str(found["notes"])
    shorter = plan_json(capsys, *asked[:-1], "16384")
    assert "by tiles" not in str(shorter["notes"])
    code, out, err = plan(capsys, *asked, "model.attn_implementation=sdpa")
    assert (code, out) == (2, "")
    assert "16,385 x 16,385 tokens (its window of 4,096 tokens needs one)" in err
    assert "use model.attn_implementation=tiled, which needs none" in err
    assert err.strip().count("\n") == 0
    monkeypatch.setattr(masks, "MOST_TOKENS", 31)
    with pytest.raises(ConfigError, match=r"32 x 32 tokens \(eager attention always has one\)"):
        train(make_config(tmp_path, model={"attn_implementation": "eager"}))
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.usefixtures("soon")
def test_what_a_deterministic_run_costs_is_in_its_time_or_said_to_be_unknown(
    capsys: pytest.CaptureFixture[str], models: Path
) -> None:
    settings = ("--seq-len=16384", "--micro-batch-size=1", "train.activation_budget=1.0")
    asked = ("--model", str(models / "small"), *settings, "--machine")
    plain = plan_json(capsys, *asked, "h100")
    repeated = plan_json(capsys, *asked, "h100", "train.deterministic=true")
    assert not any("deterministic" in note for note in plain["notes"])
    # 16 heads: 9 blocks each, in two waves of 132
    assert f"attention's forward at 62% and its backward at {0.62 * 144 / 264:.0%} of their rates" in str(
        repeated["notes"]
    )
    assert "9 copies of a gradient, 1.12 GiB on the device" in str(repeated["notes"])
    assert repeated["step_s"] > 1.2 * plain["step_s"]
    unknown, known = (
        plan_json(capsys, *asked, "mi300x", f"train.deterministic={value}") for value in ("true", "false")
    )
    assert "on mi300x in bf16 is not known, and not in these times" in str(unknown["notes"])
    assert unknown["step_s"] == known["step_s"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (8, "8 bytes"),
        (3 << 20, "3.00 MiB"),
        (34_359_738_368, "34.4 GB (32 GiB)"),
        (1.63e15, "1,630 TB (1,482 TiB)"),
        (999.7e12, "1,000 TB (909 TiB)"),
    ],
)
def test_sizes_are_in_units_that_people_read(nbytes: float, text: str) -> None:
    assert plan_report._tera(nbytes) == text


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("machine", "given", "chosen"),
    [
        ("rtx-4090", {}, (0.7, 0.5, 0.3)),
        ("rtx-4090", {"activation_budget": 1.0}, (1.0,)),
        ("cpu-laptop", {}, (1.0,)),
    ],
)
def test_a_budget_is_chosen_where_it_makes_a_compiled_run_faster(
    machine: str, given: dict[str, float], chosen: tuple[float, ...], soon: None
) -> None:
    """And said with what was not given; one that is given is kept, and a CPU compiles nothing."""
    raw = {
        "model": {"path": "8b"},
        "train": {"tokens_per_step": 8 * 1024, **given},
        "data": {"seq_len": 1024},
    }
    spec = load_machine(machine).with_ram(1 << 40)
    asked = ask(raw, spec, source="test", hf_config=shapes()["llama-8b"])
    budget = asked.config.train.activation_budget
    assert budget in chosen
    assert asked.request.budget == budget
    assert any(f"train.activation_budget={budget}" in note for note in asked.notes) == (budget < 1)
