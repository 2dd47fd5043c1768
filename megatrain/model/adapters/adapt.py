"""Decides what of a model is trained: freezes parameters by name, or puts PEFT's adapters into its modules.

The model may have weights or be on the meta device. Adapters are PEFT's own modules, so that its file format,
its merging and its forward are the ones that everybody knows. A module that is trained whole beside them is
simply not frozen: PEFT would keep a second copy of it, which takes memory and does not stream; in the file it
has PEFT's name all the same.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from megatrain.config.adaptation import ALL_LINEAR, Adaptation, LoraChoice
from megatrain.errors import ConfigError, ModelError, first_line
from megatrain.model.adapters.files import CONFIG_NAME, WEIGHTS_NAME, encode_config
from megatrain.model.blocks import is_beside
from megatrain.model.weights.parts import beside_text
from megatrain.model.weights.reading import open_weights, require_finite
from megatrain.model.weights.skeleton import tied_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "default"
"""PEFT's name for the one adapter that a model gets here."""
_PREFIX = "base_model.model."
"""The prefix of parameters' names in PEFT's files."""
_KEPT = "_megatrain_adapter"
_NEEDLESS_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    ("`is_gradient_checkpointing`", FutureWarning),  # PEFT asks transformers the old way
    ("fan_in_fan_out is set to False", UserWarning),  # and corrects it
    ("The following (rank|alpha)_pattern keys.*gate_up_proj", RuntimeWarning),  # which it has made itself
)
"""The warnings of PEFT about what users cannot change."""


def adapt(model: PreTrainedModel, adaptation: Adaptation) -> None:
    """Leave of a model only that trained which a run trains, in place.

    Args:
        model: The model, with weights or without; without them, `initialise` comes once it has memory.
        adaptation: The description of what is trained.

    Raises:
        ConfigError: Names that the model does not have, or nothing is left to train.
        ModelError: PEFT is not installed, or refuses.
    """
    if adaptation.lora is not None:
        _add_chosen(model, adaptation.lora)
    names = tied_names(model)
    for key, patterns in (("train.freeze", adaptation.freeze), ("train.only", adaptation.only)):
        for pattern in patterns:
            if not any(_matches(aliases, [pattern]) for aliases in names.values()):
                raise ConfigError(
                    f"{key} has {pattern!r}, which is the name of no parameter; the model has "
                    f"{', '.join(list(names)[:3])} and {len(names) - 3} more"
                )
    parameters = dict(model.named_parameters())
    for name, aliases in names.items():
        if _matches(aliases, adaptation.freeze) or (
            adaptation.only and not _matches(aliases, adaptation.only)
        ):
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError("train.freeze and train.only leave no parameter to train; freeze fewer")


def _add_chosen(model: PreTrainedModel, lora: LoraChoice) -> None:
    """Put the adapters of a choice into a model.

    Raises:
        ConfigError: One of `target_modules` is the end of no module's name, nor of one that PEFT knows by
            another name, such as matrices of experts.
    """
    paths = [path for path, _ in model.named_modules()]
    own = [] if lora.target_modules == (ALL_LINEAR,) else lora.target_modules
    unknown = [end for end in own if not any(f".{path}".endswith(f".{end}") for path in paths)]
    config = lora_config(model, lora)
    try:
        add_adapters(model, config)
        unknown = [end for end in unknown if end in (config.target_modules or ())]
    except ModelError:  # there is nothing that PEFT could adapt
        if not unknown:
            raise
    if unknown:
        leaves = {path.rpartition(".")[2]: None for path, each in model.named_modules() if _is_linear(each)}
        close = difflib.get_close_matches(unknown[0], leaves, n=3) or list(leaves)[:5]
        raise ConfigError(
            f"lora.target_modules has {unknown[0]!r}, which is the end of no module's name; the model has "
            f"{', '.join(close)}"
        )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, Conv1D))


def _matches(aliases: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in aliases for pattern in patterns)


def lora_config(model: PreTrainedModel, lora: LoraChoice) -> Any:
    """Return the `peft.LoraConfig` of a choice."""
    is_short = lora.target_modules == (ALL_LINEAR,)
    whole = list(lora.modules_to_save)
    if lora.trains_embeddings:
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        whole += [path for path, module in model.named_modules() if any(module is end for end in ends)]
    return _peft().LoraConfig(
        r=lora.r,
        lora_alpha=int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=ALL_LINEAR if is_short else list(lora.target_modules),
        exclude_modules=_in_frozen_towers(model),
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        modules_to_save=whole or None,
        task_type="CAUSAL_LM",
    )


def _in_frozen_towers(model: PreTrainedModel) -> str | None:
    """Return the pattern of the names of modules in towers that are frozen; None: there are none."""
    frozen = beside_text(model) - {id(each) for each in model.parameters() if each.requires_grad}
    towers: list[str] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{tower}.") for tower in towers)
        if not is_inside and any(True for _ in module.parameters()) and is_beside(module, frozen):
            towers.append(path)
    return rf"(?:{'|'.join(map(re.escape, towers))})(?:\..*)?" if towers else None


def add_adapters(model: PreTrainedModel, config: Any) -> None:
    """Put adapters into a model, in place, and freeze the rest but for what `config.modules_to_save` names.

    Args:
        model: The model, with weights or without.
        config: A `peft.LoraConfig`; it is changed.

    Raises:
        ConfigError: Names that the model does not have.
        ModelError: PEFT refuses.
    """
    whole = _whole_modules(model, config.modules_to_save or ())
    config.modules_to_save, config.inference_mode = None, False
    is_empty = next(model.parameters()).is_meta
    try:
        with _quiet():
            adapted = _peft().get_peft_model(model, config, low_cpu_mem_usage=is_empty)
    except Exception as error:  # PEFT checks in its own ways
        raise ModelError(f"lora: PEFT cannot add these adapters: {first_line(error)}") from error
    for path in whole:
        module = model.get_submodule(path)
        if any("lora_" in name for name, _ in module.named_parameters()):
            raise ConfigError(
                f"{path} is in lora.modules_to_save and has an adapter (lora.target_modules); keep one"
            )
        module.requires_grad_(True)
    config.modules_to_save = whole or None
    model.train(model.training)  # PEFT's new modules begin in training mode
    model.__dict__[_KEPT] = adapted


def saved_config(directory: Path) -> Any:
    """Read the `peft.LoraConfig` of a directory with adapters.

    Raises:
        ModelError: The configuration cannot be read, is not of LoRA, or names no base.
    """
    try:
        config = _peft().PeftConfig.from_pretrained(str(directory))
    except Exception as error:  # whatever a damaged file makes PEFT raise
        raise ModelError(f"{directory}: {CONFIG_NAME} cannot be read: {first_line(error)}") from error
    if getattr(config.peft_type, "value", config.peft_type) != "LORA":
        raise ModelError(f"{directory} has adapters of type {config.peft_type}; only LoRA is read")
    if config.base_model_name_or_path:  # an export names a place in this user's home directory by ~
        config.base_model_name_or_path = os.path.expanduser(config.base_model_name_or_path)
    return config


def _whole_modules(model: PreTrainedModel, ends: Sequence[str]) -> list[str]:
    """Return the paths of the modules that are trained whole, and of those that share parameters with them.

    Raises:
        ConfigError: There is no such module.
    """
    paths = [path for path, _ in model.named_modules()]
    found: list[str] = []
    for end in ends:
        matching = [path for path in paths if path == end or path.endswith(f".{end}")]
        if not matching:
            raise ConfigError(
                f"lora.modules_to_save has {end!r}, which is no module of the model; try embed_tokens or "
                "lm_head, or the end of another module's name"
            )
        found += matching
    inside = tuple(f"{path}." for path in found)
    for aliases in tied_names(model).values():
        if len(aliases) > 1 and any(name.startswith(inside) for name in aliases):
            found += [name.rpartition(".")[0] for name in aliases]
    return list(dict.fromkeys(found))


def initialise(
    model: PreTrainedModel, read: Callable[[str], Tensor], put: Callable[[str, Tensor], None], *, seed: int
) -> None:
    """Give adapters that `adapt` has made without memory the values with which PEFT begins.

    Args:
        model: The model, whose base already has its weights.
        read: The function that returns the fp32 value of a parameter.
        put: The function that writes a parameter.
        seed: The seed of the draws; the same seed gives the same values, whatever the model's own seed.
    """
    adapted = model.__dict__.get(_KEPT)
    if adapted is None:
        return
    generator = torch.Generator().manual_seed(seed)
    magnitudes = []
    for name, parameter in model.named_parameters():
        if f".lora_A.{_NAME}." in name:
            drawn = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)  # as PEFT draws it
            put(name, drawn)
        elif f".lora_B.{_NAME}." in name or f".lora_embedding_A.{_NAME}" in name:
            put(name, torch.zeros(parameter.shape))
        elif f".lora_embedding_B.{_NAME}" in name:
            put(name, torch.randn(parameter.shape, generator=generator))
        elif f".lora_magnitude_vector.{_NAME}." in name:
            magnitudes.append(name)
    for name in magnitudes:
        path = name.partition(".lora_magnitude_vector.")[0]
        weight = read(f"{path}.base_layer.weight")
        if getattr(model.get_submodule(path), "fan_in_fan_out", False):
            weight = weight.T
        put(name, torch.linalg.norm(weight, dim=1))


def adapter_tensors(model: PreTrainedModel) -> dict[str, str]:
    """Map the names in PEFT's file of the adapters to names of the model's parameters; empty: it has none."""
    adapted = model.__dict__.get(_KEPT)
    if adapted is None:
        return {}
    names = {
        f"{_PREFIX}{name}": nn.Parameter(torch.empty(0, device="meta"))
        for name, _ in model.named_parameters(remove_duplicate=False)
    }
    by_id = {id(stand_in): name.removeprefix(_PREFIX) for name, stand_in in names.items()}
    with _quiet():
        saved = _peft().get_peft_model_state_dict(adapted, state_dict=names, save_embedding_layers=False)
    found = {key: by_id[id(stand_in)] for key, stand_in in saved.items()}
    first = {alias: name for name, aliases in tied_names(model).items() for alias in aliases}
    for path in adapted.peft_config[_NAME].modules_to_save or ():
        for leaf, _ in model.get_submodule(path).named_parameters():
            found[f"{_PREFIX}{path}.{leaf}"] = f"{path}.{leaf}"
    return {key: first[name] for key, name in found.items()}


def read_adapter(model: PreTrainedModel, directory: Path, put: Callable[[str, Tensor], None]) -> None:
    """Read saved adapters into a model that has the same.

    Raises:
        ModelError: The saved adapters are of other modules, or another rank.
    """
    names = adapter_tensors(model)
    parameters = dict(model.named_parameters())
    file = directory / WEIGHTS_NAME
    with open_weights(file) as tensors:
        for key in sorted(names.keys() ^ set(tensors.keys())):
            where = "lacks" if key in names else "has, for which the model has no place,"
            raise ModelError(f"{file} {where} {key}; use the lora settings that it was trained with")
        for key, name in names.items():
            value = tensors.get_tensor(key)
            if value.shape != parameters[name].shape:
                raise ModelError(
                    f"{file}: {key} is {list(value.shape)}, and the model's is "
                    f"{list(parameters[name].shape)}; use the lora settings that it was trained with"
                )
            require_finite(value, file, key)
            put(name, value)


def saved_vocabulary(model: PreTrainedModel, directory: Path) -> int:
    """Return the rows of the embedding that was trained whole with saved adapters; 0: it was not."""
    embedding = model.get_input_embeddings()
    path = next(path for path, module in model.named_modules() if module is embedding)
    file, key = directory / WEIGHTS_NAME, f"{_PREFIX}{path}.weight"
    with open_weights(file) as tensors:
        return int(tensors.get_slice(key).get_shape()[0]) if key in tensors.keys() else 0  # noqa: SIM118


def adapter_config(model: PreTrainedModel, base: str) -> bytes:
    """Return what PEFT calls adapter_config.json.

    Args:
        model: The model with its adapters.
        base: The place where their base is found: a directory or a hub id.
    """
    config = model.__dict__[_KEPT].peft_config[_NAME].to_dict()
    values = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
    values |= {"inference_mode": True, "base_model_name_or_path": base}
    return encode_config(values)


_SWITCH = "_disable_adapters"
"""Attribute of PEFT's modules; its own switch also freezes and thaws parameters."""


def has_adapters(model: nn.Module) -> bool:
    """Whether `adapt` has put adapters into a model."""
    return _KEPT in model.__dict__


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let the model be what it is without its adapters, if it has any; what is trained stays marked so."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, _SWITCH)]
    held = [module._disable_adapters for module in modules]
    for module in modules:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module, is_off in zip(modules, held, strict=True):
            module._disable_adapters = is_off


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what PEFT warns of and users cannot change."""
    with warnings.catch_warnings():
        for pattern, kind in _NEEDLESS_WARNINGS:
            warnings.filterwarnings("ignore", pattern, kind)
        yield


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ModelError("lora.r needs peft, which is not installed: pip install peft") from error
    return peft
