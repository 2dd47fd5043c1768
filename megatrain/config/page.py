"""The generator of `docs/configuration.md` from the settings themselves."""

from __future__ import annotations

import os
from pathlib import Path

from megatrain.config.aliases import ALIASES
from megatrain.config.keys import config_keys
from megatrain.config.sections.config import Config


def configuration_page() -> str:
    """Return the reference of every setting as Markdown: `docs/configuration.md`."""
    lines = ["# Configuration", "", *_PAGE_INTRODUCTION.split("\n")]
    table = ["| key | value | default | meaning |", "|---|---|---|---|"]
    section = None
    for key in config_keys().values():
        if key.name.rpartition(".")[0] != section:
            section = key.name.rpartition(".")[0]
            title = Config.model_fields[section].annotation.__doc__ if section else "The run directory."
            lines += ["", f"## {section or 'out'}", "", str(title), "", *table]
        cells = (f"`{key.name}`", key.kind.replace("|", "\\|"), f"`{key.default}`", key.description)
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "## Names from the Hugging Face Trainer and TRL",
        "",
        "Read at the top level of a file, or as overrides.",
    ]
    lines += [
        "",
        "| name | key |",
        "|---|---|",
        *(f"| `{alias}` | `{key}` |" for alias, key in ALIASES.items()),
    ]
    return "\n".join([*lines, ""])


def write_configuration_page(path: str | os.PathLike[str] = "docs/configuration.md") -> None:
    """Write `configuration_page`; a test keeps the file in the repository fresh."""
    Path(path).write_text(configuration_page(), encoding="utf-8")


_PAGE_INTRODUCTION = """\
A run is described by a YAML file of sections, by `section.key=value` overrides on the command line, or by
both; overrides win. `megatrain train --help-all` lists the same keys. Paths are relative to the directory
that the command runs in. A value means what it looks like (YAML 1.2): `1e-3` is a number, `no` is text, and
`null` is nothing.

This page is generated from the sections of `megatrain/config`."""
