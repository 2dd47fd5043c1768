"""Reads the parameters of a model directory one at a time, in any order."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from megatrain.model.weights.convert import Conversion
from megatrain.model.weights.files import FLOAT_DTYPES, PlannedWeights, open_weights, values_of


class OnDemand:
    """The weights of a model directory, while the context lasts; a tensor is read when it is asked for."""

    def __init__(self, weights: PlannedWeights) -> None:
        """Take a plan; the model's persistent buffers are read when the context is entered."""
        self._weights = weights
        self._makers: dict[str, Conversion] = {}
        for conversion in weights.conversions:
            for target in conversion.shapes:
                self._makers.setdefault(weights.first_names.get(target, target), conversion)
        self._stack = ExitStack()

    def __enter__(self) -> OnDemand:
        """Open the files."""
        weights = self._weights
        files = {file: self._stack.enter_context(open_weights(file)) for file in weights.files}
        self._handles: dict[Any, Any] = files
        for name, buffer in weights.buffers.items():
            if name in self._makers:
                buffer.copy_(self.value(name))
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the files."""
        self._stack.close()

    def dtype(self, name: str) -> torch.dtype:
        """Return the type that a parameter has in the files."""
        return FLOAT_DTYPES[self._makers[name].sources[0][1].dtype]

    def value(self, name: str) -> Tensor:
        """Read a parameter, by its name in the model.

        Raises:
            ModelError: A file cannot be read.
        """
        conversion, names = self._makers[name], self._weights.first_names
        whole: Tensor | None = None
        for target, value, region in values_of(self._weights.model, conversion, self._handles):
            if names.get(target, target) != name:
                continue
            if not region:
                return value
            if whole is None:
                whole = torch.empty(conversion.shapes[target], dtype=value.dtype)
            whole[region] = value
        assert whole is not None
        return whole
