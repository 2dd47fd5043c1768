"""Compiles `shim.c` once, and arms it in a process that was started with it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("shim.c")


def library() -> Path:
    """Return the compiled shim; made where it is not in the cache.

    Without a C compiler the test is skipped, and fails where the environment says `CI`.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        message = "fault injection needs a C compiler (cc), and there is none"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    digest = hashlib.blake2b(SOURCE.read_bytes(), digest_size=8).hexdigest()
    path = SOURCE.parent / "__pycache__" / f"shim-{digest}.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        made = path.with_suffix(f".{os.getpid()}")
        flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fno-builtin"]
        subprocess.run([compiler, *flags, "-o", str(made), str(SOURCE), "-ldl"], check=True)
        made.rename(path)
    return path


def arm(directory: Path, at: int, number: int, *, always: bool, only: str) -> None:
    """Count calls below a directory from here on, and fail from the one with the index `at`; -1: none.

    With a pattern `only`, the index is that among the calls, written as `name path`, which match it.
    """
    _loaded().fault_arm(os.fsencode(directory), at, number, int(always), os.fsencode(only))


def disarm() -> list[str]:
    """Stop, and return each call as `name path`."""
    shim = _loaded()
    return [os.fsdecode(shim.fault_name(number)) for number in range(shim.fault_disarm())]


def _loaded() -> ctypes.CDLL:
    shim = ctypes.CDLL(None)
    shim.fault_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_char_p]
    shim.fault_disarm.restype = ctypes.c_long
    shim.fault_name.argtypes = [ctypes.c_long]
    shim.fault_name.restype = ctypes.c_char_p
    return shim
