"""Commands for data: `inspect` shows it, `prepare` tokenises and packs it, `clean` removes prepared data."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.folders import prepared_folder
from megatrain.cli.settings import given_settings, read_settings
from megatrain.config import build_config, set_keys
from megatrain.errors import DataError

data = typer.Typer(no_args_is_help=True, help="Look at data, or prepare it, before training on it.")

_NO_MODEL = "no model is named"

_Model = Annotated[str | None, typer.Option(help="Model directory or hub id (model.path).")]
_Data = Annotated[
    list[str] | None, typer.Option("--data", help="File, directory or hub id; may be repeated (data.path).")
]


def add_to(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.add_typer(data, name="data")


@data.command("inspect")
def data_inspect(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONFIG | section.key=value", help="As of train; the model may be left out."),
    ] = None,
    model: _Model = None,
    path: _Data = None,
    samples: Annotated[int, typer.Option(min=0, help="Examples to show.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    colour: Annotated[
        bool | None,
        typer.Option("--colour/--no-colour", help="Green for what is trained on; default: on a terminal."),
    ] = None,
) -> None:
    """Read data as a run would: rows kept and dropped with reasons, lengths, what is trained on.

    Without a model there are no tokens: lengths are in characters. Nothing is written. Exit code 4 if nothing
    is left to train on.
    """
    raw, source = given_settings(arguments, {"model.path": model, "data.path": path or None})
    named = raw.get("model")
    has_model = isinstance(named, dict) and named.get("path") is not None
    raw = raw if has_model else set_keys(raw, [("model.path", _NO_MODEL)])
    config = build_config(raw, source=source)
    from megatrain.train.commands.inspect import inspect_data

    found = inspect_data(config, has_model=has_model, num_samples=samples)
    if as_json:
        print(json.dumps({name: one.json() for name, one in found.items()}))
    else:
        colour = sys.stdout.isatty() if colour is None else colour
        _print_sets({name: one.lines(colour=colour) for name, one in found.items()})
    if not all(one.is_trainable for one in found.values()):
        raise typer.Exit(DataError.exit_code)


@data.command("prepare")
def data_prepare(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONFIG | section.key=value", help="As of train."),
    ] = None,
    model: _Model = None,
    path: _Data = None,
    cache: Annotated[
        str | None, typer.Option(help="Folder for prepared data, also to be given to train (data.cache).")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes (data.workers).")] = None,
) -> None:
    """Tokenise and pack data now, so that train begins at once; the same files and settings are done once.

    What is prepared is kept by the content of the files, the tokenizer, the chat template and the settings of
    data, in `data.cache` or the user's cache folder. Train finds it there, or prepares it itself.
    """
    flags = {"model.path": model, "data.path": path or None, "data.cache": cache, "data.workers": workers}
    config = read_settings(arguments, flags)
    from megatrain.train.inputs import prepare_data

    _print_sets(prepare_data(config, folder=prepared_folder()))


@data.command("clean")
def data_clean(
    cache: Annotated[str | None, typer.Option(help="Folder of prepared data (data.cache).")] = None,
    unused_days: Annotated[
        float, typer.Option("--unused-days", min=0, help="Keep what was used within so many days.")
    ] = 0.0,
) -> None:
    """Remove prepared data, which train and data prepare make again when it is needed.

    Runs that are under way keep what they read. Beyond data.cache_limit prepared data is removed without this
    command, what was not used for longest first.
    """
    from megatrain.data.cache import remove_unused

    folder = prepared_folder() if cache is None else Path(cache).expanduser()
    removed = remove_unused(folder, 0, for_s=unused_days * 86400)
    print(f"removed {removed.describe() or 'nothing'} from {folder}")


def _print_sets(sets: Mapping[str, Sequence[str]]) -> None:
    """Print lines by set: first the training data, then the evaluation sets by their names."""
    for name, lines in sets.items():
        print("\n".join([*([f"\n{name}:"] if name != "train" else []), *lines]))
