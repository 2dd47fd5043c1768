"""The command line: parse, call the library, print.

Results go to standard output, progress and errors to standard error. Every library module is imported inside
the command that needs it, so that help and usage errors come at once.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from megatrain import __version__
from megatrain.cli import config as config_commands
from megatrain.cli import data as data_commands
from megatrain.cli import plan as plan_commands
from megatrain.cli import runs as run_commands
from megatrain.cli.folders import measured_file
from megatrain.cli.help import Commands, SettingsCommand, show_all_keys
from megatrain.cli.importing import importing
from megatrain.cli.log import log_to_stderr, showing
from megatrain.cli.machine import caller, planned_machine
from megatrain.cli.plan import print_plan
from megatrain.cli.ranks import join_ranks, leave_out_stacks, start_again, start_ranks
from megatrain.cli.settings import given_settings, read_settings
from megatrain.distributed.processes import tell_launcher
from megatrain.errors import ConfigError, RankError, as_ours, is_text
from megatrain.hardware.environment import set_for_runs
from megatrain.recipes import place, recipes

if TYPE_CHECKING:
    from megatrain.config import Config
    from megatrain.hardware import HardwareSpec
    from megatrain.train.planning.asking import OwnMachine

app = typer.Typer(
    name="megatrain",
    cls=Commands,
    help="Train Hugging Face language models exactly, with all state in host memory, streamed to the device.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text is the same in a terminal, a file and a test
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
PROOF = "megatrain-proof.json"
"""The file that `doctor --prove` writes."""
_debug = False


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the code of its outcome.

    typer ends usage errors with 2 and Ctrl-C with 130; an unforeseen error keeps its traceback. An error of
    the operating system from a place without `os_errors` is reported in a sentence here.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    set_for_runs()
    try:
        if (strange := next((each for each in given if not is_text(each)), None)) is not None:
            raise ConfigError(f"{strange!a} is not UTF-8 text; rename the file, or write it otherwise")
        app(args=given, prog_name="megatrain")
    except Exception as error:
        ours = as_ours(error)
        if ours is None:
            raise
        if _debug or os.environ.get("MEGATRAIN_DEBUG"):
            traceback.print_exc()
        if not ours.is_told:
            # `print` ends its line with a second write where Python does not buffer (PYTHONUNBUFFERED), and
            # the lines of ranks that end at the same moment would come apart.
            sys.stderr.write(f"error: {ours}\n")
            sys.stderr.flush()
        tell_launcher(str(ours))
        if ours.exit_code == RankError.exit_code:
            # Python's own exit would take its time, and wait for threads that talk to lost ranks.
            sys.stdout.flush()
            os._exit(ours.exit_code)
        sys.exit(ours.exit_code)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"megatrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks of errors; also MEGATRAIN_DEBUG=1.")
    ] = False,
) -> None:
    global _debug
    _debug = debug
    log_to_stderr()
    if "LOCAL_RANK" in os.environ:
        leave_out_stacks()


@app.command()
def quickstart(
    out: Annotated[
        Path | None, typer.Option(help="Directory for the run; default: a new one under runs/.")
    ] = None,
) -> None:
    """Train a small model from scratch on this machine and check it against plain PyTorch; no download."""
    from megatrain.train.commands.quickstart import quickstart as run

    run(out, print)


@app.command(cls=SettingsCommand)
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONFIG | section.key=value", help="A YAML file, then overrides of its keys."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model directory or hub id (model.path).")] = None,
    data: Annotated[list[str] | None, typer.Option(help="Text file; may be repeated (data.path).")] = None,
    out: Annotated[str | None, typer.Option(help="Run directory (out).")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps (train.steps).")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data (train.epochs).")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence (data.seq_len).")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate (optim.lr).")] = None,
    precision: Annotated[str | None, typer.Option(metavar="fp32|bf16", help="(train.precision)")] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="auto|cpu|cuda|xpu|emulated", help="Where blocks run (train.device)."),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="auto|PATH|no", help="Continue a stopped run (checkpoint.resume).")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "--gpus", min=1, help="Processes that train together, one per GPU."),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(metavar="N", help="Start again after a crash, N times at most."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Compare two steps with it; write nothing.")
    ] = False,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Print the plan of this run, and end.")
    ] = False,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Of --plan-only; default: this machine.")
    ] = None,
    ram: Annotated[str | None, typer.Option(metavar="1536GiB", help="Host memory of --machine.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say also what was measured and planned.")
    ] = False,
    help_all: Annotated[
        bool, typer.Option("--help-all", is_eager=True, callback=show_all_keys, help="Show every setting.")
    ] = False,
) -> None:
    """Train a model from a CONFIG file, from flags, or from both; flags and overrides win.

    The plan is made first, and obeyed; with --plan-only it is printed and nothing is trained, with --dry-run
    it is held against two real steps.

    An argument with "=" in it is an override. A run that was stopped continues with the same command.
    """
    if verbose:
        logging.getLogger("megatrain").setLevel(logging.DEBUG)
    flags = {
        "model.path": model,
        "data.path": data or None,
        "out": out,
        "train.steps": steps,
        "train.epochs": epochs,
        "data.seq_len": seq_len,
        "optim.lr": lr,
        "train.precision": precision,
        "train.device": device,
        "checkpoint.resume": resume,
    }
    from megatrain.config import build_config

    raw, source = given_settings(arguments, flags)
    config = build_config(raw, source=source)
    _check_options(plan_only, dry_run, {"--machine": machine, "--ram": ram})
    if plan_only or not Path(config.out, "config.yaml").exists():  # a finished run needs its data no more
        from megatrain.data.read.files import check_path

        for each in config.data.sources:
            check_path(each.path)
    if plan_only:
        place = planned_machine(machine, ram, gpus=ranks)
        _print_own_plan(raw, source, config, place)
    overrides = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]
    again = [*["--debug"] * _debug, "train", *(arguments or []), *overrides, *["--verbose"] * verbose]
    if ranks is not None and ranks > 1:
        raise typer.Exit(start_ranks(config, ranks, again, dry_run=dry_run, restarts=restarts or 0))
    if restarts is not None:
        raise typer.Exit(start_again(config, again, restarts, {"--dry-run": dry_run}))
    with showing("train") as doing:
        doing.at_once("loading torch and transformers")
        if dry_run:
            with importing():
                from megatrain.train.commands.dry_run import dry_run as try_out

            try_out(config, print, caller(doing))
            return
        with importing():
            from megatrain.train.loop import train as run

        with join_ranks(config, doing) as joined:
            run(config, resume=config.checkpoint.resume, caller=caller(doing), ranks=joined)


def _check_options(plan_only: bool, dry_run: bool, options: Mapping[str, object]) -> None:
    """Refuse options that mean nothing without --plan-only, and --dry-run beside it.

    Raises:
        ConfigError: There is such an option.
    """
    given = [name for name, value in options.items() if value]
    if given and not plan_only:
        raise ConfigError(f"{given[0]} says for what to plan, and this would train; add --plan-only")
    if plan_only and dry_run:
        raise ConfigError("--plan-only takes no step, and --dry-run takes two; keep one")


def _print_own_plan(
    raw: Mapping[str, Any],
    source: str,
    config: Config,
    machine: HardwareSpec | OwnMachine,
) -> NoReturn:
    """Print the plan of a run, which may resume from a checkpoint or its drives, and end with its code."""
    with showing("plan") as doing:
        with importing():
            from megatrain.train.planning.asking import Reads
            from megatrain.train.records.directory import RunDirectory
            from megatrain.train.resume.state_commits import held_by
            from megatrain.train.resume_point import find_checkpoint, point_of

        resume, directory = config.checkpoint.resume, RunDirectory(Path(config.out))
        found = find_checkpoint(directory, resume, digests=False)
        point = point_of(config, directory, found, [held_by(config)] if resume == "auto" else [])
        print_plan(raw, machine, caller(doing), shown={}, source=source, reads=Reads.ALL, point=point)


plan_commands.add_to(app)


@app.command()
def trace(
    path: Annotated[Path, typer.Argument(metavar="RUN|CONFIG", help="Run directory, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value]...", help="Overrides of its keys.")
    ] = None,
    out: Annotated[Path, typer.Option(help="File to write, or to replace.")] = Path("trace.json"),
    steps: Annotated[int, typer.Option(min=1, help="Steps to trace, after one to warm up.")] = 2,
) -> None:
    """Run a few steps and write what each lane did when, for https://ui.perfetto.dev or chrome://tracing.

    The run directory is only read, and what the steps train is not kept. torchrun's ranks share the steps.
    """
    config = read_settings([str(_config_file(path)), *(overrides or [])], {})
    with showing("trace") as doing:
        doing("loading torch and transformers")
        from megatrain.train.commands.trace import describe
        from megatrain.train.commands.trace import trace as run

        with join_ranks(config, doing) as joined:
            reports = run(config, out, steps=steps, caller=caller(doing), ranks=joined)
    if joined.rank == 0:
        print(f"{describe(reports)}\n{out}")


@app.command()
def doctor(
    bench: Annotated[
        bool, typer.Option("--bench", help="Measure rates too, for up to a minute, and keep them.")
    ] = False,
    proves: Annotated[
        bool,
        typer.Option(
            "--prove",
            help="Train for a minute, too: same results in six ways, a step beside its plan; write one file.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 if a check fails.")] = False,
    path: Annotated[Path, typer.Option(help="Directory that runs will write to.")] = Path("."),
    out: Annotated[
        Path | None, typer.Option(help="Machine file to write, for plan --machine; measures (--bench).")
    ] = None,
) -> None:
    """Look at this machine: what is wrong with it for training, and with --bench how fast it is."""
    with showing("doctor") as doing:
        doing("loading torch")
        from megatrain.doctor import examine, keep
        from megatrain.hardware import save_machine

        threads, measures = os.environ.get("OMP_NUM_THREADS"), bench or out is not None
        report = examine(path, omp_num_threads=threads, bench=measures, proves=proves, progress=doing)
        if proves:
            report.save(path / PROOF)
    print(json.dumps(report.json()) if as_json else report.text())
    if proves and not as_json:
        print(f" the proof is in {path / PROOF}: it names no user, host or path; send it with a bug report")
    if report.machine is not None:
        if out is not None:
            save_machine(report.machine, out)
        keep(measured_file(), report.machine, path)
    raise typer.Exit(report.exit_code(strict or proves))


def _config_file(path: Path) -> Path:
    """Return the configuration of a run directory, or the file itself, which may be a bundled recipe."""
    file = path / "config.yaml" if path.is_dir() else Path(place(str(path), recipes()))
    if not file.is_file():
        raise ConfigError(
            f"{path} is neither a run directory (one with a config.yaml) nor a configuration file; give one "
            "of these"
        )
    return file


data_commands.add_to(app)
run_commands.add_to(app)
config_commands.add_to(app)


if __name__ == "__main__":
    main()
