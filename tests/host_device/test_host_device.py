"""The lanes of accelerators on a device made of host memory, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.host_device import build
from tests.host_device.on_device.conftest import IN_OWN_PROCESS

ROOT = Path(__file__).parents[2]
AT_LENGTH = (
    "every_pair",
    "every_family",
    "delays",
    "without_a_fault",
    "test_attention",
    "sample_of_settings",
    "test_codes",
    "test_compiled",
    "test_experts",
    "test_ranks",
    "test_runs",
    "test_small_recipes",
    "test_tiles",
    "test_unlocked",
    "test_waits",
    "is_trapped",
)
"""Parts of the full products, which may run at the same time."""


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """Skip where there is no compiler, but not in continuous integration."""
    build.build_or_skip()


def run(*arguments: str) -> None:
    """Run tests of the device in a child, and show what it says if they fail."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--timeout",
        "300",
        *arguments,
    ]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, IN_OWN_PROCESS: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-8000:]


def test_accelerators_on_the_test_device() -> None:
    """In one child, since loading torch and transformers takes as long as many of the tests."""
    run("tests/host_device/on_device")


@pytest.mark.parity
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", AT_LENGTH)
def test_accelerators_on_the_test_device_at_length(part: str) -> None:
    run("-m", "parity", "--timeout", "3000", "-k", part, "tests/host_device/on_device")


def test_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.NoCompilerError, match="there is no compiler: install g"):
        build.build()
