"""The step's program: fetches as few and as early as an optimal schedule allows, and never out of place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.plan.program.block_size import BlockSize
from megatrain.plan.program.features.compute import Backward
from megatrain.plan.program.features.gradients import Load, Offload, offload_residents
from megatrain.plan.program.features.updates import AtOnce, Update, updated_at_once
from megatrain.plan.program.features.weights import Fetch, fetch_residents
from megatrain.plan.program.operations import Program
from megatrain.plan.program.schedule import schedule
from megatrain.plan.program.spec import StepSpec
from megatrain.plan.program.step import update_program
from megatrain.plan.program.visits import LayerPlan, Round, Visit, round_visits


def make_sizes(num_blocks: int, *, is_trained: bool = True) -> list[BlockSize]:
    """Make streamed blocks of different sizes."""
    return [
        BlockSize(
            is_streamed=True,
            is_trained=is_trained,
            fetch_bytes=100 + block,
            offload_bytes=10 + block,
            accumulator_bytes=20 + block,
        )
        for block in range(num_blocks)
    ]


def rounds(num_blocks: int, num_rounds: int) -> list[Visit]:
    """List the visits of a step of ordinary rounds."""
    layers = [LayerPlan((block,)) for block in range(num_blocks)]
    visits = []
    for number in range(num_rounds):
        last = number == num_rounds - 1
        visits += round_visits(layers, Round(loads=number > 0, completes=last))
    return visits


def fewest_fetches(blocks: Sequence[int], num_slots: int) -> int:
    """Try every choice of what to evict, and return the fewest fetches."""

    @cache
    def search(position: int, held: frozenset[int]) -> int:
        if position == len(blocks):
            return 0
        block = blocks[position]
        if block in held:
            return search(position + 1, held)
        if len(held) < num_slots:
            return 1 + search(position + 1, held | {block})
        return 1 + min(search(position + 1, held - {victim} | {block}) for victim in held)

    return search(0, frozenset())


def listed(program: Program) -> list[Any]:
    """List the operations of a program, each with what only its kind has."""
    return list(program.operations)


def check_soundness(program: Program, visits: Sequence[Visit], contents: Sequence[int | None]) -> None:
    """Run a program on paper: every visit finds its block, and no fetch evicts what is needed sooner."""
    slots = list(contents)
    done = 0

    def next_use(block: int | None) -> int:
        later = (n for n in range(done, len(visits)) if visits[n].block == block)
        return next(later, len(visits))

    for operation in listed(program):
        if operation.label == "fetch":
            assert operation.block not in slots, f"{operation}: fetched though it is there"
            assert next_use(slots[operation.slot]) > next_use(operation.block), f"{operation} evicts too soon"
            slots[operation.slot] = operation.block
        elif operation.label in ("forward", "backward"):
            assert slots[operation.slot] == operation.block, f"{operation}: its slot holds another block"
            assert operation.block == visits[done].block
            assert (operation.label == "backward") == visits[done].is_backward
            done += 1
    assert done == len(visits)
    assert tuple(slots) == program.contents


def check_gradient_buffers(program: Program, num_buffers: int) -> None:
    """Assert that a gradient buffer holds one block from its load or first backward until its offload."""
    held: dict[int, int] = {}
    for operation in listed(program):
        if operation.label == "load":
            assert operation.gradient_buffer not in held
        if operation.label in ("load", "backward") and operation.gradient_buffer >= 0:
            assert operation.gradient_buffer < num_buffers
            assert held.setdefault(operation.gradient_buffer, operation.block) == operation.block
        if operation.label == "offload":
            assert held.pop(operation.gradient_buffer) == operation.block
    assert not held


def test_program_of_three_blocks_in_two_slots_is_the_design_s() -> None:
    """The worked example of the design, operation for operation."""
    program = schedule(rounds(3, 1), make_sizes(3), [None, None], num_gradient_buffers=2)
    assert str(program).split("\n") == [
        "fetch     b0 s0",
        "fetch     b1 s1",
        "forward   b0 s0",
        "fetch     b2 s0",
        "forward   b1 s1",
        "forward   b2 s0",
        "backward  b2 s0 g0",
        "offload   b2 g0",
        "fetch     b0 s0",
        "backward  b1 s1 g1",
        "offload   b1 g1",
        "backward  b0 s0 g0",
        "offload   b0 g0",
    ]
    assert program.contents == (0, 1)
    spec = StepSpec(
        sizes=make_sizes(3), layers=[LayerPlan((n,)) for n in range(3)], num_slots=2, num_gradient_buffers=1
    )
    assert [str(operation) for operation in update_program(spec, [0, 1, 2])] == [
        "norm",
        "update    b0",
        "update    b1",
        "update    b2",
    ]


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_rounds", [1, 2, 3])
def test_fetches_are_as_few_as_possible(num_slots: int, num_blocks: int, num_rounds: int) -> None:
    visits = rounds(num_blocks, num_rounds)
    program = schedule(visits, make_sizes(num_blocks), [None] * num_slots)
    assert program.count("fetch") == fewest_fetches([visit.block for visit in visits], num_slots)
    assert program.count("fetch") <= 2 * num_blocks * num_rounds
    check_soundness(program, visits, [None] * num_slots)


@settings(max_examples=150, deadline=None)
@given(st.sets(st.integers(0, 6)), st.integers(1, 4), st.integers(1, 3))
def test_fetches_of_a_step_that_skips_blocks_are_as_few_as_possible(
    kept: set[int], num_slots: int, num_rounds: int
) -> None:
    layers = [LayerPlan((block,)) for block in sorted(kept)]
    visits = [
        visit for number in range(num_rounds) for visit in round_visits(layers, Round(loads=number > 0))
    ]
    program = schedule(visits, make_sizes(7), [None] * num_slots)
    assert program.count("fetch") == fewest_fetches([visit.block for visit in visits], num_slots)


def test_a_fetch_before_its_time_may_cost_another_one() -> None:
    """Out of ordinary rounds, fetches are early first and few second: b1 leaves while b0 is still to come."""
    blocks = [1, 0, 2, 1]
    program = schedule([Visit(block) for block in blocks], make_sizes(3), [None, None])
    assert program.count("fetch") == 4
    assert fewest_fetches(blocks, 2) == 3


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Visit], int, list[int | None]]:
    """Draw visits of up to 7 blocks, slots, and what these hold at the start."""
    num_blocks = draw(st.integers(1, 7))
    num_slots = draw(st.integers(1, 4))
    seen: set[int] = set()
    visits = []
    for block, is_backward in draw(
        st.lists(st.tuples(st.integers(0, num_blocks - 1), st.booleans()), max_size=40)
    ):
        visits.append(Visit(block, is_backward, loads=is_backward and block in seen))
        seen |= {block} if is_backward else set()
    held: list[int | None] = []
    held += draw(st.permutations(range(num_blocks)))[:num_slots]
    held += [None] * (num_slots - len(held))
    held = [block if draw(st.booleans()) else None for block in held]
    return visits, num_blocks, held


@settings(max_examples=300, deadline=None)
@given(cases(), st.integers(1, 3))
def test_any_sequence_of_visits_is_served(
    case: tuple[list[Visit], int, list[int | None]], num_buffers: int
) -> None:
    """Every visit finds its block; bytes and gradient buffers add up; nothing is left to chance."""
    visits, num_blocks, contents = case
    sizes = make_sizes(num_blocks)
    program = schedule(visits, sizes, contents, num_gradient_buffers=num_buffers)
    check_soundness(program, visits, contents)
    assert program.count("fetch") <= len(visits)
    fetched = [operation.block for operation in listed(program) if operation.label == "fetch"]
    assert program.nbytes("fetch") == sum(sizes[block].fetch_bytes for block in fetched)
    backward = [visit for visit in visits if visit.is_backward]
    assert program.nbytes("offload") == sum(sizes[visit.block].offload_bytes for visit in backward)
    loads = sum(sizes[visit.block].accumulator_bytes for visit in backward if visit.loads)
    assert program.nbytes("load") == loads
    check_gradient_buffers(program, num_buffers)
    assert program == schedule(visits, sizes, contents, num_gradient_buffers=num_buffers)


def test_what_the_slots_hold_is_not_fetched_again() -> None:
    assert schedule(rounds(3, 1), make_sizes(3), [0, 1]).count("fetch") == 2
    assert schedule(rounds(3, 1), make_sizes(3), [2, 1, 0]).count("fetch") == 0


def test_gradients_load_and_complete_over_three_rounds() -> None:
    program = schedule(rounds(2, 3), make_sizes(2), [None, None])
    gradient_operations = [
        (operation.label, operation.block, operation.adds, operation.completes, operation.nbytes)
        for operation in listed(program)
        if operation.label in ("load", "offload")
    ]
    assert gradient_operations == [
        ("offload", 1, False, False, 21),
        ("offload", 0, False, False, 20),
        ("load", 1, True, False, 21),
        ("offload", 1, True, False, 21),
        ("load", 0, True, False, 20),
        ("offload", 0, True, False, 20),
        ("load", 1, True, True, 21),
        ("offload", 1, True, True, 11),
        ("load", 0, True, True, 20),
        ("offload", 0, True, True, 10),
    ]


def test_frozen_blocks_have_no_gradient_to_move() -> None:
    program = schedule(rounds(3, 2), make_sizes(3, is_trained=False), [None, None])
    assert program.count("offload") == program.count("load") == 0
    assert program.count("backward") == 6
    assert all(operation.gradient_buffer == -1 and operation.writes == () for operation in visits_of(program))


def visits_of(program: Program) -> list[Any]:
    """List the visits of a program."""
    return [o for o in listed(program) if o.label in ("forward", "backward")]


def test_resident_blocks_move_once_per_step() -> None:
    sizes = [*make_sizes(1), resident()]
    fetched: list[Any] = fetch_residents(sizes)
    assert [(o.block, o.slot, o.nbytes, o.writes) for o in fetched] == [(1, -1, 7, (("resident", 1),))]
    assert [(o.block, o.nbytes, o.reads) for o in offload_residents(sizes, [1])] == [
        (1, 8, (("resident_gradient", 1),))
    ]


def resident() -> BlockSize:
    """Make a resident block."""
    return BlockSize(is_streamed=False, is_trained=True, fetch_bytes=7, offload_bytes=8, accumulator_bytes=9)


def test_operations_name_the_buffers_that_order_them() -> None:
    """Waits follow from these names alone."""
    fetch = Fetch(block=2, slot=1)
    backward = Backward(block=2, visit=Visit(2, is_backward=True), slot=1, gradient_buffer=0)
    load = Load(block=2, gradient_buffer=0)
    offload = Offload(block=2, gradient_buffer=0)
    update = Update(block=2)
    assert (fetch.reads, fetch.writes) == ((("working", 2),), (("slot", 1),))
    assert (backward.reads, backward.writes) == ((("slot", 1),), (("gradient_buffer", 0),))
    assert (load.reads, load.writes) == ((("gradient", 2),), (("gradient_buffer", 0),))
    assert (offload.reads, offload.writes) == ((("gradient_buffer", 0),), (("gradient", 2), ("squares", 2)))
    assert update.reads == (("gradient", 2), ("norm", 0))
    assert update.writes == (("working", 2), ("moments", 2))


def layers_of(*blocks: tuple[int, ...], **options: bool) -> list[LayerPlan]:
    """Make layers of the given fragments, all with the same options."""
    return [LayerPlan(fragments, **options) for fragments in blocks]


def lines(visits: Sequence[Visit], num_blocks: int, num_slots: int, **options: Any) -> list[str]:
    """Schedule visits, and return the program's lines."""
    return str(schedule(visits, make_sizes(num_blocks), [None] * num_slots, **options)).split("\n")


def test_micro_batches_in_lockstep_share_one_fetch_and_one_offload() -> None:
    """Backward adds up in the micro-batches' own order: they started in reverse."""
    visits = round_visits(layers_of((0,), (1,)), Round(num_micro_batches=2))
    assert lines(visits, 2, 2, num_gradient_buffers=2) == [
        "fetch     b0 s0",
        "fetch     b1 s1",
        "forward   b0 m1 s0",
        "forward   b0 s0",
        "forward   b1 m1 s1",
        "forward   b1 s1",
        "backward  b1 s1 g0",
        "backward  b1 m1 s1 g0 adds",
        "offload   b1 g0 adds",
        "backward  b0 s0 g1",
        "backward  b0 m1 s0 g1 adds",
        "offload   b0 g1 adds",
    ]


@pytest.mark.parametrize("num_micro_batches", [1, 2, 8])
@pytest.mark.parametrize("num_blocks", [1, 4, 28, 180])
def test_a_round_fetches_each_block_at_most_twice(num_blocks: int, num_micro_batches: int) -> None:
    layers = [LayerPlan((block,)) for block in range(num_blocks)]
    visits = round_visits(layers, Round(num_micro_batches=num_micro_batches))
    program = schedule(visits, make_sizes(num_blocks), [None, None])
    assert program.count("fetch") == max(num_blocks, 2 * num_blocks - 2)
    assert program.count("offload") == num_blocks
    check_soundness(program, visits, [None, None])


def test_fragments_are_recomputed_in_order_and_left_in_reverse() -> None:
    """Two fragments per layer, three slots of which none holds a whole layer."""
    visits = round_visits(layers_of((0, 1), (2, 3)))
    assert lines(visits, 4, 3) == [
        "fetch     b0 s0",
        "fetch     b1 s1",
        "fetch     b2 s2",
        "forward   b0 s0",
        "fetch     b3 s0",
        "forward   b1 s1",
        "fetch     b0 s1",
        "forward   b2 s2",
        "forward   b3 s0",
        "forward   b2 s2",
        "backward  b3 s0 g0",
        "offload   b3 g0",
        "fetch     b1 s0",
        "backward  b2 s2 g0",
        "offload   b2 g0",
        "forward   b0 s1",
        "backward  b1 s0 g0",
        "offload   b1 g0",
        "backward  b0 s1 g0",
        "offload   b0 g0",
    ]


@pytest.mark.parametrize("num_slots", [2, 3, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_fragment_stays_from_its_recomputation_to_its_backward(
    num_slots: int, num_micro_batches: int
) -> None:
    """What autograd saved of it points into its slot."""
    layers = layers_of(*[(2 * number, 2 * number + 1) for number in range(6)])
    visits = round_visits(layers, Round(num_micro_batches=num_micro_batches))
    program = schedule(visits, make_sizes(12), [None] * num_slots, num_gradient_buffers=2)
    held: dict[int, int] = {}
    in_backward = False
    for operation in listed(program):
        in_backward |= operation.label == "backward"
        if operation.label == "fetch":
            assert operation.slot not in held.values()
        elif operation.label == "forward" and (in_backward or operation.block == 10):
            held[operation.block] = operation.slot
        elif operation.label == "backward":
            assert held.pop(operation.block, operation.slot) == operation.slot
    check_gradient_buffers(program, 2)


def test_more_fragments_than_gradient_buffers_are_refused() -> None:
    visits = round_visits(layers_of((0, 1)), Round(num_micro_batches=2))
    with pytest.raises(AssertionError, match="more fragments than there are gradient buffers"):
        schedule(visits, make_sizes(2), [None, None], num_gradient_buffers=1)


def test_saved_activations_come_back_one_visit_ahead() -> None:
    """What is saved last is needed first, and is there still: no copy brings it back."""
    visits = round_visits(layers_of((0,), (1,), (2,), saves=True, is_recomputed=False))
    assert lines(visits, 3, 3) == [
        "fetch     b0 s0",
        "fetch     b1 s1",
        "fetch     b2 s2",
        "forward   b0 s0",
        "save      b0",
        "forward   b1 s1",
        "save      b1",
        "forward   b2 s2",
        "backward  b2 s2 g0",
        "offload   b2 g0",
        "restore   b0",
        "backward  b1 s1 g0",
        "offload   b1 g0",
        "backward  b0 s0 g0",
        "offload   b0 g0",
    ]


def test_dropped_boundaries_are_made_again_once_per_group() -> None:
    """Layers 1 and 2 have none: the first backward that needs one passes the layers before it again."""
    layers = [LayerPlan((0,)), LayerPlan((1,), drops=True), LayerPlan((2,), drops=True), LayerPlan((3,))]
    visits = round_visits(layers, Round(num_micro_batches=2))
    passed = [(visit.block, visit.micro_batch) for visit in visits if not visit.is_backward]
    assert passed == [
        *((block, micro_batch) for block in range(4) for micro_batch in (1, 0)),
        *((block, micro_batch) for block in range(2) for micro_batch in (1, 0)),
    ]
    program = schedule(visits, make_sizes(4), [None, None])
    assert program.count("fetch") == 8  # two more than without: b0 and b1 pass once more
    assert schedule(rounds(4, 1), make_sizes(4), [None, None]).count("fetch") == 6


def test_updates_at_once_follow_their_gradient() -> None:
    sizes = make_sizes(2)
    placed = schedule(rounds(2, 1), sizes, [None, None]).operations
    made: list[Any] = updated_at_once(placed, sizes, lambda *_: True, AtOnce(2, 1))
    ends = [o for o in made if o.label in ("offload", "update")]
    assert [(o.label, o.block, o.staging) for o in ends] == [
        ("offload", 1, 1),
        ("update", 1, 1),
        ("offload", 0, 0),
        ("update", 0, 0),
    ]
    assert ends[0].writes == (("staging", 1), ("squares", 1))
    assert ends[1].reads == (("staging", 1),)


def test_the_next_sum_is_loaded_while_a_backward_runs() -> None:
    program = schedule(rounds(2, 2), make_sizes(2), [None, None], num_gradient_buffers=2)
    moves = [o for o in listed(program) if o.label not in ("fetch", "forward")]
    assert [str(operation) for operation in moves] == [
        "backward  b1 s1 g0",
        "offload   b1 g0",
        "load      b1 g0 adds",
        "backward  b0 s0 g1",
        "offload   b0 g1",
        "load      b0 g1 adds",
        "backward  b1 s1 g0 adds",
        "offload   b1 g0 adds",
        "backward  b0 s0 g1 adds",
        "offload   b0 g1 adds",
    ]


def test_resident_layers_are_visited_and_move_nothing() -> None:
    sizes = [resident(), *make_sizes(3)[1:]]
    program = schedule(rounds(3, 1), sizes, [None])
    moved = {o.block for o in listed(program) if o.label in ("fetch", "offload")}
    assert moved == {1, 2}
    assert [o.slot for o in visits_of(program) if o.block == 0] == [-1, -1]
