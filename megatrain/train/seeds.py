"""Seeds that a run need not store: the draws of a step are the same after a resume, in any order."""

from __future__ import annotations

import hashlib


def micro_batch_seed(seed: int, step: int, number: int) -> int:
    """Return the seed of dropout of a step's micro-batch, from the run's seed."""
    digest = hashlib.blake2b(f"{seed}/{step}/{number}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
