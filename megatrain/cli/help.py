"""Help of commands that take settings, with suggestions for wrong options."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

MOST_USED = (
    "train.epochs",
    "train.micro_batch_size",
    "train.grad_accumulation",
    "optim.schedule",
    "optim.warmup_steps",
    "data.val_size",
    "eval.every",
    "eval.prompts",
    "checkpoint.every",
    "log.to",
)
"""The keys that the short help shows, beside those that have options."""

_WIDTH = 110
_UsageError: Any = typer.BadParameter.__mro__[1]
"""The base of click's usage errors, which some versions of typer bring along under another name."""


_MEANT = {
    "benchmark": "doctor --bench",
    "config": "recipe",
    "convert": "import",
    "env": "doctor",
    "evaluate": "eval",
    "finetune": "train",
    "fit": "train",
    "generate": "sample",
    "infer": "sample",
    "inference": "chat",
    "list": "runs ls",
    "ls": "runs ls",
    "merge": "export --merge",
    "prepare": "data prepare",
    "preprocess": "data prepare",
    "pretrain": "train ... model.init=random",
    "push": "export --push",
    "resume": "train, with the same arguments as before",
    "run": "train",
    "serve": "chat",
    "show": "runs show",
    "test": "eval",
    "tokenize": "data prepare",
    "validate": "train ... --plan-only",
    "webui": "ui",
}
"""The commands of other tools, and the commands here that do the same."""


def _instead_of(name: str) -> str | None:
    """Return the command here that does what another tool's command does; names of objectives count too."""
    from megatrain.objective.registry import DEFAULT, OBJECTIVES

    if name in OBJECTIVES:
        return "train" + ("" if name == DEFAULT.name else f" ... train.loss={name}")
    return _MEANT.get(name)


class Commands(TyperGroup):
    """The group of commands, which suggests a command for an unknown one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the arguments begin with."""
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            if args and (meant := _instead_of(args[0])) is not None:
                error.message = f"No such command '{args[0]}'. Did you mean: megatrain {meant}?"
            raise


class SettingsCommand(TyperCommand):
    """A command whose arguments are settings."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; for an unknown option, suggest the setting that it could be."""
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            wrong = getattr(error, "option_name", None)
            if wrong is not None:
                options = {name for parameter in self.params for name in parameter.opts}
                error.message = f"No such option: {wrong}; {_meant(wrong, options)}"
                error.possibilities = None
            raise

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the most used keys."""
        formatter.write("\n" + "\n".join(_short_list()) + "\n")


def show_all_keys(ctx: typer.Context, wanted: bool) -> None:
    """Print the help, and every key in full."""
    if wanted:
        print(ctx.get_help())
        print("\n" + "\n".join(_whole_list()))
        raise typer.Exit


def _short_list() -> Iterator[str]:
    from megatrain.config import config_keys

    keys = config_keys()
    yield f"Keys that are used most, of {len(keys)}; --help-all shows all of them:"
    for name in MOST_USED:
        first = keys[name].description.split(". ")[0].split("; ")[0].removesuffix(".")
        yield from textwrap.wrap(first, _WIDTH, initial_indent=f"  {name:<26}", subsequent_indent=" " * 28)


def _whole_list() -> Iterator[str]:
    from megatrain.config import config_keys

    yield "Keys of CONFIG and of overrides, with their defaults:"
    for key in config_keys().values():
        yield f"  {key.name} = {key.default}"
        text = f"{key.description} [{key.kind}]"
        yield from textwrap.wrap(text, 104, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _meant(wrong: str, options: set[str]) -> str:
    """Return what an option could have meant: another option, or a setting, which has no dashes."""
    from difflib import get_close_matches

    from megatrain.config.keys import suggested_key

    close = get_close_matches(wrong, options, n=1, cutoff=0.75)
    if close:
        return f"did you mean {close[0]}?"
    key = suggested_key(wrong.lstrip("-").partition("=")[0].replace("-", "_"))
    return "--help lists the options" if key is None else f"did you mean the setting {key}=VALUE (no dashes)?"
