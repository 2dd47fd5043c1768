"""A quantised checkpoint as one in bf16: each weight stands as one tensor, made of its codes and scales.

What is read is the format's definition of a value, computed in fp32 or exactly, and rounded once to bf16.
Everything behind the headers of the files, such as the conversion to the names and shapes of a model, sees
a checkpoint in bf16.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from torch import Tensor

from megatrain.errors import ModelError
from megatrain.model.weights.convert import Source
from megatrain.model.weights.reading import open_weights, read_tensor

Parts: TypeAlias = Mapping[str, Tensor]
"""The tensors that make a weight, by their part in it, such as `codes` and `scales`."""


class Quantisation(ABC):
    """How the weights of a checkpoint are quantised, as its configuration says."""

    left_out: ClassVar[tuple[str, ...]] = ()
    """Endings of the names of tensors that say how activations are quantised: a weight in bf16 has none."""

    @abstractmethod
    def weight_of(self, key: str, sources: Mapping[str, Source]) -> Source | None:
        """Return the weight whose codes a tensor is, as a source in bf16 with its `making`.

        Args:
            key: The key of the tensor.
            sources: The tensors of the files, by key.

        Returns:
            The weight; None if the tensor is no codes.

        Raises:
            ModelError: Codes and scales do not belong together; the sentence names them.
        """

    def weights(self, sources: Mapping[str, Source]) -> dict[str, Source]:
        """Return the tensors of a checkpoint with each quantised weight as one of them.

        Raises:
            ModelError: `weight_of` raises it, or two weights have one name.
        """
        self._opened: dict[Path, Any] = {}
        with ExitStack() as self._stack:
            return self._weights(sources)

    def read(self, source: Source) -> Tensor:
        """Return a small tensor of the files, while `weights` runs; each file is opened once.

        Raises:
            ModelError: It cannot be read.
        """
        if source.file not in self._opened:
            self._opened[source.file] = self._stack.enter_context(open_weights(source.file))
        return read_tensor(self._opened, source)

    def _weights(self, sources: Mapping[str, Source]) -> dict[str, Source]:
        found: dict[str, Source] = {}
        used: set[str] = set()
        for key in sources:
            weight = self.weight_of(key, sources)
            if weight is None:
                continue
            if weight.key in found:
                raise ModelError(
                    f"{weight.file}: {weight.key} is made of {key} and of other tensors; keep one"
                )
            assert weight.making is not None
            found[weight.key] = weight
            used.update(part.key for part in weight.making.parts.values())
        whole = {
            key: source
            for key, source in sources.items()
            if key not in used and not key.endswith(self.left_out)
        }
        for key in found.keys() & whole.keys():
            raise ModelError(
                f"{whole[key].file}: {key} is there twice, quantised and whole; keep one of them"
            )
        return whole | found


_PARTS = re.compile(r"[._](scales?|scale_inv|scale_2|zero_point|qzeros|g_idx|absmax|SCB|pre_quant_scale)$")
"""The endings of names of tensors that say how something is quantised."""


def refuse_parts_of_none(untouched: Sequence[Source]) -> None:
    """Refuse what says how something is quantised, and belongs to no weight: without it values are others.

    Args:
        untouched: The tensors of a quantised checkpoint for which the model has no place.

    Raises:
        ModelError: There is such a tensor.
    """
    for source in untouched:
        if _PARTS.search(source.key):
            raise ModelError(
                f"{source.file}: {source.key} says how something is quantised, in a way that is not read; "
                "give the checkpoint that was quantised, or a copy in bf16"
            )


_CODES = re.compile(r"([._]blocks|\.qweight|[._]weight_packed|[._]weight_scale(_inv)?)$")
"""The endings of names of codes, or of scales, that a checkpoint of values has not."""


def refuse_unnamed(directory: Path, sources: Mapping[str, Source]) -> None:
    """Refuse files that are quantised, of a configuration that does not say how.

    Args:
        directory: The directory of the checkpoint.
        sources: The tensors of the files, by key.

    Raises:
        ModelError: A tensor is in FP8, or has the name of codes or scales.
    """
    for key, source in sources.items():
        is_mxfp4 = key.endswith("_blocks") and key.removesuffix("_blocks") + "_scales" in sources
        is_named = _CODES.search(key) is not None and (is_mxfp4 or not key.endswith("blocks"))
        if is_named or (source.dtype.startswith("F8_") and _PARTS.search(key) is None):
            raise ModelError(
                f"{directory}: the files look quantised ({key} is in {source.dtype}), and config.json has no "
                "quantization_config that says how; take the config.json that belongs to them"
            )


def part(sources: Mapping[str, Source], key: str, codes: Source) -> Source:
    """Return a tensor that belongs to some codes.

    Raises:
        ModelError: It is not there.
    """
    if key not in sources:
        raise ModelError(f"{codes.file}: {codes.key} is quantised ({codes.dtype}) and lacks {key}")
    return sources[key]


def require_shape(source: Source, *shapes: tuple[int, ...]) -> None:
    """Refuse a part of a weight that has another shape than those that fit.

    Raises:
        ModelError: It has another shape.
    """
    if source.shape not in shapes:
        fitting = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise ModelError(f"{source.file}: {source.key} has shape {list(source.shape)}, and not {fitting}")


def value_of(values: Mapping[str, Any], name: str, allowed: Callable[[Any], bool], where: str) -> Any:
    """Return a value of a quantization_config.

    Raises:
        ModelError: The value is none that is allowed.
    """
    found = values.get(name)
    if not allowed(found):
        raise ModelError(f"{where}: quantization_config.{name} is {found!r}, which is not read")
    return found


def levels(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the values of a config.json and those nested in it."""
    yield values
    for value in values.values():
        if isinstance(value, dict):
            yield from levels(value)
