"""What `auto` means: simple rules that fill the device's memory. They do not weigh time against bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from megatrain.config.choice import Activations, Choice, read_choice
from megatrain.errors import ConfigError
from megatrain.hardware import host_memory
from megatrain.layout import pools
from megatrain.layout.blocks import BlockLayout
from megatrain.layout.moments import MomentFormat
from megatrain.model.blocks import Block
from megatrain.model.head import LOGITS_BYTES
from megatrain.stream.bind import residency_of
from megatrain.stream.lanes import Lanes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SHARE = 0.85
"""Of what is free: the rest is for the allocator's rounding and what libraries take."""

_HIDING_TOKENS = 12_000
"""Tokens of a round from which copies hide behind compute: memory then does more for kept activations."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What passes a layer together."""

    tokens: int
    """Of a micro-batch; 0: not known."""
    num_micro_batches: int


@dataclass(frozen=True, slots=True)
class Room:
    """The device memory of a run, as far as it is decided."""

    lanes: Lanes
    blocks: Sequence[Block]
    layouts: Sequence[BlockLayout]
    layers: Sequence[Sequence[int]]
    num_slots: int
    num_gradient_buffers: int
    config: PretrainedConfig
    batch: Batch
    boundaries: str = "device"
    moments: MomentFormat = MomentFormat.FP32

    def left(self, residents: frozenset[int], num_kept: int = 0) -> float | None:
        """Return the bytes left beside `residents` and the activations of kept layers; None: no limit."""
        available = self.lanes.available_bytes()
        if available is None:
            return None
        sizes = pools.device_pools(
            residency_of(self.blocks, self.layouts, residents),
            num_slots=self.num_slots,
            num_gradient_buffers=self.num_gradient_buffers,
            is_wide=self.batch.num_micro_batches > 1,
            gradients_wait=False,
            moments=self.moments,
        )
        kept = num_kept * (self.kept_bytes - self.boundary_bytes)
        return _SHARE * available - sum(sizes.values()) - self._working_bytes() - kept

    @property
    def itemsize(self) -> int:
        """Bytes of an activation's element."""
        return max(entry.dtype.itemsize for entry in self.layouts[self.layers[0][0]].entries[:1])

    @property
    def boundary_bytes(self) -> float:
        """Bytes of one layer's boundary, of all micro-batches of a round."""
        text = self.config.get_text_config()
        return self.batch.tokens * self.batch.num_micro_batches * text.hidden_size * self.itemsize

    @property
    def kept_bytes(self) -> float:
        """Bytes that a dense layer with attention in blocks keeps, of all micro-batches of a round."""
        text = self.config.get_text_config()
        hidden = text.hidden_size
        inner = getattr(text, "intermediate_size", None) or 4 * hidden
        active = getattr(text, "num_experts_per_tok", None) or 1
        # inputs of two norms in fp32 and out, of q, k, v, attention and its output projection; gate, up,
        # their activation and product
        per_token = 12 * hidden + 4 * inner * active
        return self.batch.tokens * self.batch.num_micro_batches * per_token * self.itemsize

    @property
    def hides_copies(self) -> bool:
        """Whether a layer's compute in a round outlasts its copies, so that streaming costs no time.

        Source: F / B, the achieved FLOP/s over the link's bytes/s, is about 6k tokens for a 4090 on PCIe 4
        and 12k for an H100 on PCIe 5.
        """
        return self.batch.tokens * self.batch.num_micro_batches >= _HIDING_TOKENS

    def _working_bytes(self) -> float:
        """Bytes while one micro-batch passes one layer or the head, and the boundaries of all layers."""
        inside = 2 * self.kept_bytes / max(1, self.batch.num_micro_batches)
        vocab_size = int(getattr(self.config.get_text_config(), "vocab_size", 0) or 0)
        logits = 4 * self.batch.tokens * vocab_size
        # larger ones are computed in chunks, one after the other; smaller ones wait for the backward
        heads = 3 * LOGITS_BYTES if logits > LOGITS_BYTES else 3 * logits * self.batch.num_micro_batches
        num_boundaries = len(self.layers) if self.boundaries == "device" else 2
        return inside + heads + num_boundaries * self.boundary_bytes


def choose(
    room: Room,
    *,
    activations: str | Sequence[str],
    resident_blocks: int | Literal["auto"],
    lockstep: int | Literal["auto"],
    num_gradient_buffers: int | None,
    fragments: bool,
    head_chunk_tokens: int | None,
    gradients: str,
) -> Choice:
    """Turn the arguments of `attach` into a choice, with no `auto` left.

    Raises:
        ConfigError: An unknown policy, or more resident layers than there are.
    """
    most = max(map(len, room.layers))
    together = choose_lockstep(room) if lockstep == "auto" else lockstep
    buffers = num_gradient_buffers or (most + 1 if together > 1 else 1)
    room = replace(room, num_gradient_buffers=buffers, batch=replace(room.batch, num_micro_batches=together))
    first = choose_activations(activations, room, frozenset()) if room.hides_copies else []
    residents = choose_residents(resident_blocks, room, first.count(Activations.KEEP))
    chosen = choose_activations(activations, room, residents)
    outer = [n for n, block in enumerate(room.blocks) if not block.is_streamed]
    if gradients == "auto":
        left = room.left(residents, chosen.count(Activations.KEEP))
        streamed = residency_of(room.blocks, room.layouts, residents).streamed
        fits = left is not None and streamed.total(pools.waiting_gradient) <= left
        gradients = "device" if fits else "host"
    return Choice(
        num_slots=room.num_slots,
        num_gradient_buffers=buffers,
        activations=tuple(policy.value for policy in chosen),
        boundaries=room.boundaries,
        fragments=fragments,
        resident_layers=sum(residents.issuperset(layer) for layer in room.layers),
        outer_resident=bool(outer) and residents.issuperset(outer),
        lockstep=together,
        gradients=gradients,
        head_chunk_tokens=head_chunk_tokens,
    ).with_defaults(len(room.layers))


def choose_lockstep(room: Room) -> int:
    """Return how many of a step's micro-batches pass each layer together: as many as half the room holds.

    The other half is for resident layers and kept activations.
    """
    num_micro_batches = room.batch.num_micro_batches
    for together in range(num_micro_batches, 1, -1):
        fewer = replace(room, batch=Batch(room.batch.tokens, together))
        left = fewer.left(frozenset())
        boundaries = fewer.boundary_bytes * len(room.layers)
        limit = host_memory().available_bytes / 4 if left is None else left + boundaries
        if 2 * boundaries <= limit:
            return together
    return 1


def choose_residents(count: int | Literal["auto"], room: Room, num_kept: int = 0) -> frozenset[int]:
    """Return the blocks that stay on the device with all of their state.

    The first layers, because the next forward wants them first: what is updated there keeps nobody waiting.
    `auto` begins with the embedding and the head, which every pass uses, and leaves room for `num_kept`
    layers whose activations are kept.

    Raises:
        ConfigError: More layers than there are.
    """
    outer = [n for n, block in enumerate(room.blocks) if not block.is_streamed]
    if count != "auto":
        if count > len(room.layers):
            raise ConfigError(
                f"resident_blocks is {count}, but the model has {len(room.layers)} layers; use at most that"
            )
        chosen = [block for layer in room.layers[:count] for block in layer]
        return frozenset(chosen + (outer if count == len(room.layers) else []))
    chosen_set: frozenset[int] = frozenset()
    for group in (outer, *room.layers):
        left = room.left(chosen_set | frozenset(group), num_kept)
        if left is None or left < 0:
            break
        chosen_set |= frozenset(group)
    return chosen_set


def choose_activations(
    value: str | Sequence[str], room: Room, residents: frozenset[int]
) -> list[Activations]:
    """Return one policy per layer; `auto` keeps as many of the last layers as fit, and recomputes the others.

    The last layers, because backward begins with them. Without a limit on the device (the CPU), a quarter of
    free host memory is the room.
    """
    if value != "auto":
        spread = read_choice(None, {"activations": value}).for_layers(len(room.layers))
        return [Activations(name) for name in spread.activations]
    num_layers = len(room.layers)
    left = room.left(residents)
    if left is None:
        left = host_memory().available_bytes / 4
    each = room.kept_bytes - room.boundary_bytes
    num_kept = min(num_layers, max(0, int(left // each))) if each > 0 else 0
    return [Activations.RECOMPUTE] * (num_layers - num_kept) + [Activations.KEEP] * num_kept
