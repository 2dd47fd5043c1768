"""Commands about configuration files: `import`, `recipe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def add_to(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command("import")(import_)
    app.command()(recipe)


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Training YAML of LLaMA-Factory or axolotl.")],
    out: Annotated[Path | None, typer.Option(help="New file for it; default: print it.")] = None,
) -> None:
    """Turn a training file of LLaMA-Factory or axolotl into one of megatrain, and list what was left out."""
    from megatrain.config.foreign.importing import import_file
    from megatrain.errors import OutputError, os_errors

    imported = import_file(file)
    text = imported.yaml(file.name)
    if out is None:
        print(text, end="")
        return
    if out.exists():
        raise OutputError(f"{out} is there already; give a new file with --out")
    with os_errors("write", out):
        out.write_text(text, encoding="utf-8")
    for line in imported.left_out:
        print(f"left out: {line}")
    print(out)


def recipe(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Of a recipe; without it, all are listed.")
    ] = None,
) -> None:
    """Print a bundled configuration, to be changed: `megatrain recipe finetune > my.yaml`.

    Train and plan take the name of one in the place of a CONFIG. Shapes of models, as llama-8b, and files for
    clusters, as slurm.sh, have names too.
    """
    from megatrain.recipes import bundled, described, find, shapes

    if name is not None:
        print(find(name, bundled()).read_text(encoding="utf-8"), end="")
        return
    for each, line in described():
        print(f"{each:<16} {line}")
    print(f"\nshapes of models, for plan --hf-config: {', '.join(shapes())}")
