"""Liger's kernels: asked for by name, applied before the model is built, without its loss."""

from __future__ import annotations

import importlib.machinery
import logging
import sys
from types import ModuleType
from typing import Any

import pytest

from megatrain.errors import ConfigError
from megatrain.model import liger
from megatrain.model.liger import apply_liger, uses_liger

Calls = list[tuple[str, dict[str, Any]]]


def fake_module(name: str, **members: Any) -> ModuleType:
    """Make an importable module."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(members)
    return module


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Install a stand-in for Liger and Triton that knows llama; gives the calls that it gets."""
    made: Calls = []

    def apply(model_type: str, **kwargs: Any) -> None:
        made.append((model_type, kwargs))

    for module in (
        fake_module("triton"),
        fake_module("liger_kernel"),
        fake_module("liger_kernel.transformers", _apply_liger_kernel=apply),
        fake_module("liger_kernel.transformers.monkey_patch", MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": apply}),
    ):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    liger.warn_once.cache_clear()
    return made


def test_kernels_are_applied_without_a_loss(calls: Calls) -> None:
    assert uses_liger("liger", "cuda")
    assert apply_liger("llama")
    ((model_type, kwargs),) = calls
    assert model_type == "llama"
    assert kwargs == {"cross_entropy": False, "fused_linear_cross_entropy": False}


def test_unknown_model_type_is_warned_of_once(calls: Calls, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not apply_liger("mamba2")
        assert not apply_liger("mamba2")
    assert [record.getMessage() for record in caplog.records] == [
        "Liger has no kernels for models of type mamba2; they run with torch's own"
    ]
    assert not calls


@pytest.mark.parametrize("setting", ["auto", "torch"])
def test_torchs_kernels_need_nothing(setting: str) -> None:
    assert not uses_liger(setting, "cuda")


@pytest.mark.parametrize("missing", ["liger_kernel", "triton"])
def test_missing_package_is_named_with_the_way_out(
    calls: Calls, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, missing)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match=rf"{missing} is not installed.*pip install liger-kernel triton"):
        uses_liger("liger", "cuda")


def test_kernels_need_a_gpu(calls: Calls) -> None:
    with pytest.raises(ConfigError, match="GPUs only"):
        uses_liger("liger", "cpu")
