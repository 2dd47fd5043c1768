"""What does it cost to get to the first step? `megatrain train` beside a script that imports the same model.

    python -m benchmarks.training.start_up [--pairs N] [--out FILE]

The script imports torch, the model's class and its tokenizer's, which nobody who trains can do without. The
command trains the same tiny model for a step of 64 tokens, which tells nothing of training. Both are whole
processes, one after the other, in pairs: CPU seconds, user and system, of the script until it ends, and of
the command until its first step has ended; and the seconds until the command has shown its first line. Counts
of the model are kept from the run before, as from a user's second run on; `first_run` is without them.

The result is a table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import emit, hardware

_MODEL = ("LlamaForCausalLM", "PreTrainedTokenizerFast")

_IMPORTS = f"""
import torch
from transformers import {", ".join(_MODEL)}
"""

_COMMAND = """
import json, os, resource, sys
from megatrain.cli import main
from megatrain.cli import commands

def ended(run):
    row = step(run)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print("CPU", used.ru_utime + used.ru_stime, flush=True)
    os._exit(0)

class Importing:
    def __enter__(self):
        self.inner = importing()
        self.inner.__enter__()
    def __exit__(self, *error):
        global step
        self.inner.__exit__(*error)
        from megatrain.train import loop
        step, loop.train_step = loop.train_step, ended

importing, commands.importing = commands.importing, Importing
main(sys.argv[1:])
"""


def main() -> None:
    """Time both and print the result."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--pairs", type=int, default=5, help="after one that is not counted")
    parser.add_argument("--out", help="file to save the JSON line to")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        command = make_command(root)
        first = train_once(root, command)
        pairs = [(imports_cpu_s(), train_once(root, command)) for _ in range(arguments.pairs)]
    above = [run["cpu_s"] - script_s for script_s, run in pairs]
    for (script_s, run), difference in zip(pairs, above, strict=True):
        print(
            f"script {script_s:5.2f} s   command {run['cpu_s']:5.2f} s   above {difference:5.2f} s   "
            f"first line after {run['first_line_s']:4.2f} s"
        )
    emit(
        {
            "benchmark": "start_up",
            "script_cpu_s": [script_s for script_s, _ in pairs],
            "command_cpu_s": [run["cpu_s"] for _, run in pairs],
            "above_cpu_s": above,
            "above_cpu_s_median": statistics.median(above),
            "first_line_s": [run["first_line_s"] for _, run in pairs],
            "first_run": first,
            "hardware": hardware(),
        },
        arguments.out,
    )


def make_command(root: Path) -> list[str]:
    """Write a tiny model and a text, and return the command that trains it for one step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from megatrain.data.tokenizer import train_tokenizer

    text = "one small step for a block, one giant leap through the slots\n" * 200
    (root / "text.txt").write_text(text)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **shape)).save_pretrained(root / "model")
    train_tokenizer([text], 300).save_pretrained(root / "model")
    own = ["--model", str(root / "model"), "--data", str(root / "text.txt"), "--out", str(root / "run")]
    sizes = ["--steps", "1", "--seq-len", "64", "train.micro_batch_size=1", "train.grad_accumulation=1"]
    return [sys.executable, "-c", _COMMAND, "train", *own, *sizes]


def train_once(root: Path, command: list[str]) -> dict[str, float]:
    """Run the command to the end of its first step."""
    shutil.rmtree(root / "run", ignore_errors=True)
    began_s = time.perf_counter()
    places = {"XDG_CACHE_HOME": str(root / "cache")}
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=os.environ | places, **piped) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        first_line_s = time.perf_counter() - began_s
        lines += process.stdout.readlines()
    used = [line.split()[1] for line in lines if line.startswith("CPU ")]
    assert used, "".join(lines)
    return {"cpu_s": float(used[0]), "first_line_s": first_line_s}


def imports_cpu_s() -> float:
    """Return the CPU seconds of the script."""
    program = f"import json, resource\n{_IMPORTS}\nused = resource.getrusage(resource.RUSAGE_SELF)\n"
    program += "print(json.dumps(used.ru_utime + used.ru_stime))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout))


if __name__ == "__main__":
    main()
