"""Reads safetensors checkpoints into the parameters of a model, one tensor at a time.

Every check that names, shapes and dtypes allow is made before the first byte is written. Nothing is ever
unpickled. A tensor is a view of its mapped file until the sink copies it, so the extra host memory is at
most one tensor.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedModel

from megatrain.errors import ModelError, is_text, os_errors, warn_once
from megatrain.hub import asking_hub, may_be_on_hub, no_directory, refuse_link_out
from megatrain.model.weights.convert import Conversion, Source, as_they_lie, plan_conversions
from megatrain.model.weights.encoding import Region, WeightEncoding
from megatrain.model.weights.generation import read_generation_config
from megatrain.model.weights.kept import codes_of
from megatrain.model.weights.quantised.formats import quantisation_of
from megatrain.model.weights.quantised.quantisation import (
    Quantisation,
    refuse_parts_of_none,
    refuse_unnamed,
)
from megatrain.model.weights.reading import open_weights, read_json, read_weights
from megatrain.model.weights.skeleton import persistent_buffers, tied_names
from megatrain.model.weights.untouched import UNTOUCHED, Untouched, require_exportable

logger = logging.getLogger(__name__)

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.bin.index.json")
_PROCESSOR_NAMES = (
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
    "chat_template.json",
)
_FETCHED_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_OTHER_PATTERNS = ["original/*", "metal/*", "consolidated*"]
"""The same weights, in the layouts of other programs."""
_COMPARED_ELEMENTS = 1 << 20
_NAMES_SHOWN = 4
CONSTANTS = [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
"""The patterns of what older versions have saved and models compute by themselves."""


class ParameterSink(Protocol):
    """Takes the values of parameters as they are read."""

    def put(self, name: str, value: torch.Tensor, region: Region = ()) -> None:
        """Write a value into a region of a parameter, or all of it when the region is empty.

        Args:
            name: The parameter's name in `model.named_parameters()`.
            value: float32, bfloat16 or float16, of the region's shape; a view of a file, valid during the
                call.
            region: Index of the part to write.
        """


OpenFile = Callable[[Path], AbstractContextManager[Any]]
"""Opens a file, and lends what has a method `get_tensor` by key, as `open_weights` does."""


class CodesSink(Protocol):
    """Takes codes and scales of parameters that are kept as the files have them."""

    def keeps(self, name: str) -> bool:
        """Whether a parameter is kept in its encoding: then it gets codes, and no values."""

    def put_codes(
        self, name: str, encoding: WeightEncoding, part: str, tensor: torch.Tensor, region: Region
    ) -> None:
        """Write a tensor of which a kept parameter is made.

        Args:
            name: The name of the parameter, as in `put`.
            encoding: The encoding of the weight of the files that the tensor belongs to.
            part: The name of the tensor in it.
            tensor: The tensor, as the file has it.
            region: The place of that weight in the parameter.
        """


def model_directory(path_or_id: str | Path) -> Path:
    """Return a local model directory: the given one, or a hub model's, fetched where it is not in the cache.

    Only configuration, tokenizer and safetensors files are fetched.

    Raises:
        ModelError: There is no such directory, and no such model can be fetched.
    """
    if Path(path_or_id).is_dir():
        return Path(path_or_id)
    if not may_be_on_hub(path_or_id):
        raise ModelError(no_directory(path_or_id))
    with asking_hub(str(path_or_id), "it"):
        found = snapshot_download(
            str(path_or_id), allow_patterns=_FETCHED_PATTERNS, ignore_patterns=_OTHER_PATTERNS
        )
        return Path(found)


def read_processor(directory: Path) -> dict[str, bytes]:
    """Return the files of a model directory that say how images become tokens, which training leaves alone.

    Raises:
        ModelError: One cannot be read.
    """
    found = [directory / name for name in _PROCESSOR_NAMES if (directory / name).is_file()]
    with os_errors("read", directory, ModelError):
        for file in found:
            refuse_link_out(file)
        return {file.name: file.read_bytes() for file in found}


def has_weights(path: str | Path) -> bool:
    """Whether a model directory has files of weights."""
    return any((Path(path) / name).exists() for name in (INDEX_NAME, WEIGHTS_NAME))


def checkpoint_files(path: str | Path) -> list[Path]:
    """List the safetensors files of a model directory, each checked to be readable and complete.

    Raises:
        ModelError: There are none, one is missing or damaged, or the index names a file outside the
            directory.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory; give a model directory")
    if (directory / INDEX_NAME).exists():
        files = _indexed_files(directory)
    elif (directory / WEIGHTS_NAME).exists():
        files = [_inside(directory, WEIGHTS_NAME)]
    else:
        _refuse_without_weights(directory)
    for file in files:
        with open_weights(file):
            pass
    return files


def checkpoint_dtype(path: str | Path) -> torch.dtype:
    """Return the dtype of most of the weights of a model directory, as the headers of its files say.

    Raises:
        ModelError: The directory is refused, as by `checkpoint_files`.
    """
    sizes = Counter({torch.float32: 0})
    sources = read_sources(Path(path), checkpoint_files(path), quantisation_of(Path(path)))
    for source in sources.values():
        if source.dtype in FLOAT_DTYPES:
            sizes[FLOAT_DTYPES[source.dtype]] += prod(source.shape)
    return sizes.most_common(1)[0][0]


def load_weights(model: PreTrainedModel, path: str | Path, sink: ParameterSink) -> list[str]:
    """Read a checkpoint into a model's parameters and persistent buffers: `PlannedWeights`, in one go.

    Returns:
        Keys of the checkpoint that the model has no place for.

    Raises:
        ModelError: The files or their tensors do not fit the model. The sink has been given nothing, unless
            a file changes while it is read.
    """
    weights = PlannedWeights(model, path)
    weights.read(sink)
    return [source.key for source in weights.untouched]


class PlannedWeights:
    """The tensors of a checkpoint and their places in a model, which may get parameters before the read."""

    def __init__(self, model: PreTrainedModel, path: str | Path) -> None:
        """Plan for a model from `build_skeleton`, and make every check that needs no tensor's values.

        Raises:
            ModelError: The files or their tensors do not fit the model.
        """
        self.model, self.path = model, Path(path)
        self.files = checkpoint_files(path)
        quantisation = quantisation_of(self.path)
        sources = read_sources(self.path, self.files, quantisation)
        if quantisation is None:
            refuse_unnamed(self.path, sources)
        self.conversions, unexpected = plan_conversions(model, sources)
        _check_targets(model, self.conversions, self.path)
        self.untouched = _without_constants(model, unexpected)
        """The tensors that the model has no place for."""
        require_exportable(self.untouched)
        if quantisation is not None:
            refuse_parts_of_none(self.untouched)
            if not self.num_quantised:
                warn_once(
                    logger,
                    f"{self.path}: config.json says that weights are quantised, and no weight of the files "
                    "is: they are read as they are",
                )
        self._generation = read_generation_config(self.path)
        names = tied_names(model)
        self.first_names = {alias: name for name, aliases in names.items() for alias in aliases}
        self.buffers = persistent_buffers(model)

    def read(
        self, sink: ParameterSink, codes: CodesSink | None = None, opened: OpenFile | None = None
    ) -> None:
        """Read the weights; the model also takes the generation settings of the directory.

        A tied parameter is written once, under the first of its names.

        Args:
            sink: Receives every parameter, under its name of when this was planned: whole, or in regions that
                cover it.
            codes: Receives in its place what parameters are made of that it keeps; None: it keeps none.
            opened: Opens the files in place of `open_weights`, best for tensors in the order in which they
                lie there, in which they are read then. None: they are read in the order of their keys.

        Raises:
            ModelError: Copies of a tied parameter differ, or a file has changed.
        """
        num_kept = 0
        with contextlib.ExitStack() as stack:
            handles = {file: stack.enter_context((opened or open_weights)(file)) for file in self.files}
            duplicates = _check_ties(self.model, self.conversions, self.first_names, handles)
            for conversion in self.conversions if opened is None else as_they_lie(self.conversions):
                kept = self.first_names.get(conversion.target)
                if kept is not None and codes is not None and codes.keeps(kept):
                    num_kept += len(conversion.sources)
                    for encoding, part, tensor, region in codes_of(conversion, handles):
                        codes.put_codes(kept, encoding, part, tensor, region)
                    continue
                for target, value, region in values_of(self.model, conversion, handles):
                    if target in duplicates:
                        continue
                    if target in self.buffers:
                        self.buffers[target][region if region else ...].copy_(value)
                    else:
                        sink.put(self.first_names[target], value, region)
        if self.num_quantised:
            number = self.num_quantised
            kept = f"{num_kept} of them are kept as stored, {number - num_kept}" if num_kept else "they"
            logger.info("%s: %d weights are quantised: %s were read in bf16", self.path, number, kept)
        if self._generation is not None and self.model.can_generate():
            self.model.generation_config = self._generation

    @property
    def num_quantised(self) -> int:
        """The number of weights of the files that are quantised."""
        sources = (source for each in self.conversions for _, source in each.sources)
        return sum(source.making is not None for source in sources)

    def keep_untouched(self) -> None:
        """Leave with the model what it has no place for, to be exported as it is, and say so.

        Raises:
            ModelError: The tensors are refused, as by `Untouched`.
        """
        if self.untouched:
            self.model.__dict__[UNTOUCHED] = Untouched(self.untouched)
            logger.warning(
                "%s: %d tensors have no place in the model, and are not trained but exported as they are: %s",
                self.path,
                len(self.untouched),
                _some([source.key for source in self.untouched]),
            )


def _refuse_without_weights(directory: Path) -> None:
    pickles = sorted(file.name for pattern in _PICKLE_PATTERNS for file in directory.glob(pattern))
    if pickles:
        raise ModelError(
            f"{directory} has its weights only in pickle files ({_some(pickles)}), which are never opened; "
            f"convert them to safetensors"
        )
    raise ModelError(
        f"{directory} has neither {WEIGHTS_NAME} nor {INDEX_NAME}; is it a Hugging Face model directory?"
    )


def _indexed_files(directory: Path) -> list[Path]:
    names = sorted(set(_weight_map(directory).values()))
    files = [_inside(directory, name) for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"{directory / INDEX_NAME} names {', '.join(missing)}, missing from the directory")
    return files


def _weight_map(directory: Path) -> dict[str, str]:
    index = directory / INDEX_NAME
    values = read_json(index)
    weight_map = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map of tensor names to files")
    for key, name in weight_map.items():
        if not isinstance(name, str):
            raise ModelError(f"{index} gives {key} the file {name!r}; it must be the name of a file")
    return weight_map


def _inside(directory: Path, name: str) -> Path:
    """Return a file of the directory, refusing a name or a link that leads out of it."""
    is_name = Path(name).name == name and "\\" not in name and "\0" not in name and is_text(name)
    if not is_name or not name.endswith(".safetensors"):
        raise ModelError(
            f"{directory / INDEX_NAME} names {name!r}; it must be a .safetensors file of the directory"
        )
    file = directory / name
    with os_errors("use", file, ModelError):
        refuse_link_out(file)
    return file


def read_sources(directory: Path, files: list[Path], quantisation: Quantisation | None) -> dict[str, Source]:
    """Return the tensors of a checkpoint, in bf16 what is quantised there.

    Args:
        directory: The directory of the checkpoint.
        files: Its files, as `checkpoint_files` lists them.
        quantisation: How they are quantised, as `quantisation_of` says.

    Raises:
        ModelError: Files and index do not agree, or codes and scales do not belong together.
    """
    sources = read_headers(files)
    _check_index(directory, sources)
    return sources if quantisation is None else quantisation.weights(sources)


def read_headers(files: list[Path]) -> dict[str, Source]:
    """Return the tensors of safetensors files by key, as their headers describe them.

    Raises:
        ModelError: A file cannot be read, or a key is in two of them.
    """
    sources: dict[str, Source] = {}
    for file in files:
        with open_weights(file) as handle:
            for key in handle.keys():  # noqa: SIM118 - a handle is no mapping
                if key in sources:
                    raise ModelError(f"{key} is in {sources[key].file} and in {file}; keep one of them")
                view = handle.get_slice(key)
                sources[key] = Source(
                    key=key, file=file, shape=tuple(view.get_shape()), dtype=str(view.get_dtype())
                )
    return sources


def _check_index(directory: Path, sources: Mapping[str, Source]) -> None:
    """Hold the index against the files: each tensor must be where it says."""
    if not (directory / INDEX_NAME).exists():
        return
    for key, name in _weight_map(directory).items():
        if key not in sources or sources[key].file.name != name:
            raise ModelError(f"{directory / INDEX_NAME} says that {key} is in {name}, and it is not")


def _check_targets(model: PreTrainedModel, conversions: list[Conversion], directory: Path) -> None:
    """Check that the conversions give each tensor of the model once, in its shape and in a float dtype."""
    state = model.state_dict()
    buffers = persistent_buffers(model)
    made_by: dict[str, Conversion] = {}
    for conversion in conversions:
        for target, shape in conversion.shapes.items():
            if target not in state:
                raise ModelError(f"{conversion.where} converts to {target}, which the model does not have")
            if target in made_by:
                raise ModelError(f"{target} has two sources, {made_by[target].where} and {conversion.where}")
            if shape != tuple(state[target].shape):
                raise ModelError(
                    f"{conversion.where} has shape {list(shape)}, and {target} in the model has "
                    f"{list(state[target].shape)}; config.json does not belong to these weights"
                )
            made_by[target] = conversion
        for _, source in conversion.sources:
            is_buffer = conversion.target in buffers and not state[conversion.target].is_floating_point()
            if source.dtype not in FLOAT_DTYPES and not is_buffer:
                raise ModelError(
                    f"{source.file}: {source.key} has dtype {source.dtype}; only "
                    f"{', '.join(FLOAT_DTYPES)} are read"
                )
    missing = [
        name for name, aliases in tied_names(model).items() if not any(alias in made_by for alias in aliases)
    ]
    optional = _any_of(model._keys_to_ignore_on_load_missing)
    missing += [name for name in buffers if name not in made_by and not (optional and optional.search(name))]
    if missing:
        raise ModelError(f"{directory} lacks {len(missing)} of the model's tensors: {_some(missing)}")


def _check_ties(
    model: PreTrainedModel,
    conversions: list[Conversion],
    first_names: Mapping[str, str],
    handles: Mapping[Path, Any],
) -> set[str]:
    """Compare the copies of tied parameters that were saved twice.

    Returns:
        The targets that need not be written, because another name of the same parameter is.

    Raises:
        ModelError: Copies differ, so the checkpoint was made without the tie.
    """
    makers: dict[str, list[tuple[str, Conversion]]] = {}
    for conversion in conversions:
        for target in conversion.shapes:
            if target in first_names:
                makers.setdefault(first_names[target], []).append((target, conversion))
    duplicates = set()
    for (kept, conversion), *others in makers.values():
        for other, other_conversion in others:
            if not _are_equal(
                _whole(model, conversion, kept, handles), _whole(model, other_conversion, other, handles)
            ):
                raise ModelError(
                    f"{conversion.where}: {kept} and {other} are tied in the model and differ in the "
                    f"checkpoint; set tie_word_embeddings to false in config.json or save one of them"
                )
            duplicates.add(other)
    return duplicates


def _whole(
    model: PreTrainedModel, conversion: Conversion, target: str, handles: Mapping[Path, Any]
) -> torch.Tensor:
    tensors = [read_weights(handles, source) for _, source in conversion.sources]
    return conversion.run(model, tensors)[target]


def _are_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare bit for bit, in pieces, as float32, which holds every value of the dtypes read."""
    pieces = zip(
        left.reshape(-1).split(_COMPARED_ELEMENTS), right.reshape(-1).split(_COMPARED_ELEMENTS), strict=True
    )
    return all(torch.equal(a.float().view(torch.int32), b.float().view(torch.int32)) for a, b in pieces)


def values_of(
    model: PreTrainedModel, conversion: Conversion, handles: Mapping[Path, Any]
) -> Iterator[tuple[str, torch.Tensor, Region]]:
    """Yield target, value and region, one tensor at a time where the sources go straight to their places."""
    if conversion.regions is not None:
        for (_, source), region in zip(conversion.sources, conversion.regions, strict=True):
            yield conversion.target, read_weights(handles, source), region
        return
    targets = conversion.run(model, [read_weights(handles, source) for _, source in conversion.sources])
    while targets:
        name, value = targets.popitem()
        yield name, value, ()


def _without_constants(model: PreTrainedModel, unexpected: list[Source]) -> list[Source]:
    """Leave out what older versions have saved and the model computes by itself: tables of positions."""
    constants = _any_of(CONSTANTS)
    buffers = {name for name, _ in model.named_buffers()}
    assert constants is not None
    return [each for each in unexpected if not constants.search(each.key) and each.key not in buffers]


def _any_of(patterns: set[str] | list[str] | None) -> re.Pattern[str] | None:
    return re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
