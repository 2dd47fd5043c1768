"""The suite for one CUDA device, run dry: every step, its files, its gates and its report."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reference import attach_plainly

CELLS = ("8b_32k", "8b_seq8k", "8b_128k", "8b_24gb", "8b_80gb", "3b_ours", "3b_fsdp2", "resident", "depth",
         "120b", "8b_512k")  # fmt: skip
FIGURES = ("tokens_per_step", "tokens_per_s", "step_s", "model_flops_per_s", "of_matmul_peak",
           "host_rss_bytes", "host_rss_bytes_peak", "losses", "grad_norms")  # fmt: skip
OUR_FIGURES = ("device_bytes_peak", "bytes_moved_per_step", "policies", "busy", "bound", "last_step",
               "host_bytes", "load_s", "attach_s", "asked")  # fmt: skip


def suite(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu.suite", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def module() -> Any:
    """Import a script of the suite by its name."""
    return lambda name: importlib.import_module(f"benchmarks.gpu.{name}")


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run everything once; returns the directory."""
    out = tmp_path_factory.mktemp("suite")
    done = suite("--dry-run", "--out", out)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    last = json.loads(done.stdout.strip().splitlines()[-1])
    assert last["dry_run"] is True
    assert last["gates"] == json.loads((out / "suite.json").read_text())["gates"]
    return out


@pytest.fixture
def results(dry: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((dry / "suite.json").read_text())["steps"]
    return found


# -- a dry run of everything -------------------------------------------------------------------------------


@pytest.mark.parity
def test_every_step_of_a_dry_run_ends_well(results: dict[str, dict[str, Any]], module: Any) -> None:
    assert results.keys() == module("suite").STEPS.keys()
    apart = {name: step["status"] for name, step in results.items() if step["status"] != "ok"}
    # what is not there is said, and is no failure
    assert apart.keys() <= {"3b_deepspeed"}
    assert all(status.startswith("unavailable: ") for status in apart.values())


@pytest.mark.parity
def test_settings_change_no_bit_on_the_cpu(results: dict[str, dict[str, Any]]) -> None:
    parity = results["parity"]
    assert parity["num_bitwise"] == parity["num_cases"] >= 10
    assert all(group["results"] == 1 for group in parity["groups"].values())
    assert max(group["runs"] for group in parity["groups"].values()) > 1
    assert all(case["is_bitwise"] for case in results["device_adamw"]["cases"])
    assert [row["way"] for row in results["head"]["ways"]] == ["own", "linear"]
    assert all(row["is_ok"] for row in results["head"]["ways"])
    races = results["races"]["runs"]
    assert {run["activations"] for run in races} == {"recompute", "keep", "offload", "recompute_cheap"}
    assert not any(run["differing"] for run in races)
    assert results["syncs"]["is_ok"]
    assert all(case["is_ok"] and case["is_same_when_kept"] for case in results["compiled"]["cases"])


@pytest.mark.parity
@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_has_its_figures(results: dict[str, dict[str, Any]], cell: str) -> None:
    runs = results[cell]["runs"]
    assert runs
    for run in runs:
        assert not [key for key in FIGURES if key not in run]
        if "policies" in run and "no limit" not in run["label"]:
            assert not [key for key in OUR_FIGURES if key not in run]
        assert run["step_s"]["min"] <= run["step_s"]["median"] <= run["step_s"]["max"]
        assert run["tokens_per_s"] == pytest.approx(run["tokens_per_step"] / run["step_s"]["median"])
        assert run["of_matmul_peak"] > 0
        assert min(run["grad_norms"]) > 0
        assert run["is_falling"]


@pytest.mark.parity
def test_policies_and_rivals_have_the_same_losses(results: dict[str, dict[str, Any]]) -> None:
    ours = {(run["label"], run["tokens_per_step"]): run for run in results["3b_ours"]["runs"]}
    losses = [run["losses"] for run in ours.values()]
    assert all(found == losses[0] for found in losses)
    auto, kept, cheap = results["8b_32k"]["runs"]
    assert auto["losses"] == kept["losses"] == cheap["losses"] == results["8b_80gb"]["runs"][0]["losses"]
    assert results["8b_128k"]["runs"][0]["losses"] == results["8b_24gb"]["runs"][0]["losses"]
    theirs = results["3b_fsdp2"]["runs"][0]
    assert theirs["losses"] == pytest.approx(losses[0], abs=1e-4)
    assert theirs["grad_norms"] == pytest.approx(results["3b_ours"]["runs"][0]["grad_norms"], rel=1e-4)
    assert (
        results["3b_fsdp2"]["master_dtypes"] == results["resident"]["runs"][0]["master_dtypes"] == ["float32"]
    )


@pytest.mark.parity
def test_ratios_and_gates_follow_from_the_runs(results: dict[str, dict[str, Any]], module: Any) -> None:
    gates = {gate["what"]: gate for gate in module("page").gates(results)}
    assert len(gates) == 8
    budget = results["8b_24gb"]
    assert budget["of_unlimited_same_policies"] == pytest.approx(
        budget["runs"][0]["tokens_per_s"] / budget["runs"][1]["tokens_per_s"]
    )
    fastest = max(run["tokens_per_s"] for run in results["8b_32k"]["runs"])
    found = gates["8B in 24 GB, of unlimited"]
    assert found["value"] == pytest.approx(budget["runs"][0]["tokens_per_s"] / fastest)
    assert found["is_met"] == (found["value"] >= 0.80)
    against_deepspeed = [gate for what, gate in gates.items() if "DeepSpeed" in what]
    if results["3b_deepspeed"]["status"] != "ok":
        assert all(gate["value"] is gate["is_met"] is None for gate in against_deepspeed)
    assert results["resident"]["ours_over_plain"] > 0
    assert results["depth"]["of_shallow"].keys() == {"28", "84", "180"}
    assert results["120b"]["is_aliased"] is True
    assert results["120b"]["runs"][0]["host_bytes"] < results["120b"]["host_bytes_if_whole"]


@pytest.mark.parity
def test_a_report_has_every_cell_and_names_what_is_missing(dry: Path, tmp_path: Path) -> None:
    done = suite("--report", dry, "--results", tmp_path)
    assert done.returncode == 0, done.stderr
    text = Path(done.stdout.strip()).read_text()
    for cell in CELLS:
        assert f"| {cell}" in text
    assert "10 of 10 cases are equal" in text
    whole = json.loads((dry / "suite.json").read_text())["steps"]
    for name, step in whole.items():
        if step["status"] != "ok":
            assert f"- {name}: {step['status']}" in text
    one_file = suite("--report", dry / "suite.json", "--results", tmp_path)
    assert Path(one_file.stdout.strip()).read_text() == text


# -- the runner --------------------------------------------------------------------------------------------


def test_an_unknown_step_is_refused(tmp_path: Path) -> None:
    done = suite("--out", tmp_path, "--steps", "parity,sped")
    assert done.returncode == 2
    assert "unknown steps: sped" in done.stderr


def test_without_time_steps_are_skipped_and_the_report_says_so(tmp_path: Path) -> None:
    done = suite("--dry-run", "--out", tmp_path, "--steps", "8b", "--seconds", "1")
    assert done.returncode == 1
    statuses = json.loads(done.stdout.strip().splitlines()[-1])["steps"]
    assert statuses.keys() == {"8b_32k", "8b_seq8k", "8b_128k", "8b_24gb", "8b_80gb"}
    assert set(statuses.values()) == {"skipped: no time left"}
    text = Path(suite("--report", tmp_path, "--results", tmp_path).stdout.strip()).read_text()
    assert "- 8b_32k: skipped: no time left" in text
    assert "- parity: not run" in text


def test_groups_keep_the_order_and_neighbours_share_a_process(module: Any) -> None:
    runner = module("suite")
    assert runner.chosen_steps(["8b", "8b_32k", "rates"])[-2:] == ["8b_80gb", "rates"]
    assert runner.chosen_steps(["all"]) == list(runner.STEPS)
    names = ["rates", "8b_32k", "8b_24gb", "depth", "8b_512k"]
    processes = list(module("steps").in_processes(names, runner.STEPS, is_dry=False))
    assert processes == [["rates"], ["8b_32k", "8b_24gb"], ["depth"], ["8b_512k"]]


def test_a_process_that_dies_costs_one_step(module: Any, tmp_path: Path) -> None:
    runner = module("steps")
    (tmp_path / "8b_32k.json").write_text('{"status": "ok"}')
    (tmp_path / "8b_seq8k.json").write_text('{"status": "running", "runs": [1]}')
    left = runner.unfinished(tmp_path, ["8b_32k", "8b_seq8k", "8b_128k"], "failed: the process ended with -9")
    assert left == ["8b_128k"]
    found = runner.read_step(tmp_path, "8b_seq8k")
    assert found == {"status": "failed: the process ended with -9", "runs": [1]}
    assert runner.unfinished(tmp_path, ["8b_128k"], "failed: it did not begin") == []


def test_a_step_is_stopped_at_its_limit(module: Any) -> None:
    run = module("run")
    forever = threading.Event()  # that nobody sets: only the limit ends the wait
    with pytest.raises(run.TimeLimitError, match="stopped after"), run.limited(0.05):
        forever.wait()


# -- parts -------------------------------------------------------------------------------------------------


def test_pairwise_rows_hold_every_pair(module: Any) -> None:
    correctness = module("correctness")
    rows = correctness.pairwise(correctness.AXES)
    assert len(rows) < 40
    for (one, ones), (other, others) in itertools.combinations(correctness.AXES.items(), 2):
        for a, b in itertools.product(ones, others):
            assert any(row[one] == a and row[other] == b for row in rows), (one, a, other, b)


def test_the_first_attempt_that_memory_allows_is_measured(module: Any) -> None:
    cleaned = []

    def run(attempt: dict[str, Any]) -> dict[str, Any]:
        if attempt["size"] > 1:
            raise torch.OutOfMemoryError(f"no room for {attempt['size']}")
        return {"found": attempt["size"]}

    attempts = [{"size": size} for size in (3, 2, 1, 0)]
    measure = module("measure").attempts_until_one_fits
    rows = list(measure(attempts, run, lambda: cleaned.append(True)))
    assert [row.get("refused") for row in rows] == [{"size": 3}, {"size": 2}, None]
    assert rows[-1] == {"found": 1}
    assert len(cleaned) == 2
    with pytest.raises(RuntimeError, match="none of 1 attempts"):
        list(measure(attempts[:1], run, lambda: None))


def test_random_models_are_the_same_in_either_dtype_and_no_rows_are_alike(module: Any) -> None:
    measure = module("measure")
    config = measure.config_of("3b", True)
    wide, narrow = (
        measure.random_model(config, dtype=dtype, small=True) for dtype in (torch.float32, torch.bfloat16)
    )
    for (name, one), (_, other) in zip(wide.named_parameters(), narrow.named_parameters(), strict=True):
        assert torch.equal(one, other.float()), name
        assert one.ndim < 2 or len(one.unique(dim=0)) == len(one), name
    assert wide.lm_head.weight is wide.model.embed_tokens.weight


def test_model_flops_are_those_of_the_file_s_rule(module: Any) -> None:
    measure = module("measure")
    config = measure.config_of("8b", False)
    # 8.03B parameters, of which the embedding does no product; attention of 1024 at half
    assert measure.model_flops(config, 8_030_261_248, 1024) == pytest.approx(
        6 * (8_030_261_248 - 128256 * 4096) + 6 * 32 * 4096 * 1024
    )


def test_layers_over_the_memory_of_a_few_are_blocks_of_their_own(module: Any) -> None:

    config = module("measure").config_of("120b", True)
    model = module("aliased").aliased_model(config, num_real=2)
    layers = model.model.layers
    weights = [layer.mlp.up_proj.weight for layer in layers]
    assert len({id(weight) for weight in weights}) == len(layers) == 6
    assert [weight.data_ptr() for weight in weights] == [w.data_ptr() for w in weights[:2]] * 3
    engine = attach_plainly(model, precision="bf16", activations="recompute")
    optimizer = engine.adamw(lr=1e-5)
    ids = torch.randint(0, config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    assert engine.forward_backward([{"input_ids": ids, "labels": ids}]).isfinite()
    assert optimizer.step().grad_norm > 0
    whole = sum(layout.working_bytes for layout in engine.host.layouts)
    layer_bytes = sum(layout.working_bytes for layout in engine.host.layouts[:6])
    # two fetches of each layer but those that stay in the two slots, and one of all that is outside
    assert engine.counts.fetch_bytes == whole + layer_bytes * 4 // 6
    engine.detach()
