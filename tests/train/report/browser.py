"""A headless Chromium, where there is one."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest


@functools.cache
def chromium() -> str | None:
    return next(
        (
            found
            for name in ("chromium", "chromium-browser", "google-chrome")
            if (found := shutil.which(name))
        ),
        None,
    )


needs_browser = pytest.mark.skipif(
    chromium() is None, reason="no Chromium here (Debian's package chromium): pages are not drawn"
)


def drawn(address: str, profile: Path, *, width: int = 1280) -> str:
    """Return the page as it is once its scripts have run, with what they have complained of at the end."""
    program = chromium()
    assert program is not None
    done = subprocess.run(
        [
            program,
            "--headless=new",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nothing comes from a network
            "--enable-logging=stderr",
            "--virtual-time-budget=3000",
            f"--window-size={width},1200",
            f"--user-data-dir={profile}",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            "--dump-dom",
            address,
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout + "\n".join(complaints)
