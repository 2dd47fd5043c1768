"""Builds the test device once for each version of torch, and keeps it where builds of extensions are kept."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils import cpp_extension

NAME = "megatrain_host_device"
SOURCES = Path(__file__).parent / "native"
_FLAGS = ("-O1", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w")


class NoCompilerError(RuntimeError):
    """There is no C++ compiler here."""


def build() -> Path:
    """Return the shared library, which is compiled if this source was not built for this torch before.

    Raises:
        NoCompilerError: It has to be compiled, and there is no compiler.
        subprocess.CalledProcessError: The compiler failed; it has printed why.
    """
    library = _cache() / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if library.exists():
        return library
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NoCompilerError("the test device is written in C++, and there is no compiler: install g++")
    library.parent.mkdir(parents=True, exist_ok=True)
    made = library.with_suffix(f".{os.getpid()}")  # several processes may build at once
    libraries = Path(torch.__file__).parent / "lib"
    command = [
        compiler,
        *_FLAGS,
        f"-DTORCH_EXTENSION_NAME={NAME}",
        str(SOURCES / "module.cpp"),
        "-o",
        str(made),
    ]
    command += [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
    command += [f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]
    subprocess.run(command, check=True)
    made.replace(library)
    return library


def build_or_skip() -> None:
    """Build it for a test, which is skipped where there is no compiler, but not in continuous integration."""
    import pytest  # benchmarks that run on the device do without it

    try:
        build()
    except NoCompilerError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def _cache() -> Path:
    """Return the folder of this source, this torch and this Python."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {_FLAGS}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    return Path(root) / NAME / digest.hexdigest()[:16]


if __name__ == "__main__":
    try:
        print(build())
    except NoCompilerError as error:
        if os.environ.get("CI"):
            raise
        print(f"{error}; tests of it are skipped")
