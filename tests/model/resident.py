"""Models whose parameters are bound to real storage, as a plain stand-in for the host arenas."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from megatrain.model.weights.encoding import Region
from megatrain.model.weights.files import load_weights
from megatrain.model.weights.parts import maker_of
from megatrain.model.weights.skeleton import build_skeleton, persistent_buffers, tied_names


class CopySink:
    """Copies values into the parameters of a model, and notes what it was given."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.parameters = dict(model.named_parameters())
        self.regions: list[tuple[str, Region]] = []
        self.dtypes: set[torch.dtype] = set()

    @torch.no_grad()
    def put(self, name: str, value: torch.Tensor, region: Region = ()) -> None:
        self.regions.append((name, region))
        self.dtypes.add(value.dtype)
        target = self.parameters[name]
        part = target[region] if region else target
        assert part.shape == value.shape
        part.copy_(value)


def bind_parameters(model: PreTrainedModel) -> PreTrainedModel:
    """Give each parameter of a skeleton storage of its own, filled with NaN; ties are kept."""
    names = tied_names(model)
    for name, parameter in list(model.named_parameters()):
        bound = nn.Parameter(torch.full(parameter.shape, float("nan"), dtype=parameter.dtype))
        for alias in names[name]:
            prefix, _, leaf = alias.rpartition(".")
            model.get_submodule(prefix)._parameters[leaf] = bound
    return model


def load_bound(path: Path, config: PretrainedConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, CopySink]:
    model = bind_parameters(build_skeleton(config, dtype=dtype))
    sink = CopySink(model)
    assert load_weights(model, path, sink) == []
    return model, sink


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Make a resident float32 model in which no two elements are likely to be equal."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = maker_of(config).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) / 8)
            for buffer in persistent_buffers(model).values():
                buffer.normal_()
    return model


def assert_same_state(actual: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Compare parameters and all buffers bit for bit, with names, order, dtypes and ties."""
    assert tied_names(actual) == tied_names(expected)
    for tensors in ("named_parameters", "named_buffers"):
        actual_tensors = dict(getattr(actual, tensors)())
        expected_tensors = dict(getattr(expected, tensors)())
        assert list(actual_tensors) == list(expected_tensors)
        for name, value in expected_tensors.items():
            assert actual_tensors[name].dtype == value.dtype, name
            assert torch.equal(actual_tensors[name], value), name
