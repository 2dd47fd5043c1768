"""What every benchmark says besides its figures: the machine, the versions, the commit."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any


def hardware() -> dict[str, Any]:
    """Return the CPU, memory, GPU, library versions and git commit of this run."""
    import torch

    from megatrain.optim.pool import worker_threads

    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": worker_threads(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": metadata.version("numba"),
        "transformers": metadata.version("transformers"),
        "load_average": os.getloadavg()[0],
        "commit": _commit(),
    }


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}


def emit(result: dict[str, Any], out: str | None) -> None:
    """Print the result as one JSON line, the last of the output, and save it to a file if one is named.

    Raises:
        ValueError: A figure is nan or infinite: no benchmark may report that.
    """
    line = json.dumps(result, allow_nan=False)
    if out is not None:
        Path(out).write_text(line + "\n")
    print(line, flush=True)


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)


def _commit() -> str | None:
    """Return the commit, marked if files differ from it; None outside a git checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout
        changed = subprocess.run(
            [*git, "status", "--porcelain"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + ("-dirty" if changed else "")
