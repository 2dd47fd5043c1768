"""Safetensors files of any bytes, as a stranger's model or a checkpoint has them, are read or refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import torch
from safetensors.torch import save

from megatrain.checkpoint.reader import CheckpointReader, Piece
from megatrain.model.weights.files import checkpoint_dtype, read_headers
from megatrain.model.weights.reading import open_weights, read_weights
from tests.fuzz.judge import attack, counts
from tests.fuzz.mutators import mutated_bytes, mutated_json

WHOLE = save(
    {
        "model.embed_tokens.weight": torch.randn(8, 4),
        "model.norm.weight": torch.ones(4, dtype=torch.bfloat16),
        "a.scales": torch.zeros(2, 2, dtype=torch.uint8),
        "empty": torch.zeros(0, 3),
    },
    {"format": "pt"},
)


def damaged(random: Random) -> bytes:
    """Return a file with another header, another length of it, or other bytes."""
    length = int.from_bytes(WHOLE[:8], "little")
    header, data = WHOLE[8 : 8 + length], WHOLE[8 + length :]
    kind = random.randrange(4)
    if kind == 0:
        return mutated_bytes(random, WHOLE)
    if kind == 1:
        header = mutated_bytes(random, header)
    else:
        header = mutated_json(random, json.loads(header))
        header += b" " * (-len(header) % 8) * (kind == 2)
    length = len(header)
    if random.random() < 0.1:
        length = random.choice((0, 1, max(0, length - 1), length + 1, 2**31, 2**63, 2**64 - 1))
    return length.to_bytes(8, "little") + header + data


def read(folder: Path, random: Random) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(damaged(random))
    try:
        if random.random() < 0.3:
            reader = CheckpointReader(folder)
            places = reader.places(file.name).values()
            reader.copy(Piece(file.name, each.begin, np.zeros(each.num_bytes, np.uint8)) for each in places)
            return
        checkpoint_dtype(folder)
        sources = read_headers([file])
        with open_weights(file) as handle:
            for source in sources.values():
                read_weights({file: handle}, source)
    finally:
        file.unlink()  # and not written over: what is mapped stays as it is


@counts(sample=2500, soak=400_000)
def test_any_header_is_read_or_refused(tmp_path: Path, num: int) -> None:
    assert attack(num, partial(read, tmp_path), tmp_path) > num // 3
