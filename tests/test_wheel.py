"""What is installed from a wheel is all of the package, and works where there is no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from tests.train.project import write_corpus, write_model_config

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of a copy, since setuptools writes into what it builds."""
    place = tmp_path_factory.mktemp("wheel")
    copytree(ROOT / "megatrain", place / "source/megatrain", ignore=ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (place / "source" / name).write_bytes((ROOT / name).read_bytes())
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(place), str(place / "source")]
    subprocess.run([*PIP, *build], check=True)
    (found,) = place.glob("*.whl")
    return found


def test_a_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "megatrain"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode != 0:
        pytest.skip("this is no checkout of git: what belongs into the package is not known")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("megatrain/")}
    there = {name for name in tracked.stdout.splitlines() if (ROOT / name).exists()}
    assert packed == there


def test_a_wheel_trains_from_a_recipe_outside_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    alone = ["install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([*PIP, *alone], check=True)
    environment = os.environ | {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def megatrain(*words: str) -> str:
        command = [sys.executable, "-m", "megatrain", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    recipe = megatrain("recipe", "pretrain")
    assert recipe == (ROOT / "megatrain/recipes/pretrain.yaml").read_text()
    (tmp_path / "my.yaml").write_text(recipe)
    write_model_config(tmp_path / "DIR")
    write_corpus(tmp_path / "my.txt", 600)
    given = ["model.path=DIR", "data.path=my.txt", "data.seq_len=32", "train.steps=1", "optim.warmup_steps=0"]
    given += ["train.micro_batch_size=1", "memory.activations=recompute"]  # nothing to look for long
    megatrain("train", "my.yaml", *given, "out=run")
    assert (tmp_path / "run/hf/model.safetensors").is_file()
    assert "</html>" in (tmp_path / "run/report.html").read_text()
