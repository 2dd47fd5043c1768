"""Ranks take the same step: what decides its program is compared before each one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from itertools import zip_longest

import torch

from megatrain.errors import ConfigError
from megatrain.plan.program.spec import StepSpec
from megatrain.plan.program.visits import Visit
from megatrain.stream.job.ranks import Ranks


class SameStep:
    """Compares a digest of every step among ranks; that of a step like the one before is at hand."""

    def __init__(self, ranks: Ranks) -> None:
        """Begin with no step."""
        self._ranks = ranks
        self._known: tuple[StepSpec, Sequence[Visit], int] | None = None

    def check(self, spec: StepSpec, visits: Sequence[Visit]) -> None:
        """Refuse a step that another rank would take in another way: they would wait for each other.

        Args:
            spec: The specification of the step's program.
            visits: The visits of the whole step; like `spec`, they are not changed afterwards.

        Raises:
            ConfigError: Another rank would; the error is on every rank.
        """
        if self._ranks.size == 1:  # with nobody to compare it with, a digest would be made for nothing
            return
        if self._known is None or self._known[0] is not spec or self._known[1] is not visits:
            digest = hashlib.sha256("\n".join(_lines(spec, visits)).encode()).digest()
            self._known = spec, visits, int.from_bytes(digest[:7], "big")
        found = self._ranks.gather(torch.tensor([self._known[2]]))
        if len({int(one) for one in found}) > 1:
            raise ConfigError(_difference(self._ranks.gather_values(_lines(spec, visits))))


def _lines(spec: StepSpec, visits: Sequence[Visit]) -> list[str]:
    """List what decides a program. Bytes do not, and are each rank's own, as its shares are."""
    names = [field.name for field in fields(spec)]
    return [
        *(f"{name}={getattr(spec, name)}" for name in names if name not in ("sizes", "layers")),
        *(f"block {n}: {size.is_streamed=} {size.is_trained=}" for n, size in enumerate(spec.sizes)),
        *(f"visit {number}: {visit}" for number, visit in enumerate(visits)),
    ]


def _difference(steps: Sequence[list[str]]) -> str:
    """Say in what ranks differ first."""
    first = steps[0]
    rank = next(rank for rank, other in enumerate(steps) if other != first)
    pairs = zip_longest(first, steps[rank], fillvalue="nothing")
    mine, other = next(pair for pair in pairs if pair[0] != pair[1])
    return (
        f"rank {rank} would take another step than rank 0: {other} in place of {mine}; all ranks need the "
        "same settings and versions, and a model whose path does not depend on its data"
    )
