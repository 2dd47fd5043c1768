"""Writes a trained model in the format of the quantised checkpoint that it began with.

The files are copies of the checkpoint's, in which the tensors that training has changed are replaced: names,
dtypes, shapes, headers and what is not quantised there stay as they were. In a block whose values are still
those of the checkpoint every byte is; in others the scale stays while the largest value fits, and else it is
the smallest that makes it fit. Codes are the nearest ones, of two as near the even one.

Sources: OCP Microscaling Formats (MX) Specification v1.0, 6.3, whose rule for new scales lets the largest
values be cut, as this one does not; OCP 8-bit Floating Point Specification v1.0.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.errors import ConfigError, ModelError, os_errors
from megatrain.files import copy_file_durably, opened, system, write_all, write_bytes_durably
from megatrain.layout.tensor_file import positions
from megatrain.model.weights.convert import Source
from megatrain.model.weights.files import (
    CONSTANTS,
    FLOAT_DTYPES,
    INDEX_NAME,
    checkpoint_files,
    read_headers,
    read_sources,
)
from megatrain.model.weights.quantised.formats import CONFIG_KEYS, OF_MODELOPT, method_of, quantisation_of
from megatrain.model.weights.reading import open_weights, read_json, read_tensor
from megatrain.model.weights.skeleton import build_skeleton, read_config, tied_names

WRITTEN = ("mxfp4", "fp8")
"""The formats that are written, by their `quant_method`."""


def write_like(checkpoint: Path, trained: Path, out: Path, method: str) -> None:
    """Write the weights, the index and the config.json of a trained model as a checkpoint has them.

    Args:
        checkpoint: The directory of the quantised checkpoint from which the model was trained.
        trained: The directory of the trained model, whose weights are not quantised.
        out: A directory without a model.
        method: The format, one of `WRITTEN`.

    Raises:
        ConfigError: The checkpoint is in another format.
        ModelError: A file cannot be read, or the model has other tensors than the checkpoint.
        OutputError: `out` cannot be written.
    """
    found = method_of(checkpoint)
    if found != method:
        named = "is not quantised" if found is None else f"is in {found}"
        raise ConfigError(
            f"--format {method} writes a model as the checkpoint that it was trained from, and {checkpoint} "
            f"{named}"
        )
    files = checkpoint_files(checkpoint)
    weights = read_sources(checkpoint, files, quantisation_of(checkpoint))
    new = read_headers(checkpoint_files(trained))
    new = _with_aliases(new, weights, trained)
    _require_same(weights, new, checkpoint, trained)
    with ExitStack() as stack:
        every = {*files, *(source.file for source in new.values())}
        handles = {file: stack.enter_context(open_weights(file)) for file in every}
        places = {file: positions(file) for file in files}
        for file in files:
            copy_file_durably(file.resolve(), out / file.name)  # a link of the hub's cache leads to it
        for key, source in new.items():
            value = read_tensor(handles, source)
            for part, tensor in _parts(weights[key], value, handles):
                _put(out / part.file.name, places[part.file][part.key], tensor)
        for file in files:
            with os_errors("write", out / file.name), opened(out / file.name, os.O_RDONLY) as descriptor:
                system.fsync(descriptor)
    for name in (INDEX_NAME, OF_MODELOPT):
        if (checkpoint / name).exists():
            copy_file_durably((checkpoint / name).resolve(), out / name)
    if (trained / "generation_config.json").exists():
        copy_file_durably(trained / "generation_config.json", out / "generation_config.json")
    values = read_json(trained / "config.json")
    _take_quantisation(values, read_json(checkpoint / "config.json"))
    write_bytes_durably(out / "config.json", (json.dumps(values, indent=2, sort_keys=True) + "\n").encode())


def _with_aliases(new: dict[str, Source], weights: Mapping[str, Source], trained: Path) -> dict[str, Source]:
    """Add the names of tied parameters that a checkpoint has, and a trained model was saved without."""
    found = dict(new)
    for names in tied_names(build_skeleton(read_config(trained), dtype=torch.bfloat16)).values():
        saved = [new[name] for name in names if name in new]
        found |= {name: saved[0] for name in names if saved and name in weights and name not in found}
    return found


def _require_same(
    weights: Mapping[str, Source], new: Mapping[str, Source], checkpoint: Path, trained: Path
) -> None:
    """Refuse a model that has other tensors than the checkpoint: what has no place would be lost.

    Raises:
        ModelError: It has others, or of other shapes.
    """
    for key, source in new.items():
        if key not in weights:
            raise ModelError(f"{trained} has {key}, and {checkpoint} has no such tensor")
        if weights[key].shape != source.shape:
            raise ModelError(
                f"{source.file}: {key} has shape {list(source.shape)}, and {list(weights[key].shape)} in "
                f"{checkpoint}; its shapes cannot change in this format"
            )
        making = weights[key].making
        if making is not None and making.encode is None:
            raise ConfigError(f"{weights[key].file}: {key} is in a format that is read and not written")
    constants = re.compile("|".join(CONSTANTS))
    missing = [key for key in weights if key not in new and not constants.search(key)]
    if missing:
        raise ModelError(f"{trained} lacks {len(missing)} weights of {checkpoint}, such as {missing[0]}")


def _parts(weight: Source, value: Tensor, handles: Mapping[Path, Any]) -> list[tuple[Source, Tensor]]:
    """Return the tensors of a checkpoint that change, with what they become."""
    making = weight.making
    if making is None:
        old = read_tensor(handles, weight)
        dtype = FLOAT_DTYPES.get(weight.dtype, old.dtype)
        return [] if torch.equal(old.to(value.dtype), value) else [(weight, value.to(dtype))]
    assert making.encode is not None
    old_parts = {name: read_tensor(handles, part) for name, part in making.parts.items()}
    found = making.encode(old_parts, value)
    return [(making.parts[name], tensor) for name, tensor in found.items()]


def _put(file: Path, position: int, tensor: Tensor) -> None:
    data: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    with os_errors("write", file), opened(file, os.O_WRONLY) as descriptor:
        os.lseek(descriptor, position, os.SEEK_SET)
        write_all(descriptor, memoryview(data), file)


def _take_quantisation(values: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Give a config what another one says of quantisation and of types, in the same place."""
    for key, value in source.items():
        if key in (*CONFIG_KEYS, "dtype", "torch_dtype"):
            values[key] = value
        elif isinstance(value, dict) and isinstance(values.get(key), dict):
            _take_quantisation(values[key], value)
