"""Links that leave docs/ are of the repository only: on the site they become the path that they name."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace such links in a page."""
    folder = posixpath.dirname("docs/" + page.file.src_uri)

    def path(match: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(folder, match[2].partition("#")[0]))
        text = match[1].strip("`")
        return f"`{place}`" if text in place else f"{match[1]} (`{place}`)"

    return _OUTSIDE.sub(path, markdown)
