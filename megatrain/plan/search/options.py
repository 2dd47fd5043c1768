"""What may be tried of each field of a choice, and which choices the engine can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatrain.config.choice import AUTO, Choice
from megatrain.layout.expert_chunks import not_apart
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.search.placing import may_sum_on_drives, may_wait_elsewhere
from megatrain.plan.search.request import Request


def is_allowed(request: Request, choice: Choice) -> bool:
    """Return whether the engine can run a choice; what fits is another question."""
    parts, together = parts_of(request, choice)
    if choice.num_slots < parts and choice.expert_chunks > 1:
        return False
    if choice.lockstep > 1 and choice.num_gradient_buffers < together:
        return False  # the gradients of a layer's fragments add up at the same time
    if choice.expert_chunks > 1 and any(not policy.keeps_boundary for policy in choice.policies):
        return False
    if choice.outer_streams and (choice.outer_resident or not may_stream_outer(request)):
        return False
    if not may_be_resident(request, choice) and (choice.outer_resident or choice.resident_layers):
        return False
    if choice.has_scratch_on_drives and not request.may_use_drives:
        return False
    if choice.sums == "nvme" and not may_sum_on_drives(request):
        return False
    if any(place != "host" for place in choice.gradients):
        return may_wait_elsewhere(request, choice)
    return True


def most_fragments(request: Request) -> int:
    """Return the largest number of fragments of a layer."""
    return max(len(layer.fragments) for layer in request.anatomy.layers)


def parts_of(request: Request, choice: Choice) -> tuple[int, int]:
    """Return how many blocks of a layer, and how many of its sums, are on the device together."""
    return parts_in(most_fragments(request), choice.fragments, choice.expert_chunks)


def parts_in(most: int, fragments: bool, expert_chunks: int) -> tuple[int, int]:
    """Return the same for layers of so many fragments at most."""
    if expert_chunks > 1:
        return 3, 2  # what is beside the experts, and the two matrices of a chunk; the sums of these
    return (most, most) if fragments else (1, 1)


def as_apart(choice: Choice, anatomy: Anatomy) -> Choice:
    """Return a choice with the number of chunks in which experts come, if it is decided: at most as many.

    Raises:
        ConfigError: The choice wants chunks of experts that stay whole.
    """
    wanted = choice.given.get("expert_chunks", 1)
    if wanted == 1:
        return choice
    number = max(layer.num_chunks for layer in anatomy.as_split(choice).layers)
    if not number:
        raise not_apart(wanted, anatomy.experts_whole)
    return replace(choice, expert_chunks=number)


_CHUNK_BYTES = (1 << 30, 1 << 29)
"""Bytes of a chunk of experts that are tried: smaller ones take longer to launch than to copy."""


def chunk_counts(request: Request) -> list[int]:
    """List into how many chunks experts may come apart: what is decided, or what is worth a look."""
    given, nbytes = request.choice.expert_chunks, request.anatomy.chunked_bytes
    if given != AUTO:
        return [given] if given > 1 else []
    if request.spec.is_cpu or request.choice.fragments is True:
        return []
    return [number for number in dict.fromkeys(-(-nbytes // each) for each in _CHUNK_BYTES) if number > 1]


def may_be_resident(request: Request, choice: Choice) -> bool:
    """Return whether blocks may be on the device for good: not from drives, nor in shares that cut scales."""
    return not choice.uses_drives and (not request.optimizer.has_scales or request.batch.num_ranks == 1)


def values_of(given: Any, values: Sequence[Any]) -> list[Any]:
    """Return what is decided of a field, or else what may be tried."""
    return list(values) if given == AUTO else [given]


def decided(given: Any, otherwise: Any) -> Any:
    """Return what is decided of a field, or else a first value."""
    return otherwise if given == AUTO else given


def outer_options(request: Request) -> list[bool]:
    """List where outer blocks may update; the memory of a CPU would only hold their state twice."""
    return [False] if request.spec.is_cpu else [True, False]


def may_stream_outer(request: Request) -> bool:
    """Return whether embedding and head can stream: not if they are tied."""
    return {part.kind for part in request.anatomy.outer if part.may_stream} == {"embedding", "head"}


def stream_options(request: Request) -> list[bool]:
    """List whether outer blocks may stream; to a CPU they would only be copied."""
    return [False, True] if may_stream_outer(request) and not request.spec.is_cpu else [False]


def lockstep_sizes(request: Request) -> list[int]:
    """List numbers of micro-batches per round: all, half, a quarter, ..., one."""
    numbers = [request.batch.num_micro_batches]
    while numbers[-1] > 1:
        numbers.append(-(-numbers[-1] // 2))
    return numbers


def slot_counts(num_blocks: int, parts: int) -> list[int]:
    """List numbers of slots: one more than the parts of a layer first."""
    numbers = [parts + 1, 2 * parts + 1, 4 * parts, 8 * parts, num_blocks, parts]
    return [n for n in dict.fromkeys(numbers) if n <= max(num_blocks, parts + 1)]
