"""Which weights a base keeps as stored, where its files are not here: by what its configuration says.

That is enough for a plan. A run has the files, whose headers say it exactly.

Sources: the `quantization_config` of gpt-oss (MXFP4) and of DeepSeek-V3 and Qwen3 (FP8), as transformers
reads them: `modules_to_not_convert` names modules by their beginning or their end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import nn
from transformers import PretrainedConfig

from megatrain.errors import ConfigError
from megatrain.hub import asking_hub, may_be_on_hub
from megatrain.layout.encoding import Encoding
from megatrain.model.weights.files import PlannedWeights, has_weights
from megatrain.model.weights.kept import keep_as_stored, keep_encoded
from megatrain.model.weights.quantised.formats import CONFIG_KEYS
from megatrain.model.weights.quantised.fp8 import Fp8Encoding
from megatrain.model.weights.quantised.mxfp4 import GROUP, Mxfp4Encoding
from megatrain.model.weights.quantised.quantisation import levels
from megatrain.model.weights.reading import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_EXPERTS = re.compile(r"(^|\.)experts\.(gate_up|gate|up|down)_proj$")


def keep_as_planned(model: PreTrainedModel, place: str) -> None:
    """Have the weights of a model kept as `place` stores them, by its files or else by its configuration.

    Args:
        model: The model, without adapters and without memory.
        place: A model directory, a file like its config.json, or a hub id.

    Raises:
        ConfigError: Nothing of it can be kept so.
        ModelError: Its files cannot be used, or it has no configuration.
    """
    directory = _local(place)
    if directory is not None and has_weights(directory):
        keep_as_stored(model, PlannedWeights(model, directory).conversions, place)
        return
    settings = _settings(place)
    method = settings.get("quant_method")
    encodings = _encodings(model, settings) if method in ("mxfp4", "fp8") else []
    if not encodings:
        what = f"is in {method}" if method else "is not quantised"
        raise ConfigError(
            f"lora.base is as_stored, which keeps a base in MXFP4 or FP8, and by its configuration {place} "
            f"{what} and has nothing to be kept; use lora.base=dequantised"
        )
    for parameter, encoding in encodings:
        keep_encoded(parameter, encoding)


def _local(place: str) -> Path | None:
    """Return the directory of a model on this machine, the hub's cache included; None: it has none."""
    if Path(place).is_dir() or not may_be_on_hub(place):
        return Path(place) if Path(place).is_dir() else None
    try:
        return Path(snapshot_download(place, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _encodings(model: PreTrainedModel, settings: Mapping[str, Any]) -> list[tuple[nn.Parameter, Encoding]]:
    """Return the encodings of the parameters that settings of quantisation do not leave out."""
    left_out = settings.get("modules_to_not_convert") or ()
    found = []
    for name, parameter in model.named_parameters():
        module = name if _EXPERTS.search(name) else name.removesuffix(".weight")
        shape, is_fp8 = tuple(parameter.shape), settings["quant_method"] == "fp8"
        encoding = _fp8(model, name, shape, settings) if is_fp8 else _mxfp4(name, shape)
        if encoding is not None and not any(_matches(module, pattern) for pattern in left_out):
            found.append((parameter, encoding))
    return found


def _settings(place: str) -> Mapping[str, Any]:
    """Return what the configuration in a place says of quantisation."""
    found = Path(place)
    if found.exists():
        values = read_json(found / "config.json" if found.is_dir() else found)
    else:
        with asking_hub(place, "its configuration"):
            values, _ = PretrainedConfig.get_config_dict(place)
    every = (level.get(key) for level in levels(values) for key in CONFIG_KEYS)
    return next((each for each in every if isinstance(each, dict)), {})


def _matches(module: str, pattern: str) -> bool:
    regular = pattern.replace(".*.", r"\..*\.") if ".*." in pattern else re.escape(pattern)
    return re.match(rf"{regular}(\.|$)", module) is not None or module.endswith(pattern)


def _mxfp4(name: str, shape: tuple[int, ...]) -> Encoding | None:
    is_stack = _EXPERTS.search(name) is not None and len(shape) == 3 and shape[1] % GROUP == 0
    return Mxfp4Encoding(shape) if is_stack else None  # type: ignore[arg-type]


def _fp8(
    model: PreTrainedModel, name: str, shape: tuple[int, ...], settings: Mapping[str, Any]
) -> Encoding | None:
    owner = model.get_submodule(name.rpartition(".")[0])
    is_linear = isinstance(owner, nn.Linear) and name.endswith(".weight")
    if not (is_linear or _EXPERTS.search(name)) or owner is model.get_output_embeddings():
        return None
    rows, columns = settings.get("weight_block_size") or shape[-2:]
    return Fp8Encoding(shape, (rows, columns), torch.float8_e4m3fn)
