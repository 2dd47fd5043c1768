"""What a checkpoint of a run holds, written and read back bit for bit.

The directory is a Hugging Face model (working weights, config, tokenizer) with the rest of the state beside
it: `state/block-NNNNN.safetensors` holds remainders and moments under `plane/parameter`, and the manifest's
meta holds the counters, the schedule, the data position and the random generators.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.checkpoint.files import TensorSource, write_safetensors
from megatrain.checkpoint.load import read_safetensors
from megatrain.errors import CheckpointError
from megatrain.model.export import export_weights
from megatrain.store.state import BlockState, HostState

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from megatrain.stream.engine import Engine

_STATE_DIR = "state"


def write_model(engine: Engine, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Write the working weights as a Hugging Face model directory, block by block, with its tokenizer.

    Raises:
        OutputError: The directory cannot be written.
    """
    engine.sync()
    model: PreTrainedModel = engine.model
    host = engine.host
    groups = [[entry.name for entry in layout.entries] for layout in host.layouts]

    def read(name: str) -> Tensor:
        if not host.has(name):
            return model.get_buffer(name).cpu()
        state, entry = host.find(name)
        return state.weight(entry)

    export_weights(model, out, groups=groups, read=read)
    tokenizer.save_pretrained(out)


def write_state(engine: Engine, out: Path) -> None:
    """Write remainders and moments, one file per block with trained parameters."""
    engine.sync()
    directory = out / _STATE_DIR
    directory.mkdir(mode=0o700)
    for number, block in enumerate(engine.host.blocks):
        sources = [
            TensorSource(
                name=f"{plane}/{entry.name}",
                dtype=tensor.dtype,
                shape=entry.shape,
                get=lambda block=block, tensor=tensor, entry=entry: block.plane_of(tensor, entry),  # type: ignore[misc]
            )
            for plane, tensor in _planes(block).items()
            for entry in block.layout.trained
            if plane != "remainder" or entry.dtype == torch.bfloat16
        ]
        if sources:
            write_safetensors(_block_file(out, number), sources, {"format": "pt"})


def read_state(host: HostState, source: Path) -> None:
    """Read remainders and moments back into their planes.

    Raises:
        CheckpointError: A tensor is missing, or is not of this model and precision.
    """
    where: dict[str, Path] = {}
    for file in sorted((source / _STATE_DIR).glob("block-*.safetensors")):
        with read_safetensors(file) as tensors:
            where |= dict.fromkeys(tensors, file)  # a run with other fragments has cut its files elsewhere
    for block in host.blocks:
        wanted = {
            f"{plane}/{entry.name}": (tensor, entry)
            for plane, tensor in _planes(block).items()
            for entry in block.layout.trained
            if plane != "remainder" or entry.dtype == torch.bfloat16
        }
        for name in wanted:
            if name not in where:
                raise CheckpointError(
                    f"{source} has no {name}: it is of another model, or of another train.precision"
                )
        for file in dict.fromkeys(where[name] for name in wanted):
            with read_safetensors(file) as tensors:
                for name, (tensor, entry) in wanted.items():
                    if where[name] != file:
                        continue
                    saved = tensors[name]
                    if saved.dtype != tensor.dtype or saved.shape != torch.Size(entry.shape):
                        raise CheckpointError(
                            f"{source}: {name} is {tuple(saved.shape)} {saved.dtype}, but the model needs "
                            f"{entry.shape} {tensor.dtype}"
                        )
                    block.plane_of(tensor, entry).copy_(saved)


def compact_counts(counts: Mapping[str, int]) -> int | dict[str, int]:
    """Write the updates per parameter as one number where, as nearly always, they agree."""
    values = set(counts.values())
    return values.pop() if len(values) == 1 else dict(counts)


def expand_counts(saved: int | Mapping[str, int], names: Mapping[str, Any]) -> dict[str, int]:
    """Undo `compact_counts`."""
    if isinstance(saved, int):
        return dict.fromkeys(names, saved)
    return {name: int(saved[name]) for name in names}


def _planes(block: BlockState) -> dict[str, Tensor]:
    planes = {
        "remainder": block.remainder,
        "exp_avg": block.exp_avg,
        "exp_avg_sq": block.exp_avg_sq,
    }
    return {name: plane for name, plane in planes.items() if plane is not None}


def _block_file(directory: Path, number: int) -> Path:
    return directory / _STATE_DIR / f"block-{number:05d}.safetensors"
