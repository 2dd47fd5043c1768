"""Reads of drives in a program: as early as the buffers allow, and never over what is still in use."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.plan.drives import with_state_through, with_weights_through
from megatrain.plan.program import Kind, Lane, Operation
from megatrain.plan.schedule import optimizer_program

SIZES = [100 + block for block in range(8)]

OPERATIONS = st.lists(
    st.builds(
        Operation,
        kind=st.sampled_from([Kind.FETCH, Kind.FORWARD, Kind.OFFLOAD, Kind.UPDATE]),
        block=st.integers(0, 7),
        slot=st.integers(0, 1),
    ),
    max_size=30,
)


@given(OPERATIONS, st.sets(st.integers(0, 7)), st.integers(1, 4), st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_read_is_as_early_as_its_buffer_allows(
    operations: list[Operation], there: set[int], num_buffers: int, is_state: bool
) -> None:
    through = with_state_through if is_state else with_weights_through
    made = through(operations, there, SIZES, num_buffers)
    needs, reads = (Kind.UPDATE, Kind.READ) if is_state else (Kind.FETCH, Kind.PAGE)
    wanted = [operation for operation in operations if operation.kind is needs and operation.block in there]
    added = [operation for operation in made if operation.kind in (reads, Kind.WRITE)]
    assert [o.block for o in made if o.kind not in (reads, Kind.WRITE)] == [o.block for o in operations]
    assert [o.block for o in added if o.kind is reads] == [o.block for o in wanted]
    assert all(operation.nbytes == SIZES[operation.block] for operation in added)
    holds: dict[int, int] = {}
    for operation in made:
        buffer = operation.drive_staging if is_state else operation.page
        if operation.kind is reads:
            assert buffer not in holds, "read over what was not used up"
            holds[buffer] = operation.block
        elif operation.kind is needs and operation.block in there:
            assert holds[buffer] == operation.block
            if not is_state:
                del holds[buffer]
        elif operation.kind is Kind.WRITE:
            assert holds.pop(buffer) == operation.block
    assert not holds
    first = next((place for place, o in enumerate(made) if o.kind is needs and o.block in there), 0)
    ahead = sum(operation.kind is reads for operation in made[:first])
    assert ahead == min(num_buffers, len(wanted)), "not as many reads ahead as there are buffers"


def test_an_optimizer_program_reads_two_blocks_ahead_and_writes_behind() -> None:
    made = with_state_through(optimizer_program([0, 1, 2, 3]), {0, 1, 3}, SIZES, 3)
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
