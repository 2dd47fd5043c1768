"""The program of a step: from its first fetch to its last update and commit, as one list of operations.

Three parts make it, and the engine asks for each when it comes to it: the visits of the rounds with the
copies around them, the end of the step (gradients completed, norm, updates), and the commit to the drives.
`step_program` puts the parts of a step among many equal ones together: that list is what the planner times.
What a feature changes in a part is its pass, in `plan.program.features`; here they come one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from megatrain.config.runs import ONE_RUN, RoundSums
from megatrain.layout.host_buffers import NUM_GRADIENT_STAGING, NUM_PAGES, NUM_STATE_STAGING
from megatrain.plan.program.features.activations import with_activations_through
from megatrain.plan.program.features.drives import changed_by_step, commit_program, with_state_through
from megatrain.plan.program.features.gradients import added, home_of_sum, offload_residents, rounded_sum
from megatrain.plan.program.features.ranks import exchanged
from megatrain.plan.program.features.resident import pushed, rounded_residents
from megatrain.plan.program.features.roles import SumTaken
from megatrain.plan.program.features.updates import AtOnce, Norm, Release, Sync, update_of, updated_at_once
from megatrain.plan.program.features.waiting import (
    held,
    hold_resident,
    park,
    parked,
    take_home,
    to_drives,
    unparked,
)
from megatrain.plan.program.features.weights import fetch_residents, gathered, with_weights_through
from megatrain.plan.program.operations import Operation, Program
from megatrain.plan.program.schedule import schedule
from megatrain.plan.program.spec import StepSpec
from megatrain.plan.program.visits import Round, Visit, step_visits


def visits_program(
    spec: StepSpec,
    visits: Sequence[Visit],
    contents: Sequence[int | None],
    *,
    fetches_outer: bool = True,
    first_gradient_buffer: int = 0,
    pinned: Collection[int] = (),
    at_once: AtOnce | None = None,
    gathers: bool = True,
) -> Program:
    """Place all copies around visits.

    Args:
        spec: The specification of the step.
        visits: The visits that the model will make, in order.
        contents: The block that each slot holds at the start; None: nothing of use.
        fetches_outer: Whether the weights of outer blocks on the device are out of date.
        first_gradient_buffer: The number of the first gradient buffer to use.
        pinned: The slots that keep their content.
        at_once: The way of complete gradients to the updates that follow them at once; None: none do.
        gathers: Whether all ranks make these visits, so that they may gather weights.
    """
    placed = schedule(
        spec.with_sums(visits),
        spec.sizes,
        contents,
        num_gradient_buffers=spec.num_gradient_buffers,
        first_gradient_buffer=first_gradient_buffer,
        pinned=pinned,
        outer=spec.outer,
        saved_bytes={layer.blocks[-1]: layer.saved_bytes for layer in spec.layers},
    )
    operations = _with_gradients(spec, placed.operations)
    if at_once is not None:
        is_home = partial(_is_at, spec, "host")
        operations = updated_at_once(operations, spec.sizes, is_home, at_once, has_shares=spec.has_shares)
    if spec.activations_on_drives:
        rooms = {layer.blocks[-1]: layer.room_bytes for layer in spec.layers}
        operations = with_activations_through(operations, rooms)
    if fetches_outer:
        operations = [*fetch_residents(spec.sizes), *operations]
    if spec.gathers and gathers:
        operations = gathered(operations, spec.sizes)
    return Program(tuple(around_drives(spec, operations)), placed.contents)


def _with_gradients(spec: StepSpec, operations: Sequence[Operation]) -> Sequence[Operation]:
    """Let ranks exchange gradients, and let these wait where the choice says."""
    if spec.has_shares:
        operations = exchanged(operations, spec.sizes, spec.outer)
    if "device" in spec.tiers:
        operations = held(operations, partial(_is_at, spec, "device"))
    if "nvme" in (*spec.tiers, spec.sums):
        operations = parked(operations, spec.sizes, partial(_is_at, spec, "nvme"))
    if spec.sums == "host":
        operations = added(operations, spec.sizes)
    return operations


def _is_at(spec: StepSpec, tier: str, block: int, completes: bool) -> bool:
    return spec.tier(block, completes=completes) == tier


def complete_program(
    spec: StepSpec,
    away: Iterable[int],
    on_host: Iterable[int] = (),
    on_drives: Iterable[int] = (),
    *,
    at_once: AtOnce | None = None,
) -> list[Operation]:
    """List what completes the gradients that the rounds have left where they add up.

    Args:
        spec: The specification of the step.
        away: The resident blocks whose sums are wanted at home, or rounded where they are to wait.
        on_host: The blocks whose rounds have added up on the host.
        on_drives: The blocks whose sums wait there.
        at_once: The way of these gradients to the updates that follow them at once; None: none do.
    """
    operations: list[Operation] = []
    sizes = spec.sizes
    for number, block in enumerate(away):
        if spec.tier(block) == "device":
            operations.append(hold_resident(block))
            continue
        staging = -1 if at_once is None else at_once.staging(number)
        operations += offload_residents(sizes, [block], staging=staging, has_shares=spec.has_shares)
        if at_once is not None:
            operations += _updated(spec, block, staging=staging)
    operations += [rounded_sum(block, sizes[block]) for block in on_host]
    for number, block in enumerate(on_drives):
        size, staging = sizes[block], number % NUM_GRADIENT_STAGING
        operations += [unparked(block, size, staging, completes=False), rounded_sum(block, size, staging)]
        if spec.tier(block) != "host":
            operations.append(park(block, size, staging))
    return around_drives(spec, operations)


def offload_of_sum(spec: StepSpec, taken: SumTaken) -> list[Operation]:
    """List the copies of a sum whose round has not ended as foreseen to where later visits load it from.

    Args:
        spec: The specification of the step.
        taken: The operation that was foreseen to take the sum out of its buffer.
    """
    size, tier = spec.sizes[taken.block], spec.tier(taken.block, completes=False)
    if tier == "device":
        return [taken]
    # in fp32 a place of complete gradients holds a sum like any other
    left = home_of_sum(taken, size.accumulator_bytes, completes=not spec.keeps_wide_sums)
    return to_drives(left, size, max(taken.staging, 0)) if tier == "nvme" else [left]


def update_program(
    spec: StepSpec,
    blocks: Sequence[int],
    updated: Collection[int] = (),
    held: Collection[int] = (),
    on_drives: Collection[int] = (),
) -> list[Operation]:
    """List the end of a step whose gradients are complete: their norm, then the updates.

    Args:
        spec: The specification of the step.
        blocks: The blocks with a gradient, in any order; updates come as the next forward wants the blocks,
            and what is in use during a whole pass comes first.
        updated: The blocks that were updated at once already.
        held: The blocks whose gradients wait on the device: each is taken home before its update, and the
            copy need not wait for the norm.
        on_drives: The blocks whose gradients wait there: each is read before its update, ahead of the norm
            too.
    """
    outer = {*spec.outer, *spec.ends.embeddings}
    ordered = sorted(blocks, key=lambda block: (block not in outer, block))
    operations = rounded_residents(spec.sizes, blocks)
    norm = Norm(blocks=tuple(ordered))
    if spec.is_immediate:
        later = [_updated(spec, block) for block in ordered if block not in updated]
        return [*operations, *(operation for update in later for operation in update), norm]
    operations.append(norm)
    staging = 0
    for block in ordered:
        size = spec.sizes[block]
        if block in held:
            operations.append(take_home(block, size, staging))
        elif block in on_drives:
            operations.append(unparked(block, size, staging))
        else:
            operations += _updated(spec, block)
            continue
        operations += _updated(spec, block, staging=staging)
        staging = (staging + 1) % NUM_GRADIENT_STAGING
    if not spec.clips:
        operations.append(Release(blocks=tuple(ordered)))
    return around_drives(spec, operations)


def _updated(spec: StepSpec, block: int, *, staging: int = -1) -> list[Operation]:
    return update_of(
        block,
        spec.sizes[block],
        staging=staging,
        follows_norm=not spec.is_immediate,
        has_shares=spec.has_shares,
    )


def sync_program(spec: StepSpec, newer: Iterable[int]) -> list[Operation]:
    """List what makes the host state whole: blocks that are `newer` on the device come home."""
    shared = spec.has_shares
    operations = [part for block in newer for part in pushed(block, spec.sizes[block], has_shares=shared)]
    return [*operations, Sync(blocks=tuple(range(len(spec.sizes))))]


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
        spec: The specification of the step.
        rounds: The numbers of micro-batches that pass in each visit of each round.
        sums: The partial sums that each round loads and leaves; None: there is one, that of one run.
        num_passes_before: The number of passes without gradients that come before the losses of each round.
        in_pieces: Whether a commit is listed piece by piece; see `commit_program`.
        commit_every: The number of steps between commits of state on drives; None: there are none.
    """

    def visits_of(micro_batches: Sequence[int], loads: bool, completes: bool) -> list[Visit]:
        round_ = Round(
            num_micro_batches=len(micro_batches),
            num_passes_before=num_passes_before,
            heads_in_turn=spec.heads_in_turn,
            loads=loads,
            completes=completes,
        )
        visits = spec.visits(round_)
        if all(count == 1 for count in micro_batches):
            return visits
        return [replace(visit, num_micro_batches=micro_batches[visit.micro_batch]) for visit in visits]

    visits = step_visits(visits_of, rounds, sums or [ONE_RUN] * len(rounds))
    num_staging = NUM_GRADIENT_STAGING if len(rounds) == 1 else 0
    at_once = AtOnce(num_staging) if spec.is_immediate else None
    program = visits_program(spec, visits, [None] * spec.num_slots, at_once=at_once)
    trained = [block for block, size in enumerate(spec.sizes) if size.is_trained]
    inside = [block for block in trained if spec.sizes[block].is_streamed]
    away = [b for b in trained if b in spec.outer and not spec.sizes[b].updates_on_device]
    operations = [*program.operations]
    after = None if at_once is None else AtOnce(num_staging, len(inside))
    operations += complete_program(spec, away, at_once=after)
    operations += update_program(
        spec,
        trained,
        updated=() if at_once is None else [*inside, *away],
        held=[block for block in (*inside, *away) if spec.tier(block) == "device"],
        on_drives=[block for block in inside if spec.tier(block) == "nvme"],
    )
    if spec.updates == "serial":
        operations += sync_program(spec, [b for b in trained if spec.sizes[b].updates_on_device])
    if spec.drives is not None and commit_every is not None:
        changed = changed_by_step(spec)
        operations += commit_program(spec, changed, in_pieces=in_pieces, every=commit_every)
    return Program(tuple(operations), (None,) * spec.num_slots)


def around_drives(spec: StepSpec, operations: Sequence[Operation]) -> list[Operation]:
    """Put reads before updates and fetches of what is on drives, and writes behind updates."""
    drives = spec.drives
    if drives is None:
        return list(operations)
    sizes: Mapping[int, int] = {block: drives.update_bytes(block) for block in drives.state}
    through = with_state_through(operations, drives.state, sizes, NUM_STATE_STAGING)
    return with_weights_through(through, drives.working, drives.working_bytes, NUM_PAGES)
