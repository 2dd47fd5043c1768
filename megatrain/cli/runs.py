"""Commands that only read a run: `sample`, `chat`, `eval`, `export`, `verify`, `report`, `runs`, `ui`."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.importing import importing

runs = typer.Typer(no_args_is_help=True, help="List runs, show one, or compare several.")

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
_Runs = Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run directories, or folders of them.")]
_Model = Annotated[
    str, typer.Argument(metavar="RUN_OR_MODEL", help="Run directory, model directory or hub id.")
]
_Temperature = Annotated[float, typer.Option(min=0.0, help="0 = always the likeliest token.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_to(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command()(sample)
    app.command()(chat)
    app.command("eval")(eval_)
    app.command()(export)
    app.command()(verify)
    app.command()(report)
    app.command()(ui)
    app.add_typer(runs, name="runs")


def sample(
    path: _Model,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 100,
    temperature: _Temperature = 0.0,
    as_chat: Annotated[
        bool, typer.Option("--chat", help="Ask it as its chat template does; print the answer.")
    ] = False,
) -> None:
    """Continue a text with a trained model, or with --chat answer it."""
    with importing():
        from megatrain.train.outputs.sample import sample as run

    print(run(path, prompt, max_new_tokens=max_new_tokens, temperature=temperature, chat=as_chat))


def chat(
    path: _Model,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    temperature: _Temperature = 0.0,
    chat_template: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="In the place of the tokenizer's own.")
    ] = None,
) -> None:
    """Talk with a trained model, in the words of its chat template; each line that is read is a turn.

    /clear begins anew, /exit or Ctrl-D ends; Ctrl-C ends an answer. Answers go to standard output.
    """
    with importing():
        from megatrain.train.evaluate.chat import converse
        from megatrain.train.outputs.sample import open_chat

    talk = open_chat(
        path,
        system=system,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        template=chat_template,
    )
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # `ask` reports a turn that is no text
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 - lines can be edited, and earlier ones come back
        print("/clear begins anew, /exit ends", file=sys.stderr)

    def read() -> str | None:
        if not sys.stdin.isatty():
            return sys.stdin.readline() or None
        with suppress(EOFError, KeyboardInterrupt):
            return input("> ")
        return None

    converse(
        talk,
        read,
        show=lambda text: print(text, end="", flush=True),
        say=lambda text: print(text, file=sys.stderr),
    )


def eval_(
    run: _Run,
    data: Annotated[list[str], typer.Option(help="Text, chats or other data; may be repeated.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value]...", help="Overrides of its settings.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Evaluate the model of a run on data, exactly as its training does.

    The newest checkpoint is taken (with eval.load_best, the best one), in the run's settings.
    """
    from megatrain.cli.log import showing
    from megatrain.cli.machine import caller

    with showing("eval") as doing:
        doing.at_once("loading torch and transformers")
        with importing():
            from megatrain.train.commands.evaluate import evaluate_run

        found = evaluate_run(run, data, overrides or [], caller(doing))
    if as_json:
        print(json.dumps({one.name: dict(one.numbers) for one in found}))
        return
    for one in found:
        print(f"{one.name}: {one.describe()}")


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, or one of its checkpoints.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New or empty directory for the model.")],
    merge: Annotated[bool, typer.Option("--merge", help="Write the base with the adapters in it.")] = False,
    max_shard_size: Annotated[
        str | None, typer.Option(metavar="5GB", help="Split the weights into files of at most this.")
    ] = None,
    quantised: Annotated[
        str | None,
        typer.Option("--format", metavar="mxfp4|fp8", help="Quantise it as the checkpoint it began with is."),
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="REPO", help="Send it to the Hugging Face hub too, as org/name.")
    ] = None,
) -> None:
    """Write the model of a run's newest checkpoint, or its adapters, as Hugging Face and PEFT save them.

    With eval.load_best it is that of the best one, as in hf/ of the run.
    A repository that --push makes is private. Weights are in bf16 (of fp32 runs, in fp32), or with --format
    in the files, names and scales of the quantised checkpoint in model.path.
    """
    from megatrain.config.sizes import parse_bytes
    from megatrain.train.outputs.export import export_run
    from megatrain.train.outputs.push import push as send

    shard_bytes = None if max_shard_size is None else parse_bytes(max_shard_size, "--max-shard-size")
    export_run(run, out, merges=merge, max_shard_bytes=shard_bytes, quantised=quantised)
    print(out if push is None else send(out, push))


def verify(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_MODEL", help="Run, checkpoint or model directory.")],
) -> None:
    """Read everything that a run, a checkpoint or a model directory has, and say what is damaged, and where.

    Of a run: all its checkpoints, what is committed on drives, and hf/. A model directory has no digests; its
    headers, sizes and index are compared, and its values must be finite. Nothing is written. Damage ends with
    exit code 2, after all has been read.
    """
    from megatrain.cli.log import showing
    from megatrain.errors import CheckpointError

    with showing("verify") as doing:
        with importing():
            from megatrain.train.commands.verify import verify_path

        damaged, count = [], 0
        for found in verify_path(path, doing):
            print(f"{found.name}: {found.text}", flush=True)
            count += 1
            damaged += [] if found.is_sound else [found]
    if not count:
        print(f"{path}: nothing was saved there yet")
    if damaged:
        raise CheckpointError(
            f"{len(damaged)} of {count} in {path} cannot be trusted; the first is {damaged[0].name}"
        )


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
