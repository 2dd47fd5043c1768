"""Tensors of a checkpoint that its model has no place for, such as layers that predict further tokens.

Nothing trains them, and nothing loses them: they are exported as they were. Their files stay open until then,
so that they may be moved or removed, as the checkpoints of a run are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch

from megatrain.errors import ModelError
from megatrain.layout.tensor_file import DTYPES
from megatrain.model.weights.convert import Source
from megatrain.model.weights.reading import open_weights, read_tensor
from megatrain.model.weights.shards import Specs

UNTOUCHED = "_megatrain_untouched"
"""The attribute in which a model has them."""


def require_exportable(sources: Sequence[Source]) -> None:
    """Refuse tensors that could not be written as they are.

    Raises:
        ModelError: A tensor has a dtype that no export has.
    """
    for source in sources:
        if source.dtype not in DTYPES or source.dtype == "C64":
            raise ModelError(
                f"{source.file}: {source.key} has no place in the model, and is of dtype {source.dtype}, "
                "which cannot be exported; remove it from the file"
            )


class Untouched:
    """The tensors of a checkpoint that are exported as they were, by the names that they have there."""

    def __init__(self, sources: Sequence[Source]) -> None:
        """Open the files of some tensors, which `require_exportable` has checked.

        Raises:
            ModelError: A file cannot be read.
        """
        self._sources = {source.key: source for source in sources}
        self._stack = ExitStack()
        self._handles = {
            file: self._stack.enter_context(open_weights(file))
            for file in dict.fromkeys(file for source in sources for file in source.files)
        }

    @property
    def specs(self) -> Specs:
        """Dtype and shape of each tensor."""
        found = self._sources.items()
        return {key: (getattr(torch, DTYPES[source.dtype]), source.shape) for key, source in found}

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor by its name: a view of its file, or in bf16 what is quantised there.

        Raises:
            ModelError: A file cannot be read.
        """
        for key in self._sources:
            yield key, self.value(key)

    def value(self, key: str) -> torch.Tensor:
        """Return one of them; see `values`."""
        return read_tensor(self._handles, self._sources[key])
