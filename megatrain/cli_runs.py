"""Commands that look at runs: `report`, `runs`, `ui`; they only read, but for the report's file."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

runs = typer.Typer(no_args_is_help=True, help="List runs, show one, or compare several.")

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
_Runs = Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run directories, or folders of them.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_to(app: typer.Typer) -> None:
    """Give the command line these commands."""
    app.command()(report)
    app.command()(ui)
    app.add_typer(runs, name="runs")


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
