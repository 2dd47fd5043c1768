"""Digests of weights that an engine has given back, by which the next one knows which were changed meanwhile.

A remainder is the rest of an fp32 master beside its bf16 weight. Beside another weight it is noise: a weight
that was changed in place, as by `load_state_dict`, is the whole of its new value.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from megatrain.store.state import HostState


def note_weights(host: HostState) -> None:
    """Note the weights that have remainders, before others than an engine may write to them."""
    host.digests = dict(_digests(host))


def drop_remainders_of_changed(host: HostState) -> None:
    """Let weights that were changed since `note_weights` begin as they are; nothing, if none was noted."""
    noted, host.digests = host.digests, {}
    digests = dict(_digests(host)) if noted else {}
    for block in host.blocks if noted else ():
        for entry in block.layout.entries:
            remainder = block.remainder_of(entry)
            if remainder is not None and noted.get(entry.key) != digests[entry.key]:
                remainder.zero_()


def _digests(host: HostState) -> Iterator[tuple[str, bytes]]:
    for block in host.blocks:
        for entry in block.layout.entries:
            if block.remainder_of(entry) is not None:
                weight = block.working[entry.byte_offset : entry.byte_offset + entry.nbytes]
                yield entry.key, xxhash.xxh3_128_digest(weight.numpy().data)
