"""`find_longest` plans the longest row with which a model trains on a machine, the other settings as given.

A micro-batch is one row, and a step has as many tokens as the settings say, but at least one row for each of
its runs. Where they leave its tokens open, these are the usual number, or a half, a quarter, ... of it, if
that does not fit. Whether a length fits is asked of the choices that take least memory, so that a length
costs a count of the model, which is kept, and no search; the plan is then that of `megatrain plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from megatrain.config.budgets import ALL
from megatrain.config.choice import AUTO
from megatrain.config.plan import Plan, Pool
from megatrain.config.reading import set_keys
from megatrain.config.tiles import LONGEST_WHOLE
from megatrain.errors import CapacityError, ConfigError, ModelError
from megatrain.hardware import HardwareSpec
from megatrain.model.sequence.range import RowRange
from megatrain.plan.search.choices import least
from megatrain.plan.search.least_memory import fits
from megatrain.plan.search.planner import plan_of
from megatrain.plan.search.remedies import Remedy, list_devices, list_memory, with_ways_out
from megatrain.plan.search.request import Request, pools_of
from megatrain.train.caller import Caller
from megatrain.train.planning.asking import Asked, OwnMachine, Reads, ask, planned_model
from megatrain.train.planning.gpus import of_ranks
from megatrain.train.planning.longest.lengths import MOST, SHORTEST, Lengths, search_lengths
from megatrain.train.planning.plan_run import Planned, plan_run

_MOST_WAYS = 3
"""The ways to longer rows that are named."""

_KEY = "train.micro_batch_size"


@dataclass(frozen=True, slots=True)
class Way:
    """A machine that would take longer rows."""

    seq_len: int
    """The tokens of a row that it takes."""
    text: str
    """What is changed about the machine, as options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Longest:
    """The longest row, its plan, and what is in the way of longer ones."""

    planned: Planned
    """The plan of the longest row."""
    lengths: Lengths
    beyond: Plan | None
    """The plan of the shortest row that does not fit, by the choice that is least over the limits; None:
    every length that may be fits, or longer ones are refused."""
    full: Pool | None
    """The pool that is in the way: the largest of those that grow with the row, in the tier that it is over
    the limit of by most; None as there."""
    rows: RowRange
    """The range of the model with its settings. Rows beyond it are looked at where it has rotary embeddings
    (RoPE), which can be scaled."""
    refused: str = ""
    """Why the model cannot have longer rows with these settings, whatever the machine; empty: it can."""
    ways: tuple[Way, ...] = ()
    """The machines that would take longer rows; there may be none."""

    @property
    def longest(self) -> int:
        """The tokens of the longest row."""
        assert self.lengths.longest is not None
        return self.lengths.longest


def find_longest(
    raw: Mapping[str, Any],
    machine: HardwareSpec | OwnMachine,
    *,
    tokens: int | None = None,
    caller: Caller,
    **given: Any,
) -> Longest:
    """Find the longest row with which a run trains.

    Args:
        raw: The settings as nested keys; `data.seq_len` is what is looked for, and data are not read.
        machine: The machine, as in `ask`; all of its GPUs are ranks.
        tokens: The number of tokens to train on, as in `plan_run`.
        caller: The folders and the progress, as in `ask`.
        given: The other arguments of `ask`.

    Raises:
        CapacityError: Not even a row of `SHORTEST` tokens fits.
        ConfigError: The settings ask for micro-batches of several rows, or `ask` raises it.
    """
    asking = {"caller": caller, "reads": Reads.NONE, "beyond_context": True, **given}
    rows = planned_model(raw, source=given["source"], hf_config=given.get("hf_config"), caller=caller).rows
    most = MOST if rows.rope_type or rows.longest is None else min(rows.longest, MOST)
    question = _Question(raw, machine, min(SHORTEST, most), asking)
    tile_tokens = question.asked.request.batch.tile_tokens
    longest_whole = LONGEST_WHOLE if tile_tokens is None else None
    lengths = search_lengths(question.fits, most=most, longest_whole=longest_whole)
    if lengths.longest is None:
        assert lengths.too_long is not None
        request = question.request(lengths.too_long)
        problem = plan_of(request, least(request)).problem
        step = f"{request.batch.step_tokens:,}"
        sentence = f"not even rows of {lengths.too_long:,} tokens fit, in steps of {step} tokens: {problem}"
        raise CapacityError(with_ways_out(sentence, list(_ways(request))))
    beyond = full = None
    ways: list[Way] = []
    refused = question.refused.get(lengths.too_long or 0, "")
    if lengths.too_long is not None and not refused:
        request, longer = question.request(lengths.too_long), min(2 * lengths.longest, most)
        beyond = plan_of(request, least(request))
        full = _full_pool(beyond, question.request(lengths.longest))
        caller.progress("looking for what longer rows would take")
        ways = [Way(lengths.too_long, way.text) for way in _memory(request)]
        if question.takes(longer):
            ways += [Way(longer, way.text) for way in _ways(question.request(longer))]
    caller.progress(f"planning rows of {lengths.longest:,} tokens")
    machine = question.machine
    planned = plan_run(question.settings(lengths.longest), machine, tokens=tokens, **asking)
    return Longest(
        planned=planned,
        lengths=lengths,
        beyond=beyond,
        full=full,
        rows=rows,
        refused=refused,
        ways=tuple(ways),
    )


def _ways(request: Request) -> Iterator[Remedy]:
    """Yield the machines on which a request fits: with other memory, or else with another device."""
    yield from _memory(request) or islice(list_devices(request), 1)


def _memory(request: Request) -> list[Remedy]:
    return list(islice(list_memory(request), _MOST_WAYS))


def _full_pool(beyond: Plan, request: Request) -> Pool:
    """Return the pool that is in the way of a plan which does not fit.

    Args:
        beyond: The plan.
        request: The request for shorter rows, in which pools that grow with the row are smaller.
    """
    tier = fullest_tier(beyond)
    shorter = {pool.name: pool.nbytes for pool in pools_of(request, beyond.choice) if pool.tier == tier}
    pools = [pool for pool in beyond.pools if pool.tier == tier]
    growing = [pool for pool in pools if shorter.get(pool.name, 0) < pool.nbytes]
    return max(growing or pools, key=lambda pool: pool.nbytes)


def fullest_tier(plan: Plan) -> str:
    """Return the tier of which a plan takes most, measured by its limit."""
    return max(plan.limits, key=lambda tier: plan.tier_bytes(tier) / max(1, plan.limits[tier]))


class _Question:
    """The requests of a run for rows of any length."""

    def __init__(
        self,
        raw: Mapping[str, Any],
        machine: HardwareSpec | OwnMachine,
        shortest: int,
        asking: Mapping[str, Any],
    ) -> None:
        """Read the settings, and count the model for rows of the shortest length.

        Raises:
            ConfigError: The settings ask for micro-batches of several rows, or `ask` raises it.
        """
        self._raw = _with_rows_of_one(raw)
        self._progress: Callable[[str], object] = asking["caller"].progress
        # the budget within which layers are compiled changes nothing of what takes least memory
        short = [("data.seq_len", shortest), ("train.activation_budget", ALL)]
        self.asked: Asked = ask(set_keys(self._raw, short), machine, **asking)
        self.machine = machine
        """The machine, as it was found: less of its memory may be free in a moment."""
        if isinstance(machine, OwnMachine):
            self.machine = _with_ram(machine, self.asked.request.spec.host_bytes)
        self.refused: dict[int, str] = {}
        """Why the model cannot have rows of some lengths."""
        self._known: dict[tuple[int, int], Request] = {}

    def request(self, length: int, rows: int | None = None) -> Request:
        """Return the request for rows of so many tokens, of one rank.

        Args:
            length: The number of tokens of a row.
            rows: The number of rows of a step; None: as few as the settings allow.
        """
        rows = rows or self._least_rows(length)
        if (length, rows) not in self._known:
            asked, spec = self.asked, self.asked.request.spec
            batch = replace(asked.request.batch, seq_len=length, num_micro_batches=rows)
            whole = replace(asked.request, anatomy=asked.recount(seq_len=length), batch=batch, start=None)
            gathers = asked.config.parallel.gathers
            self._known[length, rows] = of_ranks(whole, spec.num_ranks, spec.num_nodes, gathers=gathers)
        return self._known[length, rows]

    def fits(self, length: int) -> bool:
        """Return whether rows of so many tokens fit, in some step that the settings allow."""
        self._progress(f"looking whether rows of {length:,} tokens fit")
        return self.takes(length) and fits(self.request(length))

    def takes(self, length: int) -> bool:
        """Return whether the model can have rows of so many tokens, whatever the machine."""
        try:
            self.request(length)
        except (ConfigError, ModelError) as error:  # a mask of T x T, which a shorter row may have
            self.refused[length] = str(error)
        return length not in self.refused

    def settings(self, length: int) -> dict[str, Any]:
        """Return the settings of a run with rows of so many tokens, which fit."""
        values: list[tuple[str, Any]] = [("data.seq_len", length)]
        if not self._counts_rows:
            rows, least = self._rows(length), self._least_rows(length)
            while rows > least and not fits(self.request(length, rows)):
                rows = max(least, rows // (2 * self._runs) * self._runs)
            values.append(("train.tokens_per_step", rows * length * self.asked.config.rows_each))
        return set_keys(self._raw, values)

    @property
    def _counts_rows(self) -> bool:
        """Return whether the settings say how many rows a step has."""
        return self.asked.given.train.grad_accumulation != AUTO

    @property
    def _is_open(self) -> bool:
        """Return whether the settings leave open how many tokens a step has."""
        return not self._counts_rows and self.asked.given.train.tokens_per_step == AUTO

    @property
    def _runs(self) -> int:
        return self.asked.config.parallel.shards or 1

    def _least_rows(self, length: int) -> int:
        """Return the fewest rows of a step: one for each run where its tokens are left open."""
        return self._runs if self._is_open else self._rows(length)

    def _rows(self, length: int) -> int:
        """Return the rows of a step: of as many tokens as are asked for, and one for each run at least."""
        config = self.asked.config
        if self._counts_rows:
            return config.train.grad_accumulation
        fitting = config.train.tokens_per_step // (length * config.rows_each)
        if self._is_open:  # a power of two, as every default is
            fitting = 1 << max(0, fitting.bit_length() - 1)
        return max(self._runs, fitting // self._runs * self._runs)


def _with_ram(machine: OwnMachine, nbytes: float) -> OwnMachine:
    """Return this machine with so much memory, whatever is free when it is asked."""
    return replace(machine, changed=lambda spec: machine.changed(spec).with_ram(int(nbytes)))


def _with_rows_of_one(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings whose micro-batches have one row each.

    Raises:
        ConfigError: They ask for several.
    """
    train = raw.get("train")
    size = train.get("micro_batch_size", AUTO) if isinstance(train, Mapping) else AUTO
    if size not in (AUTO, 1, "1"):
        raise ConfigError(
            f"{_KEY} is {size}, but the longest row is looked for with one row each; leave it out"
        )
    found = set_keys(raw, [(_KEY, 1)])
    if found["train"].get("grad_accumulation", AUTO) != AUTO:
        found["train"].pop("tokens_per_step", None)
    return found
