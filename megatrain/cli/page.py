"""The generator of `docs/cli.md` from the commands themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import typer

from megatrain.cli.commands import app

_WIDTH = 100
_INTRODUCTION = """\
# Commands

Results go to standard output, progress and errors to standard error; what each exit code means is in
[training](training.md#exit-codes). `--help` says the same as this page, which is generated from the code. The
keys of CONFIG and of overrides are in [configuration](configuration.md).
"""


def cli_page() -> str:
    """Return the reference of every command as Markdown."""
    root = typer.main.get_command(app)
    context = root.context_class(root, info_name="megatrain", terminal_width=_WIDTH, max_content_width=_WIDTH)
    parts = [_INTRODUCTION]
    for name, text in _commands(root, context):
        parts.append(f"## {name}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def _commands(command: object, context: object) -> Iterator[tuple[str, str]]:
    """Yield the name and the help of each command, with groups taken apart."""
    for name in command.list_commands(context):  # type: ignore[attr-defined]
        inner = command.get_command(context, name)  # type: ignore[attr-defined]
        below = inner.context_class(
            inner, info_name=name, parent=context, terminal_width=_WIDTH, max_content_width=_WIDTH
        )
        if hasattr(inner, "list_commands"):
            yield from _commands(inner, below)
            continue
        inner.epilog = None  # the keys have a page of their own
        text = "\n".join(line.rstrip() for line in inner.get_help(below).strip().splitlines())
        yield below.command_path.removeprefix("megatrain "), text


def write_cli_page(path: str | os.PathLike[str] = "docs/cli.md") -> None:
    """Write `cli_page`; a test keeps the file in the repository fresh."""
    Path(path).write_text(cli_page(), encoding="utf-8")
