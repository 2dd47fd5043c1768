"""Reads of drives in a program: as early as the buffers allow, and never over what is still in use."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.config.choice import Choice, StepBatch
from megatrain.hardware import Drives
from megatrain.layout import pools
from megatrain.layout.drive_chunks import CHUNK_BYTES
from megatrain.layout.host_buffers import NUM_ACTIVATION_STAGING, pieces_of
from megatrain.plan.cost.step_time import Step
from megatrain.plan.memory.block_sums import BlockSums
from megatrain.plan.program.block_size import BlockSize
from megatrain.plan.program.features.activations import with_activations_through
from megatrain.plan.program.features.compute import Forward
from megatrain.plan.program.features.drives import with_state_through
from megatrain.plan.program.features.gradients import Offload
from megatrain.plan.program.features.updates import Update, update_of
from megatrain.plan.program.features.weights import Fetch, with_weights_through
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Operation
from megatrain.plan.program.schedule import schedule
from megatrain.plan.program.spec import DriveSpec, StepSpec
from megatrain.plan.program.step import update_program
from megatrain.plan.program.visits import LayerPlan, Round, Visit, round_visits
from megatrain.plan.search.planner import make_plan, plan_of
from megatrain.plan.search.request import Request
from tests.plan.anatomies import Shape, llama_like, machine

STAGING = "activation_staging"
SIZES = [100 + block for block in range(8)]

BLOCKS = st.integers(0, 7)
OPERATIONS = st.lists(
    st.one_of(
        st.builds(Fetch, block=BLOCKS, slot=st.integers(0, 1)),
        st.builds(Forward, block=BLOCKS, visit=st.just(Visit(0)), slot=st.integers(0, 1)),
        st.builds(Offload, block=BLOCKS),
        st.builds(Update, block=BLOCKS),
    ),
    max_size=30,
)


@given(OPERATIONS, st.sets(st.integers(0, 7)), st.integers(1, 4), st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_read_is_as_early_as_its_buffer_allows(
    operations: list[Operation], there: set[int], num_buffers: int, is_state: bool
) -> None:
    through = with_state_through if is_state else with_weights_through
    made: list[Any] = through(operations, there, SIZES, num_buffers)
    needs, reads = ("update", "read") if is_state else ("fetch", "page")
    wanted = [operation for operation in operations if operation.label == needs and operation.block in there]
    added = [operation for operation in made if operation.label in (reads, "write")]
    assert [o.block for o in made if o.label not in (reads, "write")] == [o.block for o in operations]
    assert [o.block for o in added if o.label == reads] == [o.block for o in wanted]
    assert all(operation.nbytes == SIZES[operation.block] for operation in added)
    holds: dict[int, int] = {}
    for operation in made:
        buffer = getattr(operation, "drive_staging" if is_state else "page", -1)
        if operation.label == reads:
            assert buffer not in holds, "read over what was not used up"
            holds[buffer] = operation.block
        elif operation.label == needs and operation.block in there:
            assert holds[buffer] == operation.block
            if not is_state:
                del holds[buffer]
        elif operation.label == "write":
            assert holds.pop(buffer) == operation.block
    assert not holds
    first = next((place for place, o in enumerate(made) if o.label == needs and o.block in there), 0)
    ahead = sum(operation.label == reads for operation in made[:first])
    assert ahead == min(num_buffers, len(wanted)), "not as many reads ahead as there are buffers"


def test_an_optimizer_program_reads_two_blocks_ahead_and_writes_behind() -> None:
    spec = StepSpec(
        sizes=[SIZE] * 4,
        layers=[LayerPlan((block,)) for block in range(4)],
        num_slots=2,
        num_gradient_buffers=1,
        drives=DriveSpec(
            state_bytes=SIZES, working_bytes=SIZES, state=frozenset({0, 1, 3}), working=frozenset()
        ),
    )
    made = update_program(spec, [0, 1, 2, 3])
    assert [str(operation) for operation in made] == [
        "read      b0 d0",
        "read      b1 d1",
        "read      b3 d2",
        "norm",
        "update    b0 d0",
        "write     b0 d0",
        "update    b1 d1",
        "write     b1 d1",
        "update    b2",
        "update    b3 d2",
        "write     b3 d2",
    ]
    assert [operation.lane for operation in made[:5]] == [Lane.READ] * 3 + [Lane.HOST] * 2


# -- saved activations ---------------------------------------------------------------------------------------

SIZE = BlockSize(is_streamed=True, is_trained=True, fetch_bytes=2, offload_bytes=2, accumulator_bytes=4)


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=7),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(2, 4),
)
@settings(max_examples=150, deadline=None)
def test_what_is_saved_is_read_back_once_and_ahead(
    layers: list[tuple[bool, bool]], rounds: list[int], num_buffers: int
) -> None:
    """In any program: after it was written, before it is restored, and never into a buffer in use."""
    plans = [LayerPlan((n,), saves=saves, drops=drops and n > 0) for n, (saves, drops) in enumerate(layers)]
    visits = [visit for count in rounds for visit in round_visits(plans, Round(num_micro_batches=count))]
    program = schedule(visits, [SIZE] * len(plans), [None, None])
    rooms = dict.fromkeys(range(len(plans)), 0)
    made: list[Any] = with_activations_through(program.operations, rooms, num_buffers)
    added = ("stow", "recall")
    none = {STAGING: -1}
    others = [replace(o, **(none if hasattr(o, STAGING) else {})) for o in made if o.label not in added]
    assert others == list(program.operations)
    stowed: set[tuple[int, int]] = set()
    held: set[tuple[int, int]] = set()
    for before, operation in zip([None, *made], made, strict=False):
        visit = operation.block, getattr(operation, "micro_batch", 0)
        match operation.label:
            case "stow":
                assert before.label == "save"
                assert all(getattr(before, f.name) == getattr(operation, f.name) for f in fields(before))
                stowed.add(visit)
            case "recall":
                stowed.remove(visit)
                held.add(visit)
                assert len(held) <= num_buffers
            case "restore":
                assert visit not in stowed, "restored without being read"
                held.discard(visit)
            case "forward":
                assert not held or any(layers[n][1] for n in range(1, len(layers))), "read in a forward"


def test_two_visits_are_read_ahead() -> None:
    visits = round_visits([LayerPlan((block,), saves=True) for block in range(5)])
    program = schedule(visits, [replace(SIZE, is_streamed=False)] * 5, [])
    made = with_activations_through(program.operations, dict.fromkeys(range(5), 0))
    moves = [str(o) for o in made if o.label != "offload"]
    assert moves[-12:] == [
        "forward   b4",
        "recall    b2",
        "recall    b1",
        "backward  b4",
        "restore   b2",
        "recall    b0",
        "backward  b3",
        "restore   b1",
        "backward  b2",
        "restore   b0",
        "backward  b1",
        "backward  b0",
    ]
    assert moves[:3] == ["forward   b0", "save      b0", "stow      b0"]
    assert [move[0:4] for move in moves].count("stow") == 4


DRIVES = Drives(nbytes=10**12, read_bytes_per_s=5e9, write_bytes_per_s=2e9)
LONG = llama_like(Shape(num_layers=96), seq_len=16384)
LONG_BATCH = StepBatch(micro_batch_size=1, seq_len=16384, num_micro_batches=1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ram", "drives", "boundaries"),
    [(8 << 30, DRIVES, "host"), (600 << 20, DRIVES, "nvme"), (600 << 20, None, None)],
)
def test_boundaries_go_to_drives_only_where_nothing_else_fits(
    ram: int, drives: Drives | None, boundaries: str | None
) -> None:
    """96 boundaries of 8 MiB: more than the device holds, and more than is left of 600 MiB of RAM."""
    spec = machine(device_bytes=500 << 20, drives=drives)
    request = Request(spec=spec, anatomy=LONG, batch=LONG_BATCH, host_limit=ram)
    plan = make_plan(request, budget=7_500)
    assert plan.fits == (boundaries is not None)
    if boundaries is None:
        return
    assert plan.choice.boundaries == boundaries
    pools = {(pool.tier, pool.name): pool.nbytes for pool in plan.pools}
    if boundaries == "nvme":
        assert pools["ram", "staging of activations"] == NUM_ACTIVATION_STAGING * (8 << 20)
        assert pools["nvme", "saved activations"] == 95 * (8 << 20)
        assert plan.choice.resident_layers == 0
        assert not plan.choice.outer_resident
        assert plan.tier_bytes("ram") <= ram
    else:
        assert not any(tier == "nvme" for tier, _ in pools)


@pytest.mark.parametrize("is_duplex", [False, True])
def test_the_time_of_drives_counts(is_duplex: bool) -> None:
    """It bounds a step, and no step is faster than its bounds; drives that are fast enough cost nothing."""
    choice = Choice(boundaries="nvme").with_defaults(96)
    spec = machine(flops=1e14, link=1e11, update_rate=1e10)
    written = 95 * (8 << 20)
    read = written - (8 << 20)  # what is saved last is still on the device
    seconds = {}
    for rate in (1e7, 1e12):
        drives = replace(DRIVES, read_bytes_per_s=rate, write_bytes_per_s=rate / 2, is_duplex=is_duplex)
        request = Request(spec=replace(spec, drives=drives), anatomy=LONG, batch=LONG_BATCH)
        step = Step(request.rates, LONG, choice, LONG_BATCH)
        seconds[rate] = step.step_s
        bounds = step.bounds_s
        assert step.step_s >= 0.999 * max(bounds.values())
        if is_duplex:
            assert bounds["drive reads"] == pytest.approx(read / rate)
            assert bounds["drive writes"] == pytest.approx(2 * written / rate)
        else:
            assert bounds["drives"] == pytest.approx((read + 2 * written) / rate)
        bytes_per_step = plan_of(request, choice).bytes_per_step
        assert (bytes_per_step["drive_read"], bytes_per_step["drive_written"]) == (read, written)
    host = Step(request.rates, LONG, replace(choice, boundaries="host"), LONG_BATCH)
    assert seconds[1e12] == pytest.approx(host.step_s, rel=1e-3)
    # in the forward nothing is read, and in the backward nothing is written: duplex gains nothing
    assert seconds[1e7] == pytest.approx((read + 2 * written) / 1e7, rel=0.05)


def test_only_commits_write_what_lives_in_ram() -> None:
    """Without them a step writes the state that is on drives, and with one in k steps a k-th of the rest."""
    anatomy = llama_like(Shape(num_layers=6), seq_len=512)
    drives = Drives(nbytes=1 << 40, read_bytes_per_s=2e9, write_bytes_per_s=1e9)
    batch = StepBatch(micro_batch_size=1, seq_len=512, num_micro_batches=2)
    asked = Request(
        spec=machine(host_bytes=622 << 20, drives=drives, flops=1e11),
        anatomy=anatomy,
        batch=batch,
        choice=Choice(fragments=False, sums="device", boundaries="device"),
    )
    plan = make_plan(asked, budget=1_000)
    sums = BlockSums.of(anatomy, Choice().with_defaults(0))
    spec = sums.drive_spec(plan.choice, batch)
    assert spec is not None
    assert 0 < len(spec.state) < sums.num_blocks
    away = sum(map(spec.update_bytes, spec.state))
    assert plan.bytes_per_step["drive_written"] == away
    every = range(sums.num_blocks)
    whole = sum(spec.state_bytes[n] + spec.working_bytes[n] for n in every)
    for number in (1, 4):
        commits = replace(asked, commit_every=number)
        found = commits.step(plan.choice)
        written = plan_of(commits, plan.choice).bytes_per_step["drive_written"]
        assert written == pytest.approx(away + (whole - away) / number, abs=2 * sums.num_blocks)
        assert found.copied_bytes.written == written


@given(st.integers(1, 40), st.integers(0, 7), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=60, deadline=None)
def test_ranks_share_out_an_image_and_take_equal_parts_of_a_large_one(
    num_chunks: int, block: int, num_ranks: int
) -> None:
    nbytes = num_chunks * CHUNK_BYTES - 4096
    common = {"state_bytes": [nbytes] * 8, "working_bytes": [4096] * 8, "working": frozenset[int]()}
    specs = [
        DriveSpec(state=frozenset(range(8)), rank=rank, num_ranks=num_ranks, **common)  # type: ignore[arg-type]
        for rank in range(num_ranks)
    ]
    parts = [spec.update_bytes(block) for spec in specs]
    assert sum(parts) == nbytes
    assert max(parts) - min(parts) <= CHUNK_BYTES
    for spec, part in zip(specs, parts, strict=True):  # pieces of a commit are the same chunks
        sizes = pieces_of(nbytes)
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        pieces = zip(starts, sizes, strict=True)
        assert sum(spec.piece_bytes(block, size, start) for start, size in pieces) == part


def test_a_share_s_state_is_written_when_all_ranks_have_updated_theirs() -> None:
    made = with_state_through(update_of(0, SIZE, has_shares=True), {0}, [8], 3)
    assert [operation.label for operation in made] == ["read", "update", "spread", "write"]
    read, update, waits, write = made
    assert set(read.writes) <= set(update.reads)
    assert set(update.writes) == set(waits.reads)
    assert set(write.reads) <= set(waits.writes)


def test_tensors_are_written_with_the_room_between_them() -> None:
    """Each begins at a multiple of 512: these take three pages, where their 8,100 bytes would take two."""
    room = pools.saved_visit([4000, 4000, 100])
    visits = round_visits([LayerPlan((block,), saves=True) for block in range(2)], Round(num_micro_batches=2))
    program = schedule(visits, [SIZE] * 2, [None, None], saved_bytes={0: 8100, 1: 8100})
    made = with_activations_through(program.operations, {0: room, 1: room})
    moved = {kind: [o.nbytes for o in made if o.label == kind] for kind in ("save", "stow", "recall")}
    assert moved == {"save": [8100] * 2, "stow": [12288] * 2, "recall": [12288]}
