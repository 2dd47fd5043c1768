"""The program of a step: from its first fetch to its last update and commit, as one list of operations.

Three parts make it, and the engine asks for each when it comes to it: the visits of the rounds with the
copies around them, the end of the step (gradients completed, norm, updates), and the commit to the drives.
`step_program` puts the parts of a step among many equal ones together: that list is what the planner times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from megatrain.config.runs import ONE_RUN, RoundSums
from megatrain.layout.host_buffers import (
    NUM_GRADIENT_STAGING,
    NUM_PAGES,
    NUM_STATE_STAGING,
    pieces_of,
)
from megatrain.plan.program.block_size import BlockSize
from megatrain.plan.program.drive_traffic import (
    with_activations_through,
    with_state_through,
    with_weights_through,
)
from megatrain.plan.program.kinds import Kind
from megatrain.plan.program.operations import Operation, Program
from megatrain.plan.program.schedule import gathered, parked, schedule, spread, unparked
from megatrain.plan.program.spec import StepSpec
from megatrain.plan.program.visits import Visit, step_visits


def visits_program(
    spec: StepSpec,
    visits: Sequence[Visit],
    contents: Sequence[int | None],
    *,
    fetches_outer: bool = True,
    first_gradient_buffer: int = 0,
    pinned: Collection[int] = (),
    updates_at_once: bool = False,
    num_staging: int = 0,
    first_staging: int = 0,
    gathers: bool = True,
) -> Program:
    """Place all copies around visits.

    Args:
        spec: Of the step.
        visits: What the model will do, in order.
        contents: What each slot holds at the start.
        fetches_outer: The weights of outer blocks on the device are out of date.
        first_gradient_buffer: As in `schedule`, like all that follows.
        pinned: Slots that keep their content.
        updates_at_once: Every complete gradient is followed by its update.
        num_staging: Host buffers through which complete gradients pass.
        first_staging: The first one to use.
        gathers: All ranks make these visits, so they may gather weights.
    """
    placed = schedule(
        spec.with_sums(visits),
        spec.sizes,
        contents,
        num_gradient_buffers=spec.num_gradient_buffers,
        first_gradient_buffer=first_gradient_buffer,
        pinned=pinned,
        num_staging=num_staging,
        first_staging=first_staging,
        updates_at_once=updates_at_once,
        tier_of=lambda block, completes: spec.tier(block, completes=completes),
        outer=spec.outer,
        saved_bytes={layer.blocks[-1]: layer.saved_bytes for layer in spec.layers},
        has_shares=spec.num_ranks > 1,
    )
    operations: Sequence[Operation] = placed.operations
    if spec.activations_on_drives:
        rooms = {layer.blocks[-1]: layer.room_bytes for layer in spec.layers}
        operations = with_activations_through(operations, rooms)
    if fetches_outer:
        operations = [*fetch_residents(spec.sizes), *operations]
    if spec.gathers and gathers:
        operations = gathered(operations, spec.sizes)
    return Program(tuple(around_drives(spec, operations)), placed.contents)


def fetch_residents(sizes: Sequence[BlockSize], blocks: Iterable[int] | None = None) -> list[Operation]:
    """List the copies that bring resident blocks' new weights to the device, once per step."""
    return [
        Operation(kind=Kind.FETCH, block=block, nbytes=sizes[block].fetch_bytes)
        for block in (range(len(sizes)) if blocks is None else blocks)
        if not sizes[block].is_streamed and not sizes[block].updates_on_device
    ]


def complete_program(
    spec: StepSpec,
    away: Iterable[int],
    on_host: Iterable[int] = (),
    on_drives: Iterable[int] = (),
    *,
    updates_at_once: bool = False,
    num_staging: int = 0,
    first_staging: int = 0,
) -> list[Operation]:
    """List what completes the gradients that the rounds have left where they add up.

    Args:
        spec: Of the step.
        away: Resident blocks whose sums are wanted at home, or rounded where they are to wait.
        on_host: Blocks whose rounds have added up on the host.
        on_drives: Blocks whose sums wait there.
        updates_at_once: Each is updated as soon as it is complete.
        num_staging: Host buffers through which gradients then pass, used in turn; 0: the gradient plane.
        first_staging: The first one to use.
    """
    operations: list[Operation] = []
    has_shares = spec.num_ranks > 1
    for number, block in enumerate(away):
        if spec.tier(block) == "device":
            operations.append(Operation(kind=Kind.HOLD, block=block))
            continue
        staging = (first_staging + number) % num_staging if updates_at_once and num_staging else -1
        operations += offload_residents(spec.sizes, [block], staging=staging, has_shares=has_shares)
        if updates_at_once:
            operations += spread(_update(spec, block, staging=staging), spec.sizes[block])
    for block in on_host:  # read in fp32, written and read again in the working dtype
        nbytes = spec.sizes[block].accumulator_bytes + 2 * spec.sizes[block].offload_bytes
        operations.append(Operation(kind=Kind.ROUND, block=block, nbytes=nbytes))
    for number, block in enumerate(on_drives):
        size, staging = spec.sizes[block], number % NUM_GRADIENT_STAGING
        nbytes = size.accumulator_bytes + 2 * size.offload_bytes
        rounding = Operation(kind=Kind.ROUND, block=block, staging=staging, nbytes=nbytes)
        operations += [unparked(block, size, staging, completes=False), rounding]
        if spec.tier(block) != "host":
            operations.append(replace(unparked(block, size, staging), kind=Kind.PARK))
    return around_drives(spec, operations)


def offload_residents(
    sizes: Sequence[BlockSize], blocks: Sequence[int], *, staging: int = -1, has_shares: bool = False
) -> list[Operation]:
    """List the copies that take the gradients of resident `blocks` home, once per step."""
    return [
        Operation(
            kind=Kind.OFFLOAD,
            block=block,
            loads=True,
            staging=staging,
            is_share=has_shares,
            nbytes=sizes[block].offload_bytes,
        )
        for block in blocks
    ]


def offload_of_sum(spec: StepSpec, operation: Operation) -> list[Operation]:
    """List the copies of a sum whose round has not ended as foreseen to where later visits load it from.

    Args:
        spec: Of the step.
        operation: OFFLOAD or HOLD that was foreseen.
    """
    size, tier = spec.sizes[operation.block], spec.tier(operation.block, completes=False)
    if tier == "device":
        return [operation]
    # in fp32 a place of complete gradients holds a sum like any other
    left = replace(operation, kind=Kind.OFFLOAD, completes=not spec.keeps_wide_sums, waiting=-1)
    if tier == "nvme":
        return parked(left, size, max(operation.staging, 0))
    return [replace(left, staging=-1, nbytes=size.accumulator_bytes)]


def update_program(
    spec: StepSpec,
    blocks: Sequence[int],
    *,
    updated: Collection[int] = (),
    held: Collection[int] = (),
    on_drives: Collection[int] = (),
) -> list[Operation]:
    """List the end of a step whose gradients are complete: their norm, then the updates.

    Args:
        spec: Of the step.
        blocks: Those with a gradient, in any order; updates come as the next forward wants the blocks, and
            what is in use during a whole pass comes first.
        updated: Blocks that were updated at once already.
        held: Blocks whose gradients wait on the device: each is taken home before its update, and the copy
            need not wait for the norm.
        on_drives: Blocks whose gradients wait there: each is read before its update, ahead of the norm too.
    """
    outer = {*spec.outer, *spec.ends.embeddings}
    ordered = sorted(blocks, key=lambda block: (block not in outer, block))
    on_device = [block for block in sorted(blocks) if spec.sizes[block].updates_on_device]
    operations = [Operation(kind=Kind.ROUND, block=block, on_device=True) for block in on_device]
    norm = Operation(kind=Kind.NORM, blocks=tuple(ordered))
    if spec.is_immediate:
        later = [_update(spec, block) for block in ordered if block not in updated]
        return [
            *operations,
            *(part for update in later for part in spread(update, spec.sizes[update.block])),
            norm,
        ]
    operations.append(norm)
    staging = 0
    for block in ordered:
        size = spec.sizes[block]
        if block in held:
            arrives = Operation(
                kind=Kind.OFFLOAD,
                block=block,
                waiting=block if size.is_streamed else -1,
                staging=staging,
                is_held=True,
                nbytes=size.offload_bytes,
            )
        elif block in on_drives:
            arrives = unparked(block, size, staging)
        else:
            operations += spread(_update(spec, block), size)
            continue
        operations += [arrives, *spread(_update(spec, block, staging=staging), size)]
        staging = (staging + 1) % NUM_GRADIENT_STAGING
    if not spec.clips:
        operations.append(Operation(kind=Kind.RELEASE, blocks=tuple(ordered)))
    return around_drives(spec, operations)


def _update(spec: StepSpec, block: int, *, staging: int = -1) -> Operation:
    size = spec.sizes[block]
    return Operation(
        kind=Kind.UPDATE,
        block=block,
        staging=staging,
        follows_norm=not spec.is_immediate,
        is_share=spec.num_ranks > 1,
        on_device=size.updates_on_device,
        nbytes=0 if size.updates_on_device else size.update_bytes,
    )


def sync_program(spec: StepSpec, newer: Iterable[int]) -> list[Operation]:
    """List what makes the host state whole: blocks that are `newer` on the device come home."""
    operations = []
    for block in newer:
        is_share, nbytes = spec.num_ranks > 1, spec.sizes[block].whole_bytes
        operations.append(Operation(kind=Kind.PUSH, block=block, is_share=is_share, nbytes=nbytes))
        if is_share:
            operations.append(Operation(kind=Kind.SPREAD, block=block))
    return [*operations, Operation(kind=Kind.SYNC, blocks=tuple(range(len(spec.sizes))))]


def commit_program(
    spec: StepSpec, changed: Iterable[tuple[int, bool]], *, in_pieces: bool = True, every: int = 1
) -> list[Operation]:
    """List a commit: what lives in RAM is written through the buffers of state, then all is sealed.

    Args:
        spec: Of the step, with state on drives.
        changed: (block, is it the working weights) of what lives in RAM and differs from its image.
        in_pieces: False: each part of a block at once, which takes the same time and is a shorter list.
        every: Steps that share the commit: as one of them is planned, it moves its part of the bytes.
    """
    drives = spec.drives
    assert drives is not None
    operations = []
    turn = 0
    for block, is_working in changed:
        nbytes = drives.working_bytes[block] if is_working else drives.state_bytes[block]
        first = len(pieces_of(drives.state_bytes[block])) if is_working and in_pieces else 0
        start = 0
        for number, size in enumerate(pieces_of(nbytes) if in_pieces else [nbytes] * (nbytes > 0)):
            own = drives.piece_bytes(block, size, start) // every
            spill = Operation(
                kind=Kind.SPILL, block=block, drive_staging=turn, piece=first + number, nbytes=own
            )
            operations += [spill, replace(spill, kind=Kind.WRITE)]
            turn = (turn + 1) % NUM_STATE_STAGING
            start += size
    blocks = tuple(range(len(spec.sizes)))
    return [*operations, Operation(kind=Kind.SEAL), Operation(kind=Kind.COMMIT, blocks=blocks)]


def step_program(
    spec: StepSpec,
    rounds: Sequence[Sequence[int]],
    *,
    sums: Sequence[RoundSums] | None = None,
    num_passes_before: int = 0,
    in_pieces: bool = True,
    commit_every: int | None = 1,
) -> Program:
    """List a whole step among many equal ones.

    Args:
        spec: Of the step.
        rounds: How many micro-batches pass in each visit of each round.
        sums: What each does with partial sums of a gradient; None: there is one, that of one run.
        num_passes_before: Passes without gradients that come before the losses of each round.
        in_pieces: As in `commit_program`.
        commit_every: Steps between commits of state on drives; None: there are none.
    """

    def visits_of(micro_batches: Sequence[int], loads: bool, completes: bool) -> list[Visit]:
        before = num_passes_before
        return spec.visits(micro_batches, loads=loads, completes=completes, num_passes_before=before)

    visits = step_visits(visits_of, rounds, sums or [ONE_RUN] * len(rounds))
    at_once = spec.is_immediate
    num_staging = NUM_GRADIENT_STAGING if at_once and len(rounds) == 1 else 0
    program = visits_program(
        spec,
        visits,
        [None] * spec.num_slots,
        updates_at_once=at_once,
        num_staging=num_staging,
    )
    trained = [block for block, size in enumerate(spec.sizes) if size.is_trained]
    inside = [block for block in trained if spec.sizes[block].is_streamed]
    away = [b for b in trained if b in spec.outer and not spec.sizes[b].updates_on_device]
    operations = [*program.operations]
    operations += complete_program(
        spec,
        away,
        updates_at_once=at_once,
        num_staging=num_staging,
        first_staging=len(inside) % num_staging if num_staging else 0,
    )
    operations += update_program(
        spec,
        trained,
        updated=[*inside, *away] if at_once else (),
        held=[block for block in (*inside, *away) if spec.tier(block) == "device"],
        on_drives=[block for block in inside if spec.tier(block) == "nvme"],
    )
    if spec.updates == "serial":
        operations += sync_program(spec, [b for b in trained if spec.sizes[b].updates_on_device])
    if spec.drives is not None and commit_every is not None:
        changed = changed_by_step(spec)
        operations += commit_program(spec, changed, in_pieces=in_pieces, every=commit_every)
    return Program(tuple(operations), (None,) * spec.num_slots)


def changed_by_step(spec: StepSpec) -> list[tuple[int, bool]]:
    """List what a step changes of the state in RAM, as `commit_program` takes it."""
    drives = spec.drives
    assert drives is not None
    return [
        (block, is_working)
        for block, size in enumerate(spec.sizes)
        for is_working, there in ((False, drives.state), (True, drives.working))
        if size.is_trained and block not in there
    ]


def around_drives(spec: StepSpec, operations: Sequence[Operation]) -> list[Operation]:
    """Put reads before updates and fetches of what is on drives, and writes behind updates."""
    drives = spec.drives
    if drives is None:
        return list(operations)
    sizes: Mapping[int, int] = {block: drives.update_bytes(block) for block in drives.state}
    through = with_state_through(operations, drives.state, sizes, NUM_STATE_STAGING)
    return with_weights_through(through, drives.working, drives.working_bytes, NUM_PAGES)
