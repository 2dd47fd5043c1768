"""The engine needs none of the packages of the command line and of data: not to import, not to train."""

from __future__ import annotations

import subprocess
import sys
import textwrap

BLOCKED = ("pydantic", "datasets", "pyarrow", "typer", "rich")
PARTS = ("optim", "plan", "layout", "hardware", "store", "model", "checkpoint", "stream", "doctor")
CODE = f"""
    import importlib, pkgutil, sys
    for name in {BLOCKED}:
        sys.modules[name] = None  # importing it raises
    for part in {PARTS}:
        folder = importlib.import_module(f"megatrain.{{part}}")
        for module in pkgutil.walk_packages(folder.__path__, folder.__name__ + "."):
            importlib.import_module(module.name)
    import torch
    from tests.families import FAMILIES
    from tests.reference import attach_plainly, make_batches, make_model
    engine = attach_plainly(make_model(FAMILIES["llama_tied"]()))
    optimizer = engine.adamw(lr=1e-3)
    engine.forward_backward(make_batches(1))
    print(optimizer.step().grad_norm > 0)
"""


def test_the_engine_plans_and_trains_without_packages_of_the_command_line_and_of_data() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CODE)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "True\n"
