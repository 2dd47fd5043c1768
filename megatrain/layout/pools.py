"""The bytes of every pool on device and host: one function for each.

Planning, the check before anything is allocated, and allocation call the same functions, so what they say is
equal by construction. A function is of one block, as are the places and the parts of planes that are
allocated; buffers that blocks share are as large as the largest of their blocks.
"""

from __future__ import annotations

from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.blocks import aligned
from megatrain.layout.moments import MomentFormat, moment_planes

# -- on the device -------------------------------------------------------------------------------------------


def slot(sizes: BlockBytes) -> int:
    """Return the bytes of a slot that holds a block's weights."""
    return sizes.working_bytes


def resident_weights(sizes: BlockBytes) -> int:
    """Return the bytes of a block's weights that stay on the device."""
    return sizes.working_bytes


def resident_gradient(sizes: BlockBytes) -> int:
    """Return the bytes in which the gradients of a block that stays on the device add up."""
    return sizes.accumulator_bytes


def resident_state(sizes: BlockBytes, moments: MomentFormat) -> int:
    """Return the bytes of remainder and moments of a block that is updated on the device."""
    return sizes.remainder_bytes + sizes.moment_bytes(moments)


def gradient_buffer(sizes: BlockBytes, is_wide: bool) -> int:
    """Return the bytes of a gradient buffer for a block; `is_wide`: gradients add up there in fp32."""
    return sizes.accumulator_bytes if is_wide else sizes.gradient_bytes


def waiting_gradient(sizes: BlockBytes) -> int:
    """Return the bytes in which a block's complete gradient waits on the device for the norm."""
    return sizes.gradient_bytes


# -- planes on the host --------------------------------------------------------------------------------------


def working_plane(sizes: BlockBytes) -> int:
    """Return the bytes of a block's working weights."""
    return sizes.working_bytes


def remainder_plane(sizes: BlockBytes) -> int:
    """Return the bytes of a block's remainder."""
    return sizes.remainder_bytes


def moment_plane(sizes: BlockBytes, plane: str, moments: MomentFormat) -> int:
    """Return the bytes of a block in one of the planes that a format of moments has."""
    numel, dtype = moment_planes(sizes.num_state, sizes.num_scales, moments)[plane]
    return numel * dtype.itemsize


def gradient_plane(sizes: BlockBytes) -> int:
    """Return the bytes of a block's complete gradient."""
    return sizes.gradient_bytes


def accumulator_plane(sizes: BlockBytes) -> int:
    """Return the bytes of a block's gradient that adds up over rounds."""
    return sizes.accumulator_bytes


def gradient_staging(sizes: BlockBytes) -> int:
    """Return the bytes of a buffer through which a block's gradient passes on its way to its update."""
    return aligned(sizes.gradient_bytes)
