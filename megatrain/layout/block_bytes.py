"""The bytes of a block's planes, buffers and updates, from four numbers; those of several blocks add up."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.config.optimizers.optimizer import ELEMENT_BYTES, Optimizer

ALIGNMENT = 64
"""Elements; 128 bytes of bf16, 256 of fp32: whole cache lines and whole vectors for every dtype."""


def aligned(numel: int) -> int:
    """Round a number of elements up to the alignment."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockBytes:
    """The size of a block. The planner counts it, the engine lays it out, and all bytes follow from it."""

    working_bytes: int = 0
    """Bytes of the working weights on the device, padding included."""
    num_split: int = 0
    """State elements of bf16 parameters, padding included: they have a remainder."""
    num_state: int = 0
    """State elements in all, padding included; 0 if nothing of the block is trained."""
    num_scales: int = 0
    """Scales of a plane that has them: one for every 256 elements of a parameter, or less."""
    decoded_bytes: int = 0
    """The part of `working_bytes` that the device makes of codes."""
    codes_bytes: int = 0
    """Bytes of these codes and their scales, which the host keeps in place of it."""

    def __add__(self, other: BlockBytes) -> BlockBytes:
        """Return the sizes of a block that has the parameters of both."""
        return BlockBytes(
            working_bytes=self.working_bytes + other.working_bytes,
            num_split=self.num_split + other.num_split,
            num_state=self.num_state + other.num_state,
            num_scales=self.num_scales + other.num_scales,
            decoded_bytes=self.decoded_bytes + other.decoded_bytes,
            codes_bytes=self.codes_bytes + other.codes_bytes,
        )

    def scaled(self, numerator: int, denominator: int) -> BlockBytes:
        """Return the sizes of a part, or a multiple, of a block whose parts are whole cache lines."""
        numbers = (self.working_bytes, self.num_split, self.num_state, self.num_scales)
        working, split, state, scales = (-(-number * numerator // denominator) for number in numbers)
        return BlockBytes(
            working_bytes=working, num_split=aligned(split), num_state=aligned(state), num_scales=scales
        )

    @property
    def plain_bytes(self) -> int:
        """Return the bytes of the working weights that are the same on the host and on the device."""
        return self.working_bytes - self.decoded_bytes

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of the working weights as the host keeps them, which is what is fetched."""
        return self.plain_bytes + self.codes_bytes

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of the complete gradient: each parameter's in its working dtype."""
        return 2 * self.num_split + 4 * (self.num_state - self.num_split)

    @property
    def accumulator_bytes(self) -> int:
        """Return the bytes of a gradient that is still adding up, in fp32."""
        return 4 * self.num_state

    def added_bytes(self, *, completes: bool) -> int:
        """Return the bytes of memory that adding a gradient to the sum on the host reads and writes.

        The gradient and the sum are read, and what is written is the sum, or, if it is complete, what that
        is in the working dtype.
        """
        written = self.gradient_bytes if completes else self.accumulator_bytes
        return self.gradient_bytes + self.accumulator_bytes + written

    @property
    def remainder_bytes(self) -> int:
        """Return the bytes of the remainder."""
        return 2 * self.num_split

    def plane_bytes(self, optimizer: Optimizer, name: str) -> int:
        """Return the bytes of one of the optimizer's planes."""
        plane = optimizer.planes[name]
        return plane.numel(self.num_state, self.num_scales) * ELEMENT_BYTES[plane.element]

    def optimizer_bytes(self, optimizer: Optimizer) -> int:
        """Return the bytes of all of the optimizer's planes, with their scales."""
        return sum(self.plane_bytes(optimizer, name) for name in optimizer.planes)

    def update_bytes(self, optimizer: Optimizer) -> int:
        """Return the bytes of memory that an update reads and writes: masters, planes, and the gradient once.

        Every optimizer that updates element by element does it in one pass.
        """
        masters = 4 * self.num_state  # as working weights and remainders, or in fp32
        return 2 * (masters + self.optimizer_bytes(optimizer)) + self.gradient_bytes

    def fused_update_bytes(self, optimizer: Optimizer) -> int:
        """Return the bytes of device memory of an update there in one kernel, which reads sums in fp32."""
        return self.update_bytes(optimizer) - self.gradient_bytes + self.accumulator_bytes
