"""The check of the record of a run in a checkpoint's manifest, which a stranger may have made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatrain.config.choice import AUTO
from megatrain.errors import CheckpointError, first_line

_MOST_STEPS = 10**8
"""A run of a tenth of a second per step gets there in four months."""
_MOST = 2**62

_Check = Callable[[Any], bool]


def _count(most: int = _MOST) -> _Check:
    return lambda value: type(value) is int and 0 <= value <= most  # JSON's true is a Python int


def _list_of(check: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _or_null(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _is_size(value: Any) -> bool:
    return value == AUTO or _count()(value)


def _are_updates(value: Any) -> bool:
    each = value.values() if isinstance(value, dict) else [value]
    return all(map(_count(_MOST_STEPS), each))


_NEEDED: dict[str, _Check] = {
    "step": _count(_MOST_STEPS),
    "tokens": _count(),
    "skipped": _count(_MOST_STEPS),
    "skipped_in_a_row": _count(_MOST_STEPS),
    "updates": _are_updates,
    "schedule.last_epoch": _count(_MOST_STEPS),
    "data.fingerprint": _is_text,
    "data.epoch": _count(_MOST_STEPS),
    "data.position": _count(),
    "data.seed": _count(),
    "data.shuffle": _is_bool,
    "rng": _is_mapping,
    "config.train.precision": _is_text,
    "config.train.micro_batch_size": _is_size,
    "config.train.grad_accumulation": _is_size,
    "config.data.seq_len": _is_size,
    "config.model": _is_mapping,
    "config.optim": _is_mapping,
    "config.eval": _is_mapping,
}
"""The members that every version has written, by their keys."""
_MAY_BE: dict[str, _Check] = {
    "is_last": _is_bool,
    "targets": _count(),
    "drive_written_bytes": _or_null(_count()),
    "data.day": _or_null(_is_text),
    "evaluation": _is_mapping,
    "evaluation.evaluated_step": _or_null(_count()),
    "evaluation.best_step": _or_null(_count()),
    "evaluation.best_loss": _or_null(_is_number),
    "evaluation.best_set": _or_null(_is_text),
    "evaluation.worse_in_a_row": _count(),
    "evaluation.has_stopped": _is_bool,
    "losses": _list_of(_or_null(_is_number)),
    "last_good": _is_mapping,
    "last_good.saved": _list_of(_count()),
    "last_good.kept": _list_of(_count()),
    "last_good.num_sound_steps": _count(),
    "last_good.has_skipped": _is_bool,
    "last_good.num_healthy": _count(),
    "callbacks": _is_mapping,
    "base": _or_null(_is_text),
    "config.parallel": _is_mapping,
    "config.parallel.shards": _or_null(_count(1024)),
    "config.train.tile_tokens": _or_null(_is_size),
    "config.train.tokens_per_step": _or_null(_is_size),
}
"""Members of some versions."""
_ABSENT = object()


def require_record(meta: Mapping[str, Any], place: Path | str) -> None:
    """Refuse a record in which a member that a run resumes from is missing, or is not what a run writes.

    Args:
        meta: The record, as plain values.
        place: The checkpoint, which the error names.

    Raises:
        CheckpointError: The record is refused; the error names the member.
    """
    for checks, is_needed in ((_NEEDED, True), (_MAY_BE, False)):
        for key, check in checks.items():
            value = _member(meta, key)
            if value is _ABSENT and not is_needed:
                continue
            if value is _ABSENT or not check(value):
                raise _refusal(place, f"it has {'no' if value is _ABSENT else 'a wrong'} {key}")


@contextmanager
def record_refused(place: Path | str) -> Iterator[None]:
    """Turn an error about a member that no check of `require_record` knows into a refusal.

    Raises:
        CheckpointError: The body fails with an error that odd values cause.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _refusal(place, f"{type(error).__name__}: {first_line(error)}") from error


def _refusal(place: Path | str, why: str) -> CheckpointError:
    return CheckpointError(
        f"the record of the run in {place} is not one that megatrain writes ({why}); resume from another "
        "checkpoint"
    )


def _member(meta: Any, key: str) -> Any:
    """Return a member by its key, such as `data.epoch`; what leads there has to be mappings."""
    for part in key.split("."):
        if not isinstance(meta, dict) or part not in meta:
            return _ABSENT
        meta = meta[part]
    return meta
