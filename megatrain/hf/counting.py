"""Detection of trainers whose methods count micro-batches, such as those of TRL that generate.

In lockstep all micro-batches of a step begin before the first one ends, the last one first. A method that
decides by a number which each call leaves to the next one then silently finds the wrong number: GRPO would
train on other completions than it has generated. So these trainers pass micro-batches one by one.
"""

from __future__ import annotations

import dis
import inspect
import logging
from collections.abc import Iterator
from dataclasses import replace
from types import CodeType
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from megatrain.errors import ConfigError
from megatrain.hf.arguments import MegatrainArguments
from megatrain.hf.batches.metric_traces import COUNT

if TYPE_CHECKING:
    from megatrain.distributed.alone import Alone
    from megatrain.distributed.ranks import Ranks

_log = logging.getLogger(__name__)

_OF_A_CALL = ("training_step", "compute_loss", "prediction_step", "_prepare_inputs", "_prepare_input")
"""The methods of a trainer that each micro-batch passes."""


def what_counts(kind: type) -> str | None:
    """Name the state that a trainer's methods carry from one micro-batch to the next; None if there is none.

    An attribute that is only written, or only added to, decides nothing. TRL's number of tokens is put in
    order by `Traces`.

    Args:
        kind: The trainer's class. Methods of transformers' Trainer and of this package are known, and
            attributes that the class keeps in order itself (`_in_order`) are left out.
    """
    homes: dict[str, str] = {}
    read: set[str] = set()
    for base in kind.__mro__[: kind.__mro__.index(Trainer)]:
        if base.__module__.partition(".")[0] == "megatrain":
            continue
        for name in _OF_A_CALL:
            for code in _codes(inspect.unwrap(vars(base).get(name, len))):
                sets, looks_at = _of_self(code)
                read |= looks_at
                for attribute in sets:
                    homes.setdefault(attribute, f"{base.__name__}.{name}")
    found = [name for name in homes if name in read and name not in (COUNT, *getattr(kind, "_in_order", ()))]
    return f"{homes[found[0]]} sets {found[0]}" if found else None


def one_by_one(asked: MegatrainArguments, why: str, ranks: Ranks | Alone) -> MegatrainArguments:
    """Return the arguments with which a trainer that counts micro-batches streams them one after the other.

    Args:
        asked: The user's arguments.
        why: The reason that `what_counts` returns.
        ranks: The ranks that train together.

    Raises:
        ConfigError: The arguments ask for something else.
    """
    lockstep = asked.choice.given.get("lockstep", 1)
    if max(lockstep, ranks.size, asked.shards or 1) > 1:
        what = f"lockstep={lockstep}" if lockstep > 1 else "several processes or shards"
        raise ConfigError(
            f"{why}, by which the next micro-batch is chosen, so the micro-batches of a step cannot be run "
            f"with {what}: they would be trained on other data than the plain class has; use one process, "
            "and MegatrainArguments(choice=Choice(lockstep=1)) or no choice"
        )
    _log.warning("%s, by which the next micro-batch is chosen: they pass the model one after the other", why)
    return replace(asked, choice=replace(asked.choice, lockstep=1))


def require_one_by_one(lockstep: int, why: str | None) -> None:
    """Refuse a model that is attached already, with micro-batches in lockstep.

    Raises:
        ConfigError: The trainer counts micro-batches.
    """
    if why is not None and lockstep > 1:
        raise ConfigError(
            f"{why}, by which the next micro-batch is chosen, but the model was attached with "
            f"lockstep={lockstep}; attach it with lockstep=1"
        )


def _of_self(code: CodeType) -> tuple[list[str], set[str]]:
    """Return the attributes of `self` that a code object sets, adding included, and those that it reads."""
    sets: list[str] = []
    looks_at: set[str] = set()
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    is_self = [instruction.argrepr.split(", ")[-1] == "self" for instruction in instructions]
    for place, instruction in enumerate(instructions[1:], start=1):
        is_load = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
        adds = is_load and instructions[place - 1].opname in ("COPY", "DUP_TOP") and is_self[place - 2]
        if adds or (instruction.opname == "STORE_ATTR" and is_self[place - 1]):
            sets.append(instruction.argval)
        elif is_load and is_self[place - 1]:
            looks_at.add(instruction.argval)
    return sets, looks_at


def _codes(function: Any) -> Iterator[CodeType]:
    """Yield the code of a function, and of those inside it."""
    waiting = [function.__code__] if hasattr(function, "__code__") else []
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
