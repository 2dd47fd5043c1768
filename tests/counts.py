"""Counts of models that tests plan for: each is counted once per process, for most models are alike."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import nn

from megatrain.layout import pools

_COUNTS: dict[Any, Any] = {}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def counted_once() -> Iterator[None]:
    """Keep what the counting code finds, under everything that it looks at; what warns is counted anew."""
    module = sys.modules.get("megatrain.model.profile.count")
    if module is None:
        yield
        return
    count = module._count

    def kept(counter: Any, *options: Any) -> Any:
        key = _key(counter, options)
        found = _COUNTS.get(key)
        if found is None:
            found = count(counter, *options)
            if key is not None and not found.warnings:
                _COUNTS[key] = found
        return replace(found)  # what a plan keeps of an anatomy is of this one

    with mock.patch.object(module, "_count", kept):
        yield


def _key(counter: Any, options: tuple[Any, ...]) -> Any:
    """Name a model by its configuration, modules, parameters and shape; None: a test has changed it."""
    modules = list(counter.model.named_modules())
    if any("forward" in vars(each) or any(getattr(each, name) for name in _HOOKS) for _, each in modules):
        return None
    return (
        options,
        counter.shape,
        counter.is_packed,
        counter.document_len,
        counter.compiles,
        counter.loss,
        counter.sequence,
        counter.warnings,
        repr([layout.sizes for layout in counter.layouts]),
        tuple(counter.largest_runs),
        pools.saved_visit,  # which counting calls by itself
        _without_name(counter.model.config),
        counter.model.config._attn_implementation,
        tuple((name, type(each), type(each).forward, _plain(each)) for name, each in modules),
        tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in counter.model.named_parameters()),
        tuple((name, buffer.shape, buffer.dtype) for name, buffer in counter.model.named_buffers()),
    )


def _without_name(config: Any) -> str:
    lines = config.to_json_string(use_diff=False).splitlines()
    return "".join(line for line in lines if "_name_or_path" not in line)


def _plain(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    return tuple((key, value) for key, value in vars(module).items() if isinstance(value, (int, float, str)))
