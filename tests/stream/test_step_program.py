"""What the engine does in a step is the list that the planner prices: kinds, blocks, buffers and bytes."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from transformers import LlamaConfig

from megatrain.config.adaptation import Adaptation, LoraChoice
from megatrain.config.choice import StepBatch
from megatrain.config.optimizers import adamw
from megatrain.model.adapters.adapt import adapt
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.count import count_anatomy
from megatrain.plan.cost.rates import Rates
from megatrain.plan.cost.step_time import Step
from megatrain.plan.program.buffers import Buffer
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Operation
from megatrain.plan.program.spec import StepSpec
from megatrain.store import on_drives, placement
from megatrain.store.placement import Tiers
from megatrain.stream.engine import Engine
from tests.plan.anatomies import machine
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.recording import Event, Recorder, RecordingLanes

ROWS, TOKENS = 2, 65
CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)

AXES: dict[str, tuple[Any, ...]] = {
    "activations": ("recompute", "keep", "offload", ("recompute", "drop_boundary", "keep")),
    "updates": ("deferred", "immediate", "serial"),
    "fragments": (False, True),
    "rounds": ((1, 1), (1, 3), (2, 1), (3, 1), (2, 2)),
    "place": (
        *("ram", "resident layers", "all resident", "drives", "weights on drives"),
        *("waiting gradients", "mixed gradients", "parked gradients", "outer streams", "outer and drives"),
    ),
    "boundaries": ("device", "host", "nvme"),
    "precision": ("bf16", "fp32"),
    "clips": (True, False),
    "sums": ("device", "host", "nvme"),
    "trained": ("all", "adapters"),
}

PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
ADAPTERS = Adaptation(lora=LoraChoice(r=4, alpha=8.0, target_modules=("q_proj", "down_proj")))


def is_allowed(row: dict[str, Any]) -> bool:
    """Whether an engine can run this."""
    if row["updates"] == "immediate" and row["clips"]:
        return False
    if row["sums"] == "host" and row["place"] in ("waiting gradients", "mixed gradients", "parked gradients"):
        return False
    if "nvme" in (row["boundaries"], row["sums"]) and "resident" in row["place"]:
        return False
    if row["place"] == "waiting gradients":
        return row["updates"] == "deferred" and (row["rounds"][0] == 1 or row["sums"] == "nvme")
    if "gradients" in row["place"]:
        return row["updates"] != "immediate"
    return True


def pairwise(seed: int = 0) -> list[dict[str, Any]]:
    """Choose rows until every pair of values that an engine can run is in one."""
    everything = [
        row
        for values in itertools.product(*AXES.values())
        if is_allowed(row := dict(zip(AXES, values, strict=True)))
    ]
    chance = random.Random(seed)
    missing = {pair for row in everything for pair in pairs(row)}
    rows = []
    while missing:
        row = max(chance.sample(everything, 200), key=lambda row: len(pairs(row) & missing))
        missing -= pairs(row)
        rows.append(row)
    return rows


def pairs(row: dict[str, Any]) -> set[Any]:
    return set(itertools.combinations(row.items(), 2))


class Expected(NamedTuple):
    """How one thing looks from outside: in which lane, between which buffers, how many bytes."""

    lane: Lane
    reads: frozenset[Buffer] = frozenset()
    writes: frozenset[Buffer] = frozenset()
    nbytes: int | None = 0
    """None: not counted."""
    may_read: frozenset[Buffer] = frozenset()
    what: str = ""

    def is_seen(self, event: Event) -> bool:
        """Whether an event is this; what is written may be read too."""
        reads, writes = named(event.reads), named(event.writes)
        return (
            event.lane is self.lane
            and named(self.reads) <= reads <= self.reads | self.may_read | writes
            and writes == named(self.writes)
            and self.nbytes in (None, event.nbytes)
            and self.what in ("", event.what)
        )


def settings_of(row: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    parts = 2 if row["fragments"] else 1
    settings: dict[str, Any] = {
        "activations": row["activations"],
        "updates": row["updates"],
        "fragments": row["fragments"],
        "lockstep": row["rounds"][1],
        "num_slots": parts + 1,
        "num_gradient_buffers": parts,
        "boundaries": row["boundaries"],
        "precision": row["precision"],
        "sums": row["sums"],
        "num_micro_batches": row["rounds"][0] * row["rounds"][1],
    }
    if row["place"] == "resident layers":
        settings |= {"resident_layers": 1}
    elif row["place"] == "all resident":
        settings |= {"resident_layers": 3}  # and the outer blocks with them
    elif row["place"] == "waiting gradients":
        settings |= {"gradients": "device"}
    elif "outer" in row["place"]:
        settings |= {"outer_streams": True}
    elif row["place"] == "mixed gradients":
        settings |= {"gradients": ["device", "host", "nvme"]}
    elif row["place"] == "parked gradients":
        settings |= {"gradients": ["nvme"] * 3}
    is_parked = "nvme" in (*settings.get("gradients", ()), row["boundaries"], row["sums"])
    if "drives" in row["place"] or is_parked:
        settings["tiers"] = Tiers(nvme=(tmp_path / "drive",), ram=1 << 30)
    return settings


@lru_cache
def anatomy(precision: Any, trained: str) -> Anatomy:
    return count_anatomy(
        CONFIG,
        micro_batch_size=ROWS,
        seq_len=TOKENS,
        precision=precision,
        device_type="cpu",
        adaptation=ADAPTERS if trained == "adapters" else None,
    )


def program_of(engine: Engine, row: dict[str, Any]) -> list[Operation]:
    """Return the list that the planner prices for an engine's choice."""
    batch = StepBatch(
        micro_batch_size=ROWS, seq_len=TOKENS, num_micro_batches=row["rounds"][0] * row["rounds"][1]
    )
    rates = Rates(machine(), row["precision"], adamw.FP32)
    choice = engine.choice
    if engine.host.has_drives and not choice.tiers:  # RAM holds all, and commits all
        planes = frozenset({("remainder", "nvme"), ("moments", "nvme")})
        choice = replace(choice, tiers=planes, blocks_in_ram=len(engine.arrangement.binding.blocks))
    step = Step(rates, anatomy(row["precision"], row["trained"]), choice, batch, clips=row["clips"])
    return list(step.program().operations)


def as_told(layouts: Any, tiers: Tiers, *, where: str, **kept: Any) -> placement.Placement:
    """Keep all weights in RAM, or half of them, and all of the state or half of it."""
    weights, state = (
        len(layouts) // 2 if is_on_drives else len(layouts)
        for is_on_drives in (where == "weights on drives", "drives" in where)
    )
    return placement.placed(layouts, tiers, weights, state, **kept)


def run(row: dict[str, Any], tmp_path: Path) -> tuple[list[Event], list[Operation], StepSpec]:
    """Take two steps; return what was seen of the second, what the planner lists, and the engine's spec."""
    recorder = Recorder()
    forced = partial(as_told, where=row["place"])
    model = make_model(CONFIG)
    if row["trained"] == "adapters":  # in fp32, as PEFT makes them, beside a base in the run's precision
        adapt(model.to(PRECISIONS[row["precision"]]), ADAPTERS)
    with mock.patch.object(on_drives, "place", forced):
        engine = attach_plainly(model, device=RecordingLanes(recorder), **settings_of(row, tmp_path))
    optimizer = engine.adamw(lr=1e-3, max_grad_norm=1.0 if row["clips"] else None, updates=row["updates"])
    batches = make_batches(row["rounds"][0] * row["rounds"][1], rows=ROWS, tokens=TOKENS)

    def step(number: int) -> None:
        engine.forward_backward(batches)
        optimizer.step()
        if engine.host.has_drives:
            engine.commit(number, {})

    try:
        step(1)
        with recorder.watching(engine):
            step(2)
        return recorder.events, program_of(engine, row), engine.executor.spec
    finally:
        engine.close(removes=True)


MATERIAL = {
    "working", "page", "slot", "resident", "gradient_buffer", "resident_gradient", "gradient", "staging",
    "waiting", "drive_staging", "activation_staging", "drive", "device_moments", "moments",
}  # fmt: skip


STAGING = "activation_staging"
OTHERWISE_COMPARED = {STAGING, "scratch"}
"""Buffers whose numbers differ from step to step: `in_turn`, and `restored_from_where_it_was_saved`."""


def named(buffers: Any) -> Any:
    """Leave out what is compared in another way."""
    return {buffer for buffer in buffers if buffer[0] not in OTHERWISE_COMPARED}


def material(buffers: Any) -> frozenset[Buffer]:
    return frozenset(buffer for buffer in buffers if buffer[0] in MATERIAL)


def expected_of(operation: Any, spec: StepSpec) -> list[Expected]:
    """Return what an operation must look like from outside."""
    kind, block, outer = operation.label, operation.block, spec.outer
    reads, writes = material(operation.reads), material(operation.writes)
    plain = Expected(operation.lane, reads, writes, operation.nbytes)
    match kind:
        case "forward" | "backward" if operation.visit.is_head:  # the final norm too, and parts come inside
            around = frozenset(("resident", number) for number in outer)
            passes = plain._replace(writes=frozenset(), nbytes=None, may_read=around)
            if kind == "forward" or not operation.collects:
                return [passes]
            taken = [writes, *({("resident_gradient", number)} for number in behind_head(spec))]
            return [*(Expected(operation.lane, writes=frozenset(w), nbytes=None) for w in taken), passes]
        case "backward" if spec.ends.heads and block in behind_head(spec):
            return []
        case "backward" if block in spec.ends.embeddings:  # which needs no weights
            return [Expected(operation.lane, writes=writes, nbytes=None)] * operation.collects
        case "forward":
            return [] if block in outer else [plain._replace(writes=frozenset())]
        case "backward":
            visit = [] if block in outer else [plain._replace(writes=frozenset(), nbytes=None)]
            collect = Expected(operation.lane, writes=writes, nbytes=None)
            return [*visit, collect] if operation.collects else visit
        case "update" if operation.on_device:
            return [plain._replace(nbytes=None)]
        case "update":
            if operation.drive_staging >= 0:
                assert spec.drives is not None
                writes -= {("moments", block)} | {("working", n) for n in spec.drives.working}
            return [plain._replace(writes=writes, what="update")]
        case "add":
            return [plain._replace(what="add")]
        case "norm":
            return [Expected(operation.lane, nbytes=len(operation.blocks), what="norm")]
        case "spill":
            return [plain._replace(reads=frozenset(), may_read=reads)]
        case "write" if hasattr(operation, "piece"):
            return [plain._replace(writes=frozenset())]
        case "round" if is_exact(spec, block):
            return []  # an fp32 sum is what it is
        case "hold" if is_exact(spec, block) and operation.gradient_buffer < 0:
            return []
        case "load" if operation.waiting >= 0:
            return [plain._replace(nbytes=None)]  # it does not cross the link
        case "hold" | "round":
            return [plain._replace(nbytes=None)]
        case "commit":
            return [Expected(operation.lane, what="commit")]
        case "head" | "head backward" | "release" | "seal" | "sync":
            return []
        case _:
            return [plain]


def behind_head(spec: StepSpec) -> list[int]:
    """List the blocks on the device whose gradients are complete with the head's, the last first."""
    return [block for block in reversed(spec.outer) if block in spec.behind and spec.sizes[block].is_trained]


def is_exact(spec: StepSpec, block: int) -> bool:
    """Whether a block's complete gradient is in fp32, as its sum is."""
    return spec.sizes[block].offload_bytes == spec.sizes[block].accumulator_bytes


def differences(events: list[Event], operations: list[Operation], spec: StepSpec) -> list[str]:
    """Compare what was seen in each lane with what is listed, in order."""
    around = {("resident", block) for block in spec.outer}
    seen, listed = defaultdict(list), defaultdict(list)
    for event in events:
        is_outer = event.lane is Lane.COMPUTE and not event.writes and event.reads <= around
        if not is_outer and (event.reads or event.writes or event.nbytes or event.what):
            seen[event.lane].append(event)
    for operation in operations:
        for expected in expected_of(operation, spec):
            listed[expected.lane].append((operation, expected))
    problems = []
    of_list = in_turn({lane: [expected for _, expected in found] for lane, found in listed.items()})
    if of_list != in_turn(seen):
        problems.append(f"buffers before drives of saved activations: {of_list} listed, {in_turn(seen)} seen")
    for lane in Lane:
        if len(seen[lane]) != len(listed[lane]):
            problems.append(f"{lane.value}: {len(listed[lane])} listed, {len(seen[lane])} seen")
        for (operation, expected), event in zip(listed[lane], seen[lane], strict=False):
            if not expected.is_seen(event):
                problems.append(f"{lane.value}: {operation} is {expected}, but {event}")
                break
    return problems


def in_turn(by_lane: dict[Lane, list[Any]]) -> list[int]:
    """List the buffers through which saved activations pass, numbered in the order of their first use.

    A step begins with the one that the step before has left first, and a list with the first of all.
    """
    lanes = (Lane.SAVE, Lane.STOW, Lane.RECALL, Lane.RESTORE)
    used = [
        buffer
        for lane in lanes
        for thing in by_lane.get(lane, [])
        for buffer in thing.reads | thing.writes
        if buffer[0] == STAGING
    ]
    numbers = {buffer: number for number, buffer in enumerate(dict.fromkeys(used))}
    return [numbers[buffer] for buffer in used]


PAST_A_PAGE = dict(
    zip(
        AXES,
        ("offload", "serial", False, (3, 1), "parked gradients", "nvme", "bf16", True, "device", "adapters"),
        strict=True,
    )
)
"""Each tensor that waits on the drives begins at an aligned address, for which one takes a page more."""

KEPT_RESULTS = [
    {**PAST_A_PAGE, "trained": "all", "place": "ram", "clips": True, "sums": "device", **each}
    for each in (
        {"activations": "keep_attention", "boundaries": "host", "rounds": (2, 2)},
        {"activations": "keep_attention", "boundaries": "nvme", "rounds": (1, 3), "fragments": True},
        {
            "activations": ("keep_attention", "drop_boundary", "keep_attention"),
            "boundaries": "host",
            "rounds": (1, 3),
            "precision": "fp32",
        },
        {
            "activations": ("keep_attention", "drop_boundary", "recompute"),
            "boundaries": "nvme",
            "rounds": (3, 1),
        },
    )
]
"""What is kept for a recomputation waits where the input does, in the same copies."""

ROWS_OF_GRID = [*pairwise(), PAST_A_PAGE, *KEPT_RESULTS]


def name_of(row: Any) -> str:
    policy = row["activations"] if isinstance(row["activations"], str) else "mix"
    flags = ["fragments"] * row["fragments"] + ["clips"] * row["clips"] + [f"sums_{row['sums']}"]
    rounds = "R{}m{}".format(*row["rounds"])
    parts = [policy, row["updates"], rounds, row["place"], row["boundaries"], row["precision"], *flags]
    parts += ["adapters"] * (row["trained"] == "adapters")
    return "-".join(parts).replace(" ", "_")


@pytest.mark.parametrize("row", ROWS_OF_GRID, ids=name_of)
def test_the_engine_does_what_the_planner_prices(row: dict[str, Any], tmp_path: Path) -> None:
    """And a list with one block, buffer or length changed is told from it."""
    events, operations, spec = run(row, tmp_path)
    assert differences(events, operations, spec) == []
    saved = restored_from_where_it_was_saved(events, operations)
    assert saved == sum(operation.label == "save" for operation in operations)
    chance = random.Random(name_of(row))
    for changed in changes(operations, spec, chance):
        assert differences(events, changed, spec), "a change of the list was not noticed"


def restored_from_where_it_was_saved(events: list[Event], operations: list[Any]) -> int:
    """Check that each RESTORE, RECALL and UNPARK copies from where the same bytes were put."""
    by_lane = {lane: iter([e for e in events if e.lane is lane and e.nbytes]) for lane in Lane}
    places: dict[int, list[int]] = {}
    chunks: dict[int, set[Buffer]] = {}
    parked: dict[int, set[Buffer]] = {}
    count = 0
    for operation in operations:
        match operation.label:
            case "save":
                places[operation.saved] = [target for _, target in next(by_lane[Lane.SAVE]).copies]
                count += 1
            case "stow":
                chunks[operation.saved] = next(by_lane[Lane.STOW]).writes
                del places[operation.saved]
            case "recall":
                assert next(by_lane[Lane.RECALL]).reads == chunks.pop(operation.saved)
            case "park":
                parked[operation.block] = next(by_lane[Lane.STOW]).writes
            case "unpark":
                assert next(by_lane[Lane.RECALL]).reads == parked[operation.block]
            case "restore" if operation.activation_staging < 0:
                sources = [source for source, _ in next(by_lane[Lane.RESTORE]).copies]
                assert sources == places.pop(operation.saved)
    return count


def changes(operations: list[Operation], spec: StepSpec, chance: random.Random) -> list[list[Operation]]:
    """Make lists in which one operation has another block, another buffer, or another length."""
    made = []
    embeddings = spec.ends.embeddings  # whose backward needs no weights
    for name in ("block", "slot", "gradient_buffer", "staging", "drive_staging", "page", STAGING, "nbytes"):
        numbers = [
            number
            for number, operation in enumerate(operations)
            if expected_of(operation, spec)
            and is_told_by(operation, name)
            and not (name == "slot" and operation.label == "backward" and operation.block in embeddings)
        ]
        for number in chance.sample(numbers, min(3, len(numbers))):
            old = operations[number]
            new = replace(old, **{name: getattr(old, name) + (64 if name == "nbytes" else 1)})
            made.append([*operations[:number], new, *operations[number + 1 :]])
    return made


def is_told_by(operation: Any, name: str) -> bool:
    """Whether a field of an operation shows in what it does."""
    kind = operation.label
    if name == "nbytes":
        counted: tuple[str, ...] = (
            "add",
            "fetch",
            "load",
            "offload",
            "save",
            "restore",
            "push",
            "read",
        )
        counted += ("page", "write", "spill", "stow", "recall", "park", "unpark")
        if kind == "load" and operation.waiting >= 0:
            return False
        return kind in counted or (kind == "update" and not operation.on_device)
    if name == "block":
        if kind in ("forward", "backward"):
            return operation.slot < 0
        if kind == "hold":
            return operation.waiting < 0
        if kind == "update":
            return operation.drive_staging < 0
        return kind == "add" or (kind in ("fetch", "read") and getattr(operation, "page", -1) < 0)
    return int(getattr(operation, name, -1)) >= 0 and kind != "head"
