"""A process of a run that is killed once: when it has saved its fourth step."""

from __future__ import annotations

import os
from pathlib import Path

_SCRIPT = """
import os, signal
rename, mark = os.rename, os.environ["MARK"]
def renamed(source, target, *more):
    rename(source, target, *more)
    if str(target).endswith("step-00000004") and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
os.rename = renamed
"""


def killed_once(place: Path, python_path: str) -> dict[str, str]:
    """Return what the environment of a command has to have for that.

    Args:
        place: A directory for what it needs.
        python_path: The value that `PYTHONPATH` would have.
    """
    (place / "sitecustomize.py").write_text(_SCRIPT)
    return {"PYTHONPATH": os.pathsep.join([str(place), python_path]), "MARK": str(place / "mark")}
