"""Reads a model's configuration and builds the model without its weights.

Nothing from a model directory is executed or unpickled: a configuration that asks for its own code is
refused before transformers sees it. The skeleton has the classes, dtypes, buffers and ties of
`from_pretrained`, and no weights.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from megatrain.errors import ModelError, first_line, os_error_behind, os_sentence
from megatrain.hub import asking_hub, may_be_on_hub, no_directory
from megatrain.model.weights.parts import class_of, freeze_beside_text, maker_of
from megatrain.model.weights.quantised.formats import quantisation_in
from megatrain.model.weights.reading import read_json

_OTHER_TASK = re.compile(r"For(?!CausalLM$|ConditionalGeneration$)[A-Z]\w*$")
_SMALL_ELEMENTS = 1 << 16


def read_config(path_or_id: str | Path, *, allows_file: bool = False) -> PretrainedConfig:
    """Read the configuration of a causal language model.

    Args:
        path_or_id: A local model directory, or the id of a model on the Hugging Face hub.
        allows_file: A file like the config.json of a directory will do.

    Raises:
        ModelError: There is no readable config.json, or it describes a model that is not trained here: one
            that needs remote code, is quantised in a way that is not read, is of an unknown type, is not a
            causal language model, or has parts beside one.
    """
    place = Path(path_or_id)
    if place.is_dir():
        values = _read_json(place / "config.json")
    elif place.is_file() and allows_file:
        values = _read_json(place)
    elif not may_be_on_hub(path_or_id):
        raise ModelError(no_directory(path_or_id))
    else:
        values = _download_config(str(path_or_id))
    _check_config_values(values, str(path_or_id))
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(str(path_or_id), trust_remote_code=False)
    except Exception as error:  # each configuration class validates in its own way
        refused = os_error_behind(error, path_or_id)
        if refused is not None:
            raise ModelError(os_sentence("read the configuration in", path_or_id, refused)) from error
        raise ModelError(f"{path_or_id}: config.json is not valid: {first_line(error)}") from error
    maker_of(config, f"{path_or_id}: ")
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config  # weights are read in bf16
        if getattr(part, "auto_map", None) is not None:
            del part.auto_map  # transformers' own code is run, and no other
    return config


def build_skeleton(
    config: PretrainedConfig, *, dtype: torch.dtype, attn_implementation: str | None = None
) -> PreTrainedModel:
    """Build the causal language model of a configuration with every parameter on the meta device.

    Buffers are real and hold what `from_pretrained` leaves in them; persistent ones hold their initial
    value until a checkpoint is loaded. Ties are kept, and the model is in evaluation mode. No weight is
    allocated or drawn, and the caller's random state is untouched. Of a model with towers, what rows of text
    do not use is frozen.

    Args:
        config: The configuration of a causal language model; it is copied.
        dtype: The dtype, float32 or bfloat16, of the parameters that have no dtype of their own. What
            transformers always keeps in float32 is float32.
        attn_implementation: The attention implementation, by its name in transformers; None takes the
            default.

    Raises:
        ModelError: transformers has no causal language model for the configuration, or cannot build it.
    """
    maker = _checked_maker(config)
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.random.fork_rng(devices=[]), no_init_weights(), parameters_on_meta():
        try:
            model: PreTrainedModel = maker.from_config(
                copy.deepcopy(config), dtype=dtype, trust_remote_code=False, **options
            )
        except Exception as error:  # a constructor fails in its own way on values that do not fit together
            way = "; use model.attn_implementation=sdpa" if "FlashAttention" in str(error) else _other(config)
            raise ModelError(
                f"the {config.model_type} model cannot be built: {first_line(error)}{way}"
            ) from error
    keep_float32(model, dtype)
    model.tie_weights(recompute_mapping=False)
    freeze_beside_text(model)
    with torch.random.fork_rng(devices=[]):
        initialise_buffers(model)
    return model.eval()


def _other(config: PretrainedConfig) -> str:
    """Return what to say of a configuration that was saved with another class than the one that it is of."""
    named, kind = config.architectures or [], class_of(config)
    if not named or kind is None or kind.__name__ in named:
        return ""
    return (
        f"; its config.json names {', '.join(named)} and model_type {config.model_type}, which is "
        f"{kind.__name__}: take the config.json that belongs to the weights"
    )


def skeleton_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model without its weights: parameters on the meta device, everything else copied.

    The data is neither read nor copied, and no module of the model is changed. Left out are hooks, what an
    engine keeps of the model, and forwards that were put on instances and call the model itself, as TRL's do.
    """
    memo: dict[int, Any] = {
        id(parameter): _like(parameter, parameter.dtype) for parameter in model.parameters()
    }
    memo |= {id(value): None for name, value in vars(model).items() if name.startswith("_megatrain_")}
    for module in model.modules():
        memo |= {id(value): type(value)() for name, value in vars(module).items() if "_hooks" in name}
    copied = copy.deepcopy(model, memo)
    modules = {id(module) for module in model.modules()}
    for module in copied.modules():
        if _leads_to(vars(module).get("forward"), modules):
            del module.forward
    return copied


def _leads_to(forward: Any, modules: Collection[int]) -> bool:
    """Whether a function has closed over some modules, or over methods of theirs: a copy of it calls them."""
    function = getattr(forward, "__func__", forward)
    held = inspect.getclosurevars(function).nonlocals.values() if inspect.isfunction(function) else ()
    return any(id(getattr(value, "__self__", value)) in modules for value in held)


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Map the name of each parameter in `named_parameters()` to all its names, itself first."""
    first_names: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(first_names.setdefault(id(parameter), name), []).append(name)
    return names


def num_parameters(model: nn.Module) -> int:
    """Count the elements of all parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are saved with the model, by name."""
    buffers = {}
    for prefix, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set:
                buffers[f"{prefix}.{leaf}" if prefix else leaf] = buffer
    return buffers


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = read_json(file)
    except ModelError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise ModelError(
            f"{file.parent} has no {file.name}; is it a Hugging Face model directory?"
        ) from error
    if not isinstance(values, dict):
        raise ModelError(f"{file} holds a {type(values).__name__}; it must hold a JSON object")
    return values


def _download_config(model_id: str) -> dict[str, Any]:
    with asking_hub(model_id, "its configuration"):
        values, _ = PretrainedConfig.get_config_dict(model_id)
    if not values:
        raise ModelError(f"{model_id} has no config.json on the Hugging Face hub")
    return values


def _check_config_values(values: dict[str, Any], where: str) -> None:
    quantisation_in(values, where)
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelError(f"{where}: config.json has no model_type")
    if model_type not in CONFIG_MAPPING and values.get("auto_map"):
        raise ModelError(
            f"{where}: config.json asks for remote code (auto_map), which is never executed; use a model "
            "type that transformers implements"
        )
    if model_type not in CONFIG_MAPPING:
        raise ModelError(f"{where}: config.json has model_type {model_type!r}, unknown to this transformers")
    kind = CONFIG_MAPPING[model_type]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING and kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ModelError(
            f"{where}: config.json has model_type {model_type!r}, which is not a causal language model"
        )
    architectures = values.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ModelError(
            f"{where}: config.json has architectures {architectures!r}; it must be a list of names"
        )
    for architecture in architectures:
        if _OTHER_TASK.search(architecture):
            raise ModelError(
                f"{where}: config.json names {architecture}, which is not a causal language model"
            )


def _checked_maker(config: PretrainedConfig) -> Any:
    if getattr(config, "auto_map", None):
        raise ModelError(
            f"the {config.model_type} configuration asks for remote code, which is never executed"
        )
    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"the weights of this {config.model_type} model are quantised in memory; give its directory or "
            "hub id, whose weights are read in bf16"
        )
    return maker_of(config)


@contextlib.contextmanager
def parameters_on_meta(kept_shapes: Collection[tuple[int, ...]] = ()) -> Iterator[None]:
    """Make parameters on the meta device, and buffers and other tensors where they belong.

    Modules make their large parameters with `torch.empty` or `torch.zeros`, which go to the meta device at
    once; what else becomes a parameter is moved there when a module registers it, so that one at a time
    exists at most.

    Args:
        kept_shapes: Parameters of these shapes stay on the host; what their constructor does not set is NaN.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta and tuple(parameter.shape) not in kept_shapes:
            module._parameters[name] = _like(parameter, parameter.dtype)

    with mock.patch.object(nn.Module, "register_parameter", register_on_meta), _LargeOnMeta(kept_shapes):
        yield


class _LargeOnMeta(TorchFunctionMode):
    """Sends `torch.empty`, and `torch.zeros` of many floats, to the meta device unless they name a device."""

    def __init__(self, kept_shapes: Collection[tuple[int, ...]]) -> None:
        super().__init__()
        self._kept_shapes = kept_shapes

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros) and kwargs.get("device") is None:
            value = func(*args, **{**kwargs, "device": "meta"})
            if tuple(value.shape) in self._kept_shapes:
                value = func(*args, **kwargs)
                is_unset = func is torch.empty and value.is_floating_point()
                return value.fill_(float("nan")) if is_unset else value
            if func is torch.empty or (value.is_floating_point() and value.numel() > _SMALL_ELEMENTS):
                return value
        return func(*args, **kwargs)


def _like(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter like the given one, its attributes included, on the meta device."""
    value = torch.empty_like(parameter, dtype=dtype, device="meta")
    copied = nn.Parameter(value, requires_grad=parameter.requires_grad)
    copied.__dict__.update(parameter.__dict__)
    return copied


def keep_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give the tensors that transformers keeps in a dtype of their own that dtype, chosen as it chooses."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    patterns = [(re.compile(glob.replace("*", ".*")), kept) for glob, kept in plan.items()]
    for name in list(model.state_dict(keep_vars=True)):
        kept = next((kept for pattern, kept in patterns if pattern.search(name)), None)
        if kept is None:
            continue
        prefix, _, leaf = name.rpartition(".")
        module = model.get_submodule(prefix)
        if leaf in module._parameters:
            module._parameters[leaf] = _like(module._parameters[leaf], kept)
        else:
            module._buffers[leaf] = module._buffers[leaf].to(kept)


def initialise_buffers(model: PreTrainedModel) -> None:
    """Run the model's own initialisation on the buffers only, as `from_pretrained` does after loading."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for module in model.modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:  # was empty or zero; initialisation or a checkpoint gives it its value
                module._buffers[leaf] = torch.zeros_like(buffer, device="cpu")
    model.initialize_weights()
