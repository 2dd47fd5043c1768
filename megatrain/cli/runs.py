"""Commands that take a run: `sample`, `export`, `report`, `runs`, `ui`; the run itself is only read."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.importing import importing

runs = typer.Typer(no_args_is_help=True, help="List runs, show one, or compare several.")

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
_Runs = Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run directories, or folders of them.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_to(app: typer.Typer) -> None:
    """Give the command line these commands."""
    app.command()(sample)
    app.command()(export)
    app.command()(report)
    app.command()(ui)
    app.add_typer(runs, name="runs")


def sample(
    path: Annotated[
        str, typer.Argument(metavar="RUN_OR_MODEL", help="Run directory, model directory or hub id.")
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = always the likeliest token.")] = 0.0,
) -> None:
    """Continue a text with a trained model."""
    with importing():
        from megatrain.train.outputs.sample import sample as run

    print(run(path, prompt, max_new_tokens=max_new_tokens, temperature=temperature))


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, or one of its checkpoints.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New or empty directory for the model.")],
    merge: Annotated[bool, typer.Option("--merge", help="Write the base with the adapters in it.")] = False,
    max_shard_size: Annotated[
        str | None, typer.Option(metavar="5GB", help="Split the weights into files of at most this.")
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="REPO", help="Send it to the Hugging Face hub too, as org/name.")
    ] = None,
) -> None:
    """Write the model of a run's newest checkpoint, or its adapters, as Hugging Face and PEFT save them.

    With eval.load_best it is that of the best one, as in hf/ of the run.
    A repository that --push makes is private.
    """
    from megatrain.config.sizes import parse_bytes
    from megatrain.train.outputs.export import export_run
    from megatrain.train.outputs.push import push as send

    shard_bytes = None if max_shard_size is None else parse_bytes(max_shard_size, "--max-shard-size")
    export_run(run, out, merges=merge, max_shard_bytes=shard_bytes)
    print(out if push is None else send(out, push))


def report(
    run: _Run,
    out: Annotated[Path | None, typer.Option(help="File to write; default: report.html in RUN.")] = None,
) -> None:
    """Write one page with everything about a run, which needs no network; of a run that goes on, so far.

    Loss, evaluations, speed, memory by tier, where each step's time went, a timeline of a step, events. Needs
    the extra `report`.
    """
    from megatrain.train.report.page import write_report

    out = run / "report.html" if out is None else out
    write_report(run, out)
    print(out)


def ui(
    run: _Run,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes one that is free.")] = 8642,
) -> None:
    """Show a run on a page that follows it, for this machine alone; Ctrl-C ends it."""
    from megatrain.train.report.serve import RunServer

    with RunServer(run, port) as server, suppress(KeyboardInterrupt):
        print(server.address, flush=True)
        server.serve_forever()


@runs.command("ls")
def runs_ls(
    places: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR]...", help="Run directories, or folders of them; default: runs."),
    ] = None,
    as_json: _Json = False,
) -> None:
    """List runs: state, step, loss, speed."""
    from megatrain.train.report.runs import list_runs

    print(list_runs(places or [Path("runs")], as_json=as_json))


@runs.command("show")
def runs_show(run: _Run, as_json: _Json = False) -> None:
    """Show one run in short: where it is, plan and fact, its last events."""
    from megatrain.train.report.runs import show_run

    print(show_run(run, as_json=as_json))


@runs.command("compare")
def runs_compare(places: _Runs, as_json: _Json = False) -> None:
    """Compare runs: settings that differ, losses at equal tokens, speed."""
    from megatrain.train.report.runs import compare_runs

    print(compare_runs(places, as_json=as_json))
