"""Writes a model as a Hugging Face directory, tensor by tensor.

Names and shapes of every file are known before the first value is read, from a dry run of transformers' own
reverse conversion on the meta device. So a value is read, converted, written in its place and dropped: the
extra host memory is what one reverse conversion needs, such as one layer's fused experts, whatever the size
of the file.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    revert_weight_conversion,
)

from megatrain import files
from megatrain.errors import ModelError, OutputError, os_errors
from megatrain.model.weights.files import INDEX_NAME, WEIGHTS_NAME
from megatrain.model.weights.shards import Shard, ShardWriter, Specs, num_bytes
from megatrain.model.weights.skeleton import persistent_buffers, tied_names
from megatrain.model.weights.untouched import Untouched

_GROUP = getattr(core_model_loading, "GroupWeightRename", ())
"""The renaming of several names that depend on each other, which older releases of transformers lack."""
MAX_SHARD_BYTES = 5 * 2**30
"""The size from which weights are split into several files, where nothing else is said."""
_MODEL_PATTERNS = ("config.json", "generation_config.json", "*.safetensors", INDEX_NAME)


def export_weights(
    model: PreTrainedModel,
    out: str | Path,
    *,
    groups: Sequence[Sequence[str]],
    read: Callable[[str], torch.Tensor],
    dtype: Callable[[str], torch.dtype] | None = None,
    untouched: Untouched | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model directory that `from_pretrained` opens, with the keys that `save_pretrained` writes.

    config.json is written last, so an export that was interrupted does not open as a model. If writing
    fails, the files written so far are removed. All is for this user only.

    Args:
        model: The model, which gives names, shapes, dtypes, persistent buffers, ties and configuration, but
            not its values.
        out: Directory without a model; it is made when missing.
        groups: Names of the parameters of each block, as in `model.named_parameters()`, each name once.
            They are read in this order.
        read: The function that returns the value of a parameter on the host; it is called once for each.
        dtype: The dtype of the value that `read` returns; that of the model's parameter when None.
        untouched: Tensors that the model has no place for, which are written as they are.
        max_shard_bytes: Size from which the weights are split into several files.

    Raises:
        OutputError: The directory cannot be written or holds a model.
        ModelError: The model shares parameters in a way that its class does not declare.
    """
    out = Path(out)
    plan = ExportPlan(model, groups, dtype=dtype, untouched=untouched, max_shard_bytes=max_shard_bytes)
    with os_errors("write", out), _directory(out) as written:
        _write_shards(out, plan.shards, plan.values(read), written)
        for name, text in plan.texts().items():
            _write_text(out / name, text, written)


class ExportPlan:
    """The files of a model directory: what is in them, and how each of their tensors is made."""

    def __init__(
        self,
        model: PreTrainedModel,
        groups: Sequence[Sequence[str]],
        *,
        dtype: Callable[[str], torch.dtype] | None = None,
        untouched: Untouched | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        """Plan the files; the arguments are those of `export_weights`.

        Raises:
            ModelError: The model shares parameters in a way that its class does not declare.
        """
        self._model, self._untouched = model, untouched
        self._specs = _state_specs(model, dtype)
        self._saved = _saved_names(model)
        self.units = _units(model, _assign_buffers(groups, self._specs, persistent_buffers(model)))
        """Names of parameters and buffers that are read, and converted to tensors of files, together."""
        self.keys: list[list[str]] = []
        """The names in the files of the tensors that each unit makes."""
        self.shards = self._plan_shards(max_shard_bytes)
        """The files of weights."""

    def _plan_shards(self, max_shard_bytes: int) -> list[Shard]:
        """Fill shards with what the reverse conversion makes, in the order of writing, and with others."""
        written: Specs = {}
        for unit in self.units:
            empty = {
                name: torch.empty(shape, device="meta", dtype=dtype)
                for name, dtype, shape in ((name, *self._specs[name]) for name in unit)
            }
            made = _reverted(self._model, empty, self._saved)
            self.keys.append(list(made))
            for key, value in made.items():
                written[key] = value.dtype, tuple(value.shape)
        others: Specs = {} if self._untouched is None else self._untouched.specs
        if twice := sorted(written.keys() & others.keys()):
            raise ModelError(
                f"{twice[0]} is a tensor of the model, and one that it has no place for; rename one"
            )
        shards = [Shard()]
        for key, (dtype, shape) in (written | others).items():
            if shards[-1].tensors and shards[-1].num_bytes + num_bytes(dtype, shape) > max_shard_bytes:
                shards.append(Shard())
            shards[-1].add(key, dtype, shape)
        for number, shard in enumerate(shards, 1):
            shard.name = (
                WEIGHTS_NAME if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            )
        return shards

    def make(
        self,
        unit: Sequence[str],
        read: Callable[[str], torch.Tensor],
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of files that a unit makes, by their names there.

        Args:
            unit: One of `units`.
            read: The function that returns the value of a parameter on the host.
            buffers: The values of the persistent buffers; None: as the model has them.
        """
        if buffers is None:
            buffers = persistent_buffers(self._model)
        values = {}
        for name in unit:
            if name in buffers or self._saved[name] is not None:
                values[name] = buffers[name] if name in buffers else read(name)
                found = (values[name].dtype, tuple(values[name].shape))
                expected = self._specs[name]
                assert found == expected, f"{name} is read as {found}, and the model has {expected}"
        return _reverted(self._model, values, self._saved)

    def values(self, read: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Read unit after unit, and yield the tensors of the files."""
        buffers = persistent_buffers(self._model)
        for unit in self.units:
            made = self.make(unit, read, buffers)
            for key in list(made):
                yield key, made.pop(key)
        if self._untouched is not None:
            yield from self._untouched.values()

    def texts(self) -> dict[str, str]:
        """Return the small files by name, with the one last without which the directory is no model."""
        texts = {}
        if len(self.shards) > 1:
            texts[INDEX_NAME] = _index_text(self._model, self.shards)
        if self._model.can_generate():
            texts["generation_config.json"] = self._model.generation_config.to_json_string()
        texts["config.json"] = _config_text(self._model, self._specs)
        return texts


def _state_specs(model: PreTrainedModel, dtype: Callable[[str], torch.dtype] | None) -> Specs:
    """Return dtype and shape of each tensor to read, by the name under which `read` and the model know it."""
    ignored = set(model._keys_to_ignore_on_save or ())
    specs: Specs = {}
    for name, parameter in model.named_parameters():
        specs[name] = (dtype(name) if dtype else parameter.dtype, tuple(parameter.shape))
    for name, buffer in persistent_buffers(model).items():
        if name not in ignored:
            specs[name] = (buffer.dtype, tuple(buffer.shape))
    return specs


def _assign_buffers(
    groups: Sequence[Sequence[str]], specs: Specs, buffers: Mapping[str, torch.Tensor]
) -> list[list[str]]:
    """Append each buffer to the group that has most of its path."""
    assigned = [list(group) for group in groups]
    group_of: dict[str, list[str]] = {"": assigned[-1]}
    for group, names in zip(assigned, groups, strict=True):
        for name in names:
            for prefix in _prefixes(name):
                group_of.setdefault(prefix, group)
    for name in buffers:
        if name in specs:
            group_of[next(prefix for prefix in (*_prefixes(name), "") if prefix in group_of)].append(name)
    given = [name for group in assigned for name in group]
    assert sorted(given) == sorted(specs), f"groups and model differ in {sorted(set(given) ^ set(specs))[:4]}"
    return assigned


def _prefixes(name: str) -> Iterator[str]:
    """Yield the paths of the modules that hold a tensor, innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _units(model: PreTrainedModel, groups: list[list[str]]) -> list[list[str]]:
    """Split the groups into what one reverse conversion takes together, nearly always single tensors."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = [
            each
            for each in get_model_conversion_mapping(model, add_legacy=False)
            if not isinstance(each, PrefixChange)
        ]
    reverse = [each.reverse_transform() for each in conversions[::-1]]
    converters = [each for each in reverse if isinstance(each, WeightConverter)]
    renamings = [each for each in reverse if isinstance(each, WeightRenaming)]
    units: list[list[str]] = []
    for group in groups:
        together: dict[Hashable, list[str]] = {}
        for name in group:
            matches = (each.rename_source_key(name) for each in converters)
            unit = next((renamed for renamed, pattern in matches if pattern is not None), None)
            together.setdefault(unit or _renamed_with(name, renamings) or name, []).append(name)
        units.extend(together.values())
    return units


def _renamed_with(name: str, renamings: Sequence[WeightRenaming]) -> Hashable | None:
    """Return what a name has in common with those that it is renamed together with; None: there are none.

    Where a checkpoint has `norm0` and `norm1` for `norm1` and `norm2`, transformers renames the second one
    only in a call in which it has seen the first.
    """
    for number, renaming in enumerate(renamings):
        if isinstance(renaming, _GROUP):
            patterns = renaming.source_patterns
            found = next(filter(None, (re.search(pattern, name) for pattern in patterns)), None)
            if found is not None:
                return number, found.groups()
        else:
            name, _ = renaming.rename_source_key(name)
    return None


def _saved_names(model: PreTrainedModel) -> dict[str, str | None]:
    """Map each parameter to the one of its tied names that is saved, or None when it is not saved.

    Raises:
        ModelError: Parameters share storage without a declared tie, so no name says which is to be saved.
    """
    ignored = set(model._keys_to_ignore_on_save or ())
    declared = [
        re.compile(f"{prefix}.{key}" if prefix else key)
        for prefix, module in model.named_modules()
        for key in (getattr(module, "_tied_weights_keys", None) or {})
    ]
    saved: dict[str, str | None] = {}
    for name, aliases in tied_names(model).items():
        kept = sorted(alias for alias in aliases if alias not in ignored)
        for alias in list(kept):
            if len(kept) > 1 and any(pattern.search(alias) for pattern in declared):
                kept.remove(alias)
        if len(kept) > 1:
            raise ModelError(
                f"{', '.join(kept)} are one parameter, and {type(model).__name__} declares no tie"
            )
        saved[name] = kept[0] if kept else None
    return saved


def _reverted(
    model: PreTrainedModel, values: dict[str, torch.Tensor], saved: Mapping[str, str | None]
) -> dict[str, torch.Tensor]:
    """Convert the tensors of one unit to the names and shapes of the checkpoint."""
    state = {}
    for name, value in values.items():
        kept = saved.get(name, name)
        if kept is not None:
            state[kept] = value
    return revert_weight_conversion(model, state) if state else {}


def _write_shards(
    out: Path, shards: list[Shard], values: Iterable[tuple[str, torch.Tensor]], written: list[Path]
) -> None:
    """Write each tensor in its place."""
    with contextlib.ExitStack() as stack:
        pending = iter(shards)
        writers: dict[str, ShardWriter] = {}
        for key, value in values:
            while key not in writers:
                shard = next(pending)
                writer = stack.enter_context(ShardWriter(out / shard.name, shard, written))
                writers.update(dict.fromkeys(shard.tensors, writer))
            writers.pop(key).write(key, value)
            del value  # before the next one is read


def _index_text(model: PreTrainedModel, shards: list[Shard]) -> str:
    metadata = {
        "total_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "total_size": sum(shard.num_bytes for shard in shards),
    }
    weight_map = {key: shard.name for shard in shards for key in shard.tensors}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"


def _config_text(model: PreTrainedModel, specs: Specs) -> str:
    """Return the configuration with the dtype that most elements have and the class that was saved."""
    num_elements: dict[torch.dtype, int] = {}
    for dtype, shape in specs.values():
        if dtype.is_floating_point:
            num_elements[dtype] = num_elements.get(dtype, 0) + torch.Size(shape).numel()
    config: PretrainedConfig = copy.deepcopy(model.config)
    main = str(max(num_elements, key=lambda dtype: num_elements[dtype])).removeprefix("torch.")
    for level in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if level is not None:
            level.dtype = main
    config.architectures = [type(model).__name__]
    config.__dict__.pop("transformers_weights", None)
    return config.to_json_string(use_diff=True)


@contextlib.contextmanager
def _directory(out: Path) -> Iterator[list[Path]]:
    """Make the directory and yield a list for the files written, which are removed if the block fails."""
    with os_errors("use the output directory", out):
        is_new = not out.exists()
        files.make_directories(out)
        held = files.matching_names(out, _MODEL_PATTERNS)
    if held:
        raise OutputError(f"{out} already holds a model ({held[0]}); give a new directory")
    written: list[Path] = []
    try:
        yield written
    except BaseException:
        with contextlib.suppress(OSError):
            for file in written:
                file.unlink(missing_ok=True)
            if is_new:
                out.rmdir()
        raise


def _write_text(file: Path, text: str, written: list[Path]) -> None:
    written.append(file)
    files.write_bytes_durably(file, text.encode())
