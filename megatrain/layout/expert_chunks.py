"""How experts are cut into chunks of whole experts, and in which order their blocks are passed."""

from __future__ import annotations

import math
from collections.abc import Iterable

from megatrain.errors import ConfigError
from megatrain.layout.host_buffers import PAGE_BYTES

_ALIGNMENT = PAGE_BYTES // 2
"""A part of a matrix has a multiple of so many elements, whole pages in every dtype: so parts of a parameter
that lie one after the other are the parameter, in RAM and on drives."""


def least_chunk(numel_per_expert: Iterable[int]) -> int:
    """Return the number of experts of which a chunk has a multiple.

    Args:
        numel_per_expert: The elements of an expert in each matrix.
    """
    return math.lcm(*(_ALIGNMENT // math.gcd(_ALIGNMENT, numel) for numel in numel_per_expert))


def chunk_ranges(num_experts: int, least: int, number: int) -> list[range]:
    """Cut experts into at most so many chunks of nearly equal size; one: they do not come apart.

    Args:
        num_experts: The number of experts of a layer.
        least: The number of which a chunk has a multiple, see `least_chunk`.
        number: The most chunks.
    """
    size = least * math.ceil(num_experts / number / least)
    return [range(start, min(start + size, num_experts)) for start in range(0, num_experts, size)]


def not_apart(number: int, why: str) -> ConfigError:
    """Return the error of chunks of experts that there are not.

    Args:
        number: The chunks that are wanted.
        why: The reason why no layer has any.
    """
    return ConfigError(f"expert_chunks is {number}, but {why}; use expert_chunks=1")


def passing_order(num_chunks: int, num_blocks: int) -> list[int]:
    """Return the blocks of a layer whose experts come apart, in the order of its forward.

    In the order of the state they are: what is beside the experts, the parts of the first matrix, those of
    the second, and what runs behind the experts, if anything does. Chunks are passed from the last to the
    first, so that the backward passes them in order.
    """
    parts = [place for n in reversed(range(num_chunks)) for place in (1 + n, 1 + num_chunks + n)]
    return [0, *parts, *range(1 + 2 * num_chunks, num_blocks)]
