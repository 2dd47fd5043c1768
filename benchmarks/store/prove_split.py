"""Prove that splitting and joining a master weight is the identity on all 2^32 bit patterns (about a minute).

Also counted: patterns, NaN aside, whose working weight is not the bf16 nearest to the master. Torch's own
rounding to bf16 is the judge; ties, where two are nearest, are left out.

    python -m benchmarks.store.prove_split [--out FILE]
"""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.report import emit, hardware
from megatrain.store.master import join_master_into, split_master_into

CHUNK_NUMEL = 1 << 24


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="file to save the JSON line to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    bits = torch.empty(CHUNK_NUMEL, dtype=torch.int32)
    working = torch.empty(CHUNK_NUMEL, dtype=torch.bfloat16)
    remainder = torch.empty(CHUNK_NUMEL, dtype=torch.int16)
    joined = torch.empty(CHUNK_NUMEL)
    patterns = mismatches = misrounded = 0
    for first in range(-(1 << 31), 1 << 31, CHUNK_NUMEL):
        torch.arange(first, first + CHUNK_NUMEL, out=bits)
        master = bits.view(torch.float32)
        split_master_into(master, working, remainder)
        join_master_into(working, remainder, joined)
        mismatches += int((joined.view(torch.int32) != bits).sum())
        differs = working.view(torch.int16) != master.bfloat16().view(torch.int16)
        misrounded += int((differs & (remainder != -0x8000) & ~master.isnan()).sum())
        patterns += CHUNK_NUMEL
    print(f"{patterns} patterns: {mismatches} not restored, {misrounded} not rounded to nearest")
    emit(
        {
            "benchmark": "prove_split",
            "patterns": patterns,
            "mismatches": mismatches,
            "misrounded": misrounded,
            "seconds": time.perf_counter() - started,
            "hardware": hardware(),
        },
        arguments.out,
    )
    assert mismatches == misrounded == 0


if __name__ == "__main__":
    main()
