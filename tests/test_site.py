"""The documentation builds as a site without a warning, and asks nothing of a network."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ASKED = re.compile(r"""<(?:script|link|img|iframe|source)[^>]+?(?:src|href)=["']?(?:https?:)?//[^"'>]*""")
"""What a browser fetches as soon as a page opens."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed (the extra docs)")
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def test_every_page_is_there_and_in_the_menu(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert {path.stem for path in site.glob("*.html")} == pages | {"404"}
    menu = (site / "index.html").read_text()
    assert [name for name in pages if f'href="{name}.html"' not in menu] == []


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    asked = {
        (page.name, found)
        for page in site.glob("*.html")
        for found in ASKED.findall(page.read_text())
        if 'rel="canonical"' not in found
    }
    assert not asked
    assert "fonts.googleapis" not in "".join(path.read_text() for path in site.rglob("*.css"))


def test_pictures_are_drawn_and_links_out_of_the_pages_become_paths(site: Path) -> None:
    text = (site / "how-it-works.html").read_text()
    for name in re.findall(r'<img[^>]+src="([^"]+)"', text):
        assert (site / name).is_file(), name
    assert "pictures/step.svg" in text
    assert "<code>README.md</code>" in (site / "index.html").read_text()
    assert not [page.name for page in site.glob("*.html") if re.search(r'href="\.\./', page.read_text())]
