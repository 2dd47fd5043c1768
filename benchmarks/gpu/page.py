"""The gates of `suite.py`, and its report in Markdown from the JSON of its steps."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Results = dict[str, dict[str, Any]]

NOMINAL_BF16_FLOPS = {"H200": 989.5e12, "H100": 989.5e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16 peaks that vendors state, FLOP/s, by a part of the device's name."""


# -- gates -------------------------------------------------------------------------------------------------


def gates(results: Results) -> list[dict[str, Any]]:
    """Hold the figures against their aims; a value is None where a figure is missing."""
    small = best(results, "8b_32k")
    large = most(best(results, "8b_128k"), best(results, "8b_512k"))
    peaks = (best(results, cell, "of_matmul_peak") for cell in ("8b_32k", "8b_128k", "8b_512k", "8b_seq8k"))
    theirs = rate(results, "3b_deepspeed", tokens="small")
    return [
        gate("8B, 1k: tokens/s", 13_000, most(small, large)),
        gate("8B, 8k: tokens/s", 11_400, best(results, "8b_seq8k")),
        gate("8B, 32k tokens a step, of the large-batch rate", 0.90, over(small, large)),
        gate("8B: of the measured matmul peak", 0.60, most(*peaks)),
        gate("8B in 24 GB, of unlimited", 0.80, over(rate(results, "8b_24gb", label="24 GB"), small)),
        gate("8B in 80 GB, of unlimited", 0.80, over(rate(results, "8b_80gb", label="80 GB"), small)),
        gate(
            "3B, 8k tokens a step, over DeepSpeed ZeRO-3: policies auto",
            1.84,
            over(rate(results, "3b_ours", label="auto", tokens="small"), theirs),
        ),
        gate(
            "3B, 8k tokens a step, over DeepSpeed ZeRO-3: everything streamed",
            1.84,
            over(rate(results, "3b_ours", label="streamed", tokens="small"), theirs),
        ),
    ]


def gate(what: str, aim: float, found: float | None) -> dict[str, Any]:
    """Return one gate."""
    return {"what": what, "aim": aim, "value": found, "is_met": None if found is None else found >= aim}


def rows_of(results: Results, cell: str) -> list[dict[str, Any]]:
    """Return the runs of a cell that were measured."""
    return [row for row in results.get(cell, {}).get("runs", []) if "tokens_per_s" in row]


def value(results: Results, cell: str, key: str, label: str | None = None, tokens: str = "") -> float | None:
    """Return a figure of a cell's run: the first of that label, of the smallest step if asked for."""
    rows = [row for row in rows_of(results, cell) if label is None or row.get("label") == label]
    if tokens == "small" and rows:
        least = min(row["tokens_per_step"] for row in rows_of(results, cell))
        rows = [row for row in rows if row["tokens_per_step"] == least]
    return float(rows[0][key]) if rows else None


def best(results: Results, cell: str, key: str = "tokens_per_s") -> float | None:
    """Return the largest figure among a cell's runs."""
    return most(*(float(row[key]) for row in rows_of(results, cell)))


def rate(results: Results, cell: str, label: str | None = None, tokens: str = "") -> float | None:
    """Return a run's tokens/s."""
    return value(results, cell, "tokens_per_s", label, tokens)


def over(one: float | None, other: float | None) -> float | None:
    """Return a ratio, where both sides are there."""
    return None if one is None or not other else one / other


def most(*values: float | None) -> float | None:
    """Return the largest that is there."""
    return max((found for found in values if found is not None), default=None)


# -- the report --------------------------------------------------------------------------------------------


def read_all(paths: Iterable[Path]) -> Results:
    """Read the results in directories (or `suite.json` files); of a step, the last that is `ok` counts."""
    results: Results = {}
    for path in paths:
        found: Results = {}
        whole = path if path.is_file() else path / "suite.json"
        if whole.exists():
            found.update(json.loads(whole.read_text())["steps"])
        if path.is_dir():
            for file in path.glob("*.json"):
                if file.name != "suite.json":
                    found[file.stem] = json.loads(file.read_text())
        for step, result in found.items():
            if result["status"] == "ok" or results.get(step, {}).get("status") != "ok":
                results[step] = result
    return results


def write_report(results: Results, steps: Sequence[str], folder: Path) -> Path:
    """Write `<date>-<gpu>.md`, and return its path."""
    hardware = results.get("environment", {}).get("hardware", {})
    name = re.sub(r"[^a-z0-9]+", "-", (hardware.get("gpu") or "cpu dry run").lower()).strip("-")
    today = datetime.date.today().isoformat()
    path = folder / f"{today}-{name}.md"
    parts = [
        f"# {hardware.get('gpu') or 'Dry run on the CPU'}, {today}",
        "`python -m benchmarks.gpu.suite --out DIR`, then `--report DIR`. Model FLOPs are 6 x (parameters "
        "without the embedding, with the head) per token plus causal attention at half; what is recomputed "
        "does not count. A step's time is the median, with [min, max].",
        *hardware_part(results),
        *gates_part(results),
        *cells_part(results),
        *correctness_part(results),
        *rates_part(results),
        *missing_part(results, steps),
    ]
    path.write_text("\n\n".join(parts) + "\n")
    return path


def hardware_part(results: Results) -> list[str]:
    """Say what it ran on."""
    environment = results.get("environment", {})
    hardware = environment.get("hardware")
    if hardware is None:
        return ["## Hardware", "The step `environment` has no result."]
    lines = [
        f"- {hardware['gpu'] or 'no GPU'}, {gigabytes(environment.get('total_bytes'))} of device memory",
        f"- {hardware['cpu']}, {hardware['cores']} cores, {gigabytes(hardware['ram_bytes'])} of memory, "
        f"{gigabytes(environment.get('host_available_bytes'))} available "
        f"({environment.get('host_limit_source', 'not known')})",
        f"- Python {hardware['python']}, torch {hardware['torch']}, transformers {hardware['transformers']}, "
        f"CUDA {environment.get('cuda')}",
        f"- commit {hardware['commit']}",
    ]
    return ["## Hardware", "\n".join(lines)]


def gates_part(results: Results) -> list[str]:
    """Say what was aimed at, and what was found."""
    words = {True: "met", False: "missed", None: "not measured"}
    rows = [
        [found["what"], number(found["aim"]), number(found["value"]), words[found["is_met"]]]
        for found in gates(results)
    ]
    return ["## Gates", table(["", "aim", "found", ""], rows)]


def cells_part(results: Results) -> list[str]:
    """Make the table of all runs, and list what memory refused."""
    header = ["cell", "tokens/step", "tokens/s", "step s", "TFLOP/s", "of peak", "device GB", "host GB",
              "moved GB/step", "policies", "bound"]  # fmt: skip
    rows, notes = [], []
    for cell, result in results.items():
        for row in result.get("runs", []):
            name = f"{cell} {row['label']}".strip() if row.get("label") not in (None, cell) else cell
            if "refused" in row:
                notes.append(f"- {name}: {row['refused']} was refused: {row['error'][:160]}")
            elif "tokens_per_s" in row:
                rows.append([name, *run_columns(row)])
        for key in ("note", "of_unlimited_same_policies", "of_shallow", "scaled_tokens_per_s", "version"):
            if key in result:
                notes.append(f"- {cell}: {key} {result[key]}")
    text = table(header, rows) if rows else "No cell has a result."
    return ["## Cells", text, *(["\n".join(notes)] if notes else [])]


def run_columns(row: dict[str, Any]) -> list[str]:
    """Return the columns of one run."""
    step = row["step_s"]
    policies = row.get("policies", {})
    taken = ", ".join(
        part
        for part in (
            policies.get("activations"),
            f"{policies['residents']} resident blocks" if policies.get("residents") else None,
            f"lockstep {policies['lockstep']}" if policies.get("lockstep", 1) > 1 else None,
            "boundaries on the host" if policies.get("boundaries_on_host") else None,
            "compiled" if policies.get("compiles") else None,
        )
        if part
    )
    return [
        f"{row['tokens_per_step']:,} x {row['seq_len']}",
        number(row["tokens_per_s"]),
        f"{step['median']:.2f} [{step['min']:.2f}, {step['max']:.2f}]",
        f"{row['model_flops_per_s'] / 1e12:.0f}",
        f"{row['of_matmul_peak']:.0%}",
        gigabytes(row.get("device_bytes_peak"), unit=""),
        gigabytes(row["host_rss_bytes_peak"], unit=""),
        gigabytes(row.get("bytes_moved_per_step"), unit=""),
        taken,
        row.get("bound", ""),
    ]


def correctness_part(results: Results) -> list[str]:
    """Say in a line each what the checks found."""
    lines = []
    if "num_cases" in (parity := results.get("parity", {})):
        apart = [name for name, group in parity["groups"].items() if group["results"] > 1]
        lines.append(
            f"- parity: {parity['num_bitwise']} of {parity['num_cases']} cases are equal to resident "
            f"training bit for bit; {parity['status']}; groups in which settings give different bits: "
            f"{', '.join(apart) or 'none'}"
        )
    for case in results.get("attention", {}).get("cases", []):
        way = "deterministic" if case["is_deterministic"] else "default"
        lines.append(
            f"- attention, {way}, seq {case['seq_len']:,}: {case['kernel']}; differs from itself by "
            f"{case['largest_difference_when_repeated']:.1e} and from resident training by "
            f"{case['largest_difference_to_resident']:.1e} of the largest gradient"
        )
    for row in results.get("head", {}).get("ways", []):
        lines.append(
            f"- head and loss, {row['way']}: {1e3 * row['seconds']:.1f} ms for "
            f"{results['head']['tokens']:,} tokens, gradients within {max(row['errors'][1:]):.1e} of the "
            f"largest one in fp32"
        )
    for step in ("device_adamw", "compiled"):
        if cases := results.get(step, {}).get("cases"):
            equal = sum(bool(case.get("is_bitwise", case.get("is_ok"))) for case in cases)
            lines.append(f"- {step}: {equal} of {len(cases)} cases are equal; {results[step]['status']}")
    if runs := results.get("races", {}).get("runs"):
        differing = sum(bool(run["differing"]) for run in runs)
        lines.append(f"- races: {differing} of {len(runs)} delayed runs differ; {results['races']['status']}")
    if "num_launching" in (syncs := results.get("syncs", {})):
        lines.append(
            f"- syncs: the launching thread waited for the device at {syncs['num_launching']} places inside "
            f"steps, other threads at {syncs['num_elsewhere']}"
        )
        for call in syncs.get("calls", []):
            if call["is_launching"]:
                lines.append(f"  - {call['what']} at {' < '.join(reversed(call['stack'][-3:]))}")
    return ["## Correctness", "\n".join(lines) or "No check has a result."]


def rates_part(results: Results) -> list[str]:
    """Say what the machine can do."""
    rates = results.get("rates", {})
    if "matmul_flops" not in rates:
        return []
    gpu = results.get("environment", {}).get("hardware", {}).get("gpu") or ""
    nominal = next((flops for part, flops in NOMINAL_BF16_FLOPS.items() if part in gpu), None)
    lines = [f"- bf16 matmul: {rates['matmul_flops'] / 1e12:.0f} TFLOP/s"]
    if nominal:
        lines[0] += f", {rates['matmul_flops'] / nominal:.0%} of what the vendor states"
    lines += [f"- {name}: {rate / 1e9:.1f} GB/s" for name, rate in rates.get("copy_bytes_per_s", {}).items()]
    if "both_ways_bytes_per_s" in rates:
        lines.append(f"- both ways at once: {rates['both_ways_bytes_per_s'] / 1e9:.1f} GB/s together")
    for row in rates.get("attention", []):
        found = f"{row['flops_per_s'] / 1e12:.1f} TFLOP/s" if "flops_per_s" in row else row["error"][:80]
        lines.append(f"- attention of {row['seq_len']}, {row['backend']}, forward and backward: {found}")
    for row in rates.get("adamw", []):
        billions = row["parameters_per_s"] / 1e9
        lines.append(f"- AdamW on the host, {row['threads']} threads: {billions:.2f}e9 parameters/s")
    return ["## Rates", "\n".join(lines)]


def missing_part(results: Results, steps: Sequence[str]) -> list[str]:
    """Say of every step that has no full result why."""
    lines = []
    for step in steps:
        result = results.get(step, {"status": "not run"})
        if result["status"] != "ok":
            error = f": {result['error'][:300]}" if "error" in result else ""
            lines.append(f"- {step}: {result['status']}{error}")
    return ["## Missing", "\n".join(lines) or "Nothing: every step ended as it should."]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Make a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(found: float | None) -> str:
    """Write a rate without, a ratio with two decimals."""
    if found is None:
        return ""
    return f"{found:,.0f}" if found >= 100 else f"{found:.2f}"


def gigabytes(nbytes: float | None, unit: str = " GB") -> str:
    """Write bytes as 1e9."""
    return "" if nbytes is None else f"{nbytes / 1e9:.1f}{unit}"
