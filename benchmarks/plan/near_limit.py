"""Does a run that the plan calls fitting end for want of memory? Random cases near the limit, each a process.

Every case draws a model, a batch and a limit of the process's data (`ulimit -d`) around what its plan needs,
and takes two real steps with `megatrain train --dry-run`. It must end with exit code 0 (it fitted) or 3
(refused before anything was allocated), and never by a signal or for want of memory.

    python -m benchmarks.plan.near_limit [--cases 30] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import emit, hardware

BASE_BYTES = 300 << 20
"""About what the program itself takes of its limit before it plans."""


def draw(chance: random.Random) -> dict:
    """Return a model, a batch, and settings."""
    family = chance.choice(["llama", "qwen2", "gpt2"])
    hidden = chance.choice([128, 256, 384])
    layers = chance.choice([4, 6, 8])
    vocab = chance.choice([1024, 4096])
    if family == "gpt2":
        model = {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_embd": hidden,
            "n_layer": layers,
            "n_head": 8,
            "vocab_size": vocab,
            "n_positions": 1024,
        }
    else:
        model = {
            "model_type": family,
            "architectures": [f"{family.capitalize()}ForCausalLM"],
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": vocab,
            "max_position_embeddings": 1024,
        }
    return {
        "model": model,
        "seq_len": chance.choice([64, 128, 256]),
        "rows": chance.choice([1, 2]),
        "accumulation": chance.choice([1, 2]),
        "precision": chance.choice(["fp32", "bf16"]),
        "device": chance.choice(["cpu", "emulated"]),
        "share": chance.uniform(0.5, 1.6),
    }


def need_bytes(case: dict) -> int:
    """Return roughly what a case takes of host memory when everything is kept."""
    model = case["model"]
    hidden = model.get("hidden_size", model.get("n_embd"))
    layers = model.get("num_hidden_layers", model.get("n_layer"))
    params = layers * 12 * hidden**2 + 2 * hidden * model["vocab_size"]
    tokens = case["rows"] * case["seq_len"] * case["accumulation"]
    return 16 * params + tokens * (layers * 34 * hidden + 3 * model["vocab_size"]) * 4


def run(case: dict, directory: Path) -> dict:
    """Take two steps of a case under its limit."""
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(case["model"]))
    text = directory / "text.txt"
    text.write_text("A line of text to train on, again and again.\n" * 4000)
    limit = BASE_BYTES + (512 << 20) + int(case["share"] * need_bytes(case))
    command = [
        *(sys.executable, "-m", "megatrain", "train", "--dry-run"),
        *("--model", str(model), "--data", str(text), "--device", case["device"]),
        *("--precision", case["precision"], "model.init=random", f"data.seq_len={case['seq_len']}"),
        *("data.vocab_size=512", f"train.micro_batch_size={case['rows']}"),
        f"train.grad_accumulation={case['accumulation']}",
    ]

    def restrict() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=restrict, timeout=300)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return {
        **{name: value for name, value in case.items() if name != "model"},
        "family": case["model"]["model_type"],
        "limit_bytes": limit,
        "exit_code": done.returncode,
        "outcome": {0: "fitted", 3: "refused"}.get(done.returncode, "failed"),
        "message": last[:300] if done.returncode else "",
    }


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    results = []
    for number in range(arguments.cases):
        with tempfile.TemporaryDirectory() as directory:
            result = run(draw(chance), Path(directory))
        results.append(result)
        print(
            f"{number:>3} {result['outcome']:<8} {result['family']:<6} {result['device']:<9} "
            f"{result['limit_bytes'] / 2**20:,.0f} MiB  {result['message']}",
            flush=True,
        )
    counts = {name: sum(r["outcome"] == name for r in results) for name in ("fitted", "refused", "failed")}
    print(counts, flush=True)
    emit(
        {"benchmark": "near_limit", "hardware": hardware(), "counts": counts, "results": results},
        arguments.out,
    )


if __name__ == "__main__":
    main()
