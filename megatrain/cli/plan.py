"""The commands `plan` and `inspect`: the needs of a run on a machine, and what it would make of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from megatrain.cli.help import SettingsCommand
from megatrain.cli.importing import importing
from megatrain.cli.log import showing
from megatrain.cli.machine import caller, planned_machine
from megatrain.cli.settings import given_settings
from megatrain.errors import CapacityError, ConfigError
from megatrain.recipes import place, shapes

if TYPE_CHECKING:
    from megatrain.hardware import HardwareSpec
    from megatrain.train.caller import Caller
    from megatrain.train.planning.asking import OwnMachine


def add_to(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command(cls=SettingsCommand)(plan)
    app.command()(inspect)


def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model directory or hub id.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what of a model would be trained, frozen, kept and exported, and how its files are quantised.

    Its configuration, the headers of its files and its tokenizer are read, and no weight.
    """
    with showing("inspect") as doing:
        doing("loading torch and transformers")
        with importing():
            from megatrain.train.commands.inspect_model import inspect_model

        found = inspect_model(model)
    print(json.dumps(found.json()) if as_json else "\n".join(found.lines()))


def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONFIG | section.key=value", help="As of train; data may be missing."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model directory or hub id (model.path).")] = None,
    hf_config: Annotated[
        str | None,
        typer.Option(metavar="FILE|NAME", help="Like a model's config.json, or a bundled shape: llama-8b."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="A bundled machine or a machine file; default: this one."),
    ] = None,
    ram: Annotated[str | None, typer.Option(metavar="1536GiB", help="Host memory of the machine.")] = None,
    nvme: Annotated[
        str | None, typer.Option(metavar="8TB|0", help="Free space on its drives; 0: none.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of each node that train together; default: all.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Machines like this one that train together.")
    ] = None,
    scale: Annotated[
        bool, typer.Option("--scale", help="Plan for 1 to 1,024 GPUs, each with the same tokens per step.")
    ] = False,
    longest: Annotated[
        bool, typer.Option("--longest", help="Find the longest row that fits, and what is in its way.")
    ] = False,
    tokens_per_step: Annotated[int | None, typer.Option(help="(train.tokens_per_step)")] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="20B", help="Tokens to train on, also 2e9; default: 1B.")
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(min=0, max=1e9, help="Dollars per hour; default: rent, or price over 3 years."),
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence (data.seq_len).")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="(train.micro_batch_size)")] = None,
    grad_accumulation: Annotated[int | None, typer.Option(help="(train.grad_accumulation)")] = None,
    precision: Annotated[str | None, typer.Option(metavar="fp32|bf16", help="(train.precision)")] = None,
    clip: Annotated[
        bool | None, typer.Option("--clip/--no-clip", help="Clip gradients (optim.max_grad_norm).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say why, and what would be faster.")] = False,
) -> None:
    """Say whether a run fits a machine, how fast it is and what it costs.

    It exits with 3 if the run does not fit, in memory or on the disk, and with 9 if it wears out a drive.

    No GPU is needed. Settings that are not given are as train has them, and the rest is chosen. Data that are
    on this machine are tokenised, so that the plan is that of the run; without them it is of a long one.
    """
    flags = {
        "model.path": model,
        "data.seq_len": seq_len,
        "train.tokens_per_step": tokens_per_step,
        "train.micro_batch_size": micro_batch_size,
        "train.grad_accumulation": grad_accumulation,
        "train.precision": precision,
    }
    clips = [] if clip is None else [f"optim.max_grad_norm={1.0 if clip else 'null'}"]
    from megatrain.config.sizes import parse_tokens

    raw, source = given_settings([*(arguments or []), *clips], flags)
    shape = None if hf_config is None else Path(place(hf_config, shapes()))
    asked: dict[str, Any] = {"source": source, "hf_config": shape}
    num_tokens = None if tokens is None else parse_tokens(tokens)
    if longest:
        refused = {"--scale": scale, "--explain": explain, "--seq-len": seq_len is not None}
        if excluded := [name for name, is_given in refused.items() if is_given]:
            raise ConfigError(f"--longest does not go with {' and '.join(excluded)}; leave it out")
    with showing("plan") as progress:
        asking = caller(progress, measures=False)
        if scale:
            from megatrain.train.planning.scale import plan_scale, scale_report

            found = plan_scale(raw, planned_machine(machine, ram, nvme, gpus=gpus), caller=asking, **asked)
            print(scale_report(found, as_json=as_json))
            raise typer.Exit(0 if found.fits else CapacityError.exit_code)
        whole = planned_machine(machine, ram, nvme, gpus=gpus, nodes=nodes)
        if longest:
            from megatrain.train.planning.longest.find import find_longest
            from megatrain.train.planning.longest.report import longest_report

            row = find_longest(raw, whole, tokens=num_tokens, caller=asking, **asked)
            print(longest_report(row, price_per_hour_usd=price_per_hour, as_json=as_json))
            raise typer.Exit(row.planned.verdict.exit_code)
        shown = {"price_per_hour_usd": price_per_hour, "as_json": as_json, "explains": explain}
        print_plan(raw, whole, asking, shown=shown, tokens=num_tokens, **asked)


def print_plan(
    raw: Mapping[str, Any],
    machine: HardwareSpec | OwnMachine,
    caller: Caller,
    *,
    shown: Mapping[str, Any],
    **asked: Any,
) -> NoReturn:
    """Plan a run, print the plan, and end with the code of its verdict.

    Args:
        raw: The settings as nested keys.
        machine: The machine to plan for.
        caller: The folders that are kept between plans, and the function that shows progress.
        shown: The further arguments of `report`.
        asked: The further arguments of `plan_run`.
    """
    from megatrain.train.planning.plan_report import report
    from megatrain.train.planning.plan_run import plan_run
    from megatrain.train.planning.space import require_space

    planned = plan_run(raw, machine, caller=caller, **asked)
    print(report(planned, progress=caller.progress, **shown))
    require_space(planned.space)
    raise typer.Exit(planned.verdict.exit_code)  # the report has said why, and what would help
