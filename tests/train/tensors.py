"""The tensors of a checkpoint, whoever has written it."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from megatrain.layout.blocks import split_span_name


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a checkpoint, or of a model, by its file and its name.

    What several nodes have written of a block's state is joined as one node writes it, and all state is flat.
    """
    found: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for file in sorted(directory.rglob("*.safetensors")):
        place = re.sub(r"-node-\d+", "", str(file.relative_to(directory)))
        for name, tensor in load_file(file).items():
            name, elements = split_span_name(name)
            if not place.startswith("state/"):
                found[f"{place}: {name}"] = tensor
                continue
            first = 0 if elements is None else elements.start
            each = parts.setdefault(f"{place}: {name}", {})
            assert first not in each, f"{file} has {name} twice"
            each[first] = tensor.reshape(-1)
            assert elements is None or len(elements) == tensor.numel()
    for key, each in parts.items():
        first = min(each)
        for start, tensor in sorted(each.items()):
            assert start == first, f"{key} has a hole before {start}"
            first += tensor.numel()
        found[key] = torch.cat([tensor for _, tensor in sorted(each.items())])
    return found
