"""Quantised weights that a model keeps as its checkpoint has them: which, and how their tensors are read.

What is kept hangs on the parameter, as an `Encoding`: from there the layouts of blocks take it, wherever the
parameter goes. A parameter that is trained is never kept so, since it has values of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn

from megatrain.errors import ConfigError, ModelError
from megatrain.layout.encoding import Encoding
from megatrain.model.weights.convert import Conversion
from megatrain.model.weights.encoding import Region, WeightEncoding
from megatrain.model.weights.reading import read_tensor, require_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

_ATTRIBUTE = "megatrain_encoding"


def encoding_of(parameter: nn.Parameter) -> Encoding | None:
    """Return how a parameter is kept on the host; None: as the values that are computed with."""
    found: Encoding | None = None if parameter.requires_grad else parameter.__dict__.get(_ATTRIBUTE)
    return found


def keep_encoded(parameter: nn.Parameter, encoding: Encoding | None) -> None:
    """Have a parameter kept in an encoding, as long as it is frozen; None: not any more."""
    if encoding is None:
        parameter.__dict__.pop(_ATTRIBUTE, None)
    else:
        parameter.__dict__[_ATTRIBUTE] = encoding


def host_bytes_of(parameter: nn.Parameter) -> int:
    """Return the bytes of host memory that a parameter takes."""
    encoding = encoding_of(parameter)
    return parameter.nbytes if encoding is None else encoding.nbytes


def keep_as_stored(model: PreTrainedModel, conversions: Sequence[Conversion], where: str | Path) -> None:
    """Have the weights of a model kept as the checkpoint has them that it was planned for, where that can be.

    Args:
        model: The model, without adapters.
        conversions: How the checkpoint becomes the model.
        where: The checkpoint, as it was given.

    Raises:
        ConfigError: Nothing of the checkpoint can be kept so.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    encodings = {
        each.target: found
        for each in conversions
        if each.target in parameters and (found := _encoding(each)) is not None
    }
    quantised = [each.target for each in conversions if any(s.making is not None for _, s in each.sources)]
    if not encodings:
        what = "has no quantised weights" if not quantised else "is in a format that is read in bf16 alone"
        raise ConfigError(
            f"lora.base is as_stored, which keeps a base in MXFP4 or FP8, and {where} {what}; use "
            "lora.base=dequantised"
        )
    others = [name for name in quantised if name not in encodings]
    if others:
        _log.warning(
            "%s: %d of %d quantised weights are kept as stored; %s and others stand in the model in another "
            "way than in the files, and are kept in bf16",
            where,
            len(encodings),
            len(quantised),
            others[0],
        )
    for name, encoding in encodings.items():
        keep_encoded(parameters[name], encoding)


def _encoding(conversion: Conversion) -> WeightEncoding | None:
    """Return the encoding of the parameter that sources make; None: it has none."""
    makings = [source.making for _, source in conversion.sources]
    kinds = [None if making is None else making.encoding for making in makings]
    if conversion.regions is None or kinds[0] is None or any(kind != kinds[0] for kind in kinds):
        return None
    return kinds[0].of_all(conversion.shapes[conversion.target], conversion.regions)


def codes_of(
    conversion: Conversion, handles: Mapping[Path, Any]
) -> Iterator[tuple[WeightEncoding, str, Tensor, Region]]:
    """Yield what a kept parameter is made of: by source its encoding, the part, its tensor, and its region.

    Raises:
        ModelError: A tensor cannot be read, or is of values that are not finite.
    """
    assert conversion.regions is not None
    for (_, source), region in zip(conversion.sources, conversion.regions, strict=True):
        assert source.making is not None
        parts = {name: read_tensor(handles, each) for name, each in source.making.parts.items()}
        require_finite(source.making.make(parts), source.file, source.key)
        assert source.making.encoding is not None
        for name, tensor in parts.items():
            yield source.making.encoding, name, tensor, region


def give_values(model: nn.Module, value: Callable[[str], Tensor]) -> None:
    """Put parameters with values in the place of those that are kept in codes.

    Args:
        model: The model.
        value: The function that returns the value of a parameter, by its name, in memory of its own.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None or encoding_of(parameter) is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(value(names[id(parameter)]), requires_grad=False)
            module._parameters[leaf] = made[id(parameter)]


def refuse_to_save(*_: Any, **__: Any) -> NoReturn:
    """Take the place of a model's `save_pretrained` while weights of it are kept in codes.

    Raises:
        ModelError: In any case.
    """
    raise ModelError(
        "model.save_pretrained needs the values of all weights, and some are kept as the checkpoint stores "
        "them (lora.base=as_stored); save the adapters, which `megatrain export --merge` joins to the base, "
        "or call engine.detach() before, which makes the values in host memory"
    )
