"""The counts of a model that a plan needs, made once and kept, so that planning again loads no torch.

A model is named by its configuration. Where that is a file on this machine whose counts are kept, neither
torch nor transformers is imported; everything else is read and checked as for a run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.config import Config
from megatrain.config.tiles import tile_of
from megatrain.errors import ModelError, os_errors
from megatrain.hardware import HardwareSpec
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.anatomy_cache import KeptCounts, anatomy_json, key_of, read_anatomy
from megatrain.model.sequence.range import RowRange, row_range
from megatrain.train.attention import attention_of
from megatrain.train.caller import Progress

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_log = logging.getLogger(__name__)


class PlannedModel:
    """The model of a plan, with its configuration and its counts."""

    def __init__(
        self,
        place: str,
        folder: Path | None,
        progress: Progress,
        model_config: PretrainedConfig | None = None,
        packing: str | None = None,
        document_len: int | None = None,
        rope_scaling: Mapping[str, Any] | None = None,
    ) -> None:
        """Name a model.

        Args:
            place: The place of the model: a directory, a file like its config.json, or a hub id.
            folder: The folder in which counts are kept; None keeps none.
            progress: The function that is told of slow operations.
            model_config: The configuration as a run has read it; None has it read when it is needed.
            packing: The packing of the rows of a run; None means that no data has been read, and
                `data.packing` holds, whose `auto` is counted as joined text.
            document_len: The number of tokens of the document that a token of a packed row is in, on average;
                None: all of the row.
            rope_scaling: The scaling that its rotary embeddings are given (`model.rope_scaling`); a
                configuration that is passed has it.
        """
        self._place, self._packing, self._document_len = place, packing, document_len
        if model_config is not None:
            self.__dict__["config"] = model_config
        self._kept = None if folder is None else KeptCounts(folder)
        self._progress = progress
        self._source = _read_source(Path(place))
        self._rope_scaling = rope_scaling

    @cached_property
    def rows(self) -> RowRange:
        """Return the range of the model, in tokens of a row.

        Raises:
            ModelError: There is no readable configuration, or its model is not supported.
            ConfigError: The model cannot be scaled as `model.rope_scaling` says.
        """
        key, kept = self._load({"what": "range"})
        if kept is not None:
            return RowRange(**kept)
        rows = row_range(self.config)
        self._save(key, asdict(rows))
        return rows

    @cached_property
    def quant_method(self) -> str | None:
        """Return the format of the weights, where the configuration is here and names one; else None."""
        try:
            values = json.loads(self._source or b"{}")
        except ValueError:  # who reads it to count the model says so
            return None
        levels = [values, *(each for each in values.values() if isinstance(each, dict))]
        found = (level.get("quantization_config") for level in levels)
        return next((each.get("quant_method") for each in found if isinstance(each, dict)), None)

    def count(self, config: Config, device_type: str, **changes: Any) -> Anatomy:
        """Count the model for the batch and the precision of a run, with `changes` to them.

        Raises:
            ModelError: The model cannot be read, built or counted.
        """
        shape = self._shape_of(config, device_type, **changes)
        key, kept = self._load(_plain(shape))
        if kept is not None:
            return _remembered((key,), partial(_read, kept))
        model_config = self.config
        self._progress(
            f"counting the model for {shape['micro_batch_size']} x {shape['seq_len']:,} tokens in "
            f"{shape['precision']}"
        )
        anatomy = count_once(model_config, shape)
        self._save(key, anatomy_json(anatomy))
        return anatomy

    def count_each(self, configs: Sequence[Config], device_type: str) -> list[Anatomy]:
        """Count the model for settings that differ in the size of micro-batches, similar ones in one run.

        Raises:
            ModelError: `count` would raise it.
        """
        shapes = [self._shape_of(config, device_type) for config in configs]
        missing = [shape for shape in shapes if not self._is_known(shape)]
        if len(missing) > 1:
            self._count_alike({shape["micro_batch_size"]: shape for shape in missing})
        return [self.count(config, device_type) for config in configs]

    def described(self, config: Config, device_type: str) -> dict[str, Any]:
        """Return the model, and the inputs of its count, as plain values."""
        shape = _plain(self._shape_of(config, device_type))
        return {"model": self.config.to_dict() | {"_name_or_path": ""}, "shape": shape}

    def _shape_of(self, config: Config, device_type: str, **changes: Any) -> dict[str, Any]:
        shape = shape_of(config, device_type, packing=self._packing, **changes)
        if config.adaptation is not None and config.adaptation.keeps_codes:
            shape["base"] = self._place
        if self._document_len is not None and shape["attn_implementation"] is not None:
            shape["document_len"] = self._document_len
        return shape

    def _is_known(self, shape: dict[str, Any]) -> bool:
        if self._kept is not None and self._source is not None:
            return self._kept.has(self._key(_plain(shape)))
        return _key_of_process(self.config, shape) in _COUNTED

    def _count_alike(self, shapes: Mapping[int, dict[str, Any]]) -> None:
        """Count shapes, given by their rows, in as few runs as possible, so that `count` finds them."""
        model_config, (shape, *_) = self.config, shapes.values()
        self._progress(f"counting the model for rows of {shape['seq_len']:,} tokens in {shape['precision']}")
        from megatrain.model.profile.count import alike, count_sizes

        own_len = -(-shape["seq_len"] // shape.get("sequence", 1))
        rest = {name: value for name, value in shape.items() if name != "micro_batch_size"}
        groups = alike(model_config, shapes, seq_len=own_len, head_chunk_tokens=shape["head_chunk_tokens"])
        for sizes in groups:
            if len(sizes) == 1:
                continue
            for size, anatomy in zip(sizes, count_sizes(model_config, sizes=sizes, **rest), strict=True):
                _remember(_key_of_process(model_config, shapes[size]), anatomy)
                self._save(self._load(_plain(shapes[size]))[0], anatomy_json(anatomy))

    @cached_property
    def config(self) -> PretrainedConfig:
        """Return the configuration, read with transformers.

        Raises:
            ModelError: There is no readable configuration, or its model is not supported.
            ConfigError: The model cannot be scaled as `model.rope_scaling` says.
        """
        self._progress("loading torch and transformers, to count the model; its counts are kept")
        import torch

        from megatrain.model.sequence.scaling import require_scaled, scale_rope
        from megatrain.model.weights.skeleton import build_skeleton, read_config

        config = read_config(self._place, allows_file=True)
        if self._rope_scaling is not None:
            scale_rope(config, self._rope_scaling)
            require_scaled(build_skeleton(config, dtype=torch.float32), self._rope_scaling)
        return config

    def _key(self, what: dict[str, Any]) -> str:
        assert self._source is not None
        scaled = {} if self._rope_scaling is None else {"rope_scaling": dict(self._rope_scaling)}
        return key_of(self._source, **what, **scaled)

    def _load(self, what: dict[str, Any]) -> tuple[str, Any]:
        if self._kept is None or self._source is None:
            return "", None
        key = self._key(what)
        return key, self._kept.load(key)

    def _save(self, key: str, body: Any) -> None:
        if self._kept is not None and key:
            self._kept.save(key, body)


def device_type(spec: HardwareSpec) -> str:
    """Return the device type whose kernels run; an emulated accelerator computes on the CPU.

    Packed rows need a mask on devices of other vendors than NVIDIA.
    """
    if not spec.has_accelerator:
        return "cpu"
    return "accelerator with masks" if spec.device.startswith(("AMD", "Intel")) else "accelerator"


def shape_of(
    config: Config, device_type: str, *, packing: str | None = None, **changes: Any
) -> dict[str, Any]:
    """Return the inputs of a count beside the model, as arguments of `count_anatomy`."""
    is_packed = (packing or config.data.packing) == "best_fit"
    seq_len = changes.get("seq_len", config.data.seq_len)
    has_varlen = is_packed and device_type == "accelerator"
    attention = attention_of(config, has_varlen=has_varlen, seq_len=seq_len)
    tile = tile_of(seq_len, config.batch.tile_tokens)
    return {
        "micro_batch_size": config.batch.micro_batch_size,
        "seq_len": config.data.seq_len,
        "precision": config.train.precision,
        "attn_implementation": attention,
        "head_chunk_tokens": config.memory.head_chunk_tokens or None,
        "device_type": device_type,
        **({} if config.adaptation is None else {"adaptation": config.adaptation}),
        **({"is_packed": True} if is_packed else {}),
        **({"sequence": config.parallel.sequence} if config.parallel.sequence > 1 else {}),
        **({"tile": tile} if tile else {}),
        **({"compiles": True} if _compiles(config, device_type) else {}),
        **({"loss": "rows"} if config.objective.rows.is_judged else {}),
        **changes,
    }


def _compiles(config: Config, device_type: str) -> bool:
    """Return whether layers may be compiled where a run computes, which an emulated device does not."""
    kind = config.train.device.partition(":")[0]
    is_real = device_type != "cpu" and kind not in ("emulated", "checked")
    return config.choice.is_compiled(config.train.compile, can_compile=is_real)


def count_once(model_config: PretrainedConfig, shape: dict[str, Any]) -> Anatomy:
    """Count a model of the same configuration once per process, wherever its files are.

    Raises:
        ModelError: The model cannot be built or counted.
    """
    from megatrain.model.profile.count import count_anatomy

    return _remembered(_key_of_process(model_config, shape), partial(count_anatomy, model_config, **shape))


def _key_of_process(model_config: PretrainedConfig, shape: dict[str, Any]) -> tuple[object, ...]:
    described = {**model_config.to_dict(), "_name_or_path": ""}
    return (json.dumps(described, sort_keys=True, default=str), *sorted(shape.items()))


def _plain(shape: dict[str, Any]) -> dict[str, Any]:
    """Return a shape as plain values, which name a cached count; the files of a base that it is of, too."""
    adaptation = shape.get("adaptation")
    files = {"files": _files_of(Path(shape["base"]))} if "base" in shape else {}
    return {**shape, **files} | ({} if adaptation is None else {"adaptation": asdict(adaptation)})


def _files_of(place: Path) -> list[list[Any]]:
    """Return the names, sizes and times of a model's files of weights; none where they are not here."""
    found = sorted(place.glob("*.safetensors")) if place.is_dir() else []
    with os_errors("read", place, ModelError):
        return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in found]


def _read(kept: Any) -> Anatomy:
    """Return a cached count, and repeat the warnings of its making."""
    anatomy = read_anatomy(kept)
    for warning in anatomy.warnings:
        _log.warning(warning)
    return anatomy


def _remembered(key: tuple[object, ...], count: Callable[[], Anatomy]) -> Anatomy:
    """Return this process's count under a key, since other facts about a model hang on its one anatomy."""
    return _COUNTED[key] if key in _COUNTED else _remember(key, count())


def _remember(key: tuple[object, ...], anatomy: Anatomy) -> Anatomy:
    if len(_COUNTED) >= _MOST_COUNTED:
        _COUNTED.clear()
    _COUNTED[key] = anatomy
    return anatomy


_COUNTED: dict[tuple[object, ...], Anatomy] = {}
_MOST_COUNTED = 64


def _read_source(place: Path) -> bytes | None:
    """Return the configuration byte for byte; None if it is not on this machine, or cannot be read."""
    try:
        return (place / "config.json" if place.is_dir() else place).read_bytes()
    except OSError:
        return None
