"""`inspect_model` says what of a model would be trained, frozen, kept and exported; it reads no weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatrain.config.sizes import binary, counted
from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import MegatrainError
from megatrain.model.blocks import find_blocks, group_layers
from megatrain.model.causal import refuse_encoder
from megatrain.model.profile.flops import active_parameters, experts_of
from megatrain.model.sequence.range import row_range
from megatrain.model.weights.files import PlannedWeights, has_weights, model_directory
from megatrain.model.weights.parts import beside_text
from megatrain.model.weights.quantised.formats import method_of
from megatrain.model.weights.requantise import WRITTEN
from megatrain.model.weights.skeleton import build_skeleton, read_config, tied_names
from megatrain.train.records.metrics import format_count

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What a run makes of a model."""

    model_type: str
    model_class: str
    """The class of transformers that is built, and exported."""
    num_params: int
    num_trained: int
    """Those of a run that trains all that rows of text use."""
    num_active: int
    """Those that a token passes."""
    num_layers: int
    """The layers of the language model."""
    largest_layer: int
    """The parameters of the largest of these."""
    experts: tuple[int, int] | None
    """The experts of a layer, and those of a token; None: there are none, or the config does not say."""
    towers: dict[str, int]
    """Frozen parts, with their parameters, that rows of text do not use."""
    fixed: dict[str, int]
    """Parts whose class freezes parameters itself, with these, such as biases that a router corrects."""
    ties: tuple[tuple[str, ...], ...]
    """Names that one parameter has."""
    quantisation: str | None
    """The format of the files; None: they are not quantised."""
    num_quantised: int
    """The number of weights that are."""
    untouched: tuple[str, ...]
    """Tensors of the files that the model has no place for, which are exported as they are."""
    file_bytes: int
    """The size of the files of weights; 0: there are none."""
    context: int | None
    """The most tokens of a row; None: no limit is named."""
    native_context: int | None
    """As many of them as positions are not scaled for."""
    rope_scaling: str
    """The scaling of the others, in a few words; empty: there is none."""
    template: str
    """What the tokenizer has for conversations."""

    def lines(self) -> Iterator[str]:
        """Yield the facts in words."""
        yield f"{self.model_type}: {self.model_class}"
        trained = format_count(self.num_trained)
        yield f"parameters  {format_count(self.num_params)}, of which {trained} are trained"
        if self.experts is not None:
            number, active = self.experts
            passed = format_count(self.num_active)
            yield f"experts     {number} in a layer, {active} for a token, which passes {passed} parameters"
        largest = f"the largest with {format_count(self.largest_layer)} parameters"
        yield f"layers      {self.num_layers}, which stream, {largest}"
        for name, size in self.towers.items():
            yield f"frozen      {name}, {format_count(size)} parameters: rows of text do not use them"
        for name, size in self.fixed.items():
            yield f"frozen      {format_count(size)} parameters of {name}, which no gradient changes"
        for names in self.ties:
            yield f"tied        {' and '.join(names)}"
        if self.file_bytes:
            yield f"files       {binary(self.file_bytes)} of safetensors"
        else:
            yield "files       no weights: model.init=random draws them"
        if self.quantisation is not None:
            again = f", or as they are with --format {self.quantisation}"
            number_of = counted(self.num_quantised, "weight")
            yield (
                f"quantised   {self.quantisation}, {number_of}: read in bf16, and exported in bf16"
                f"{again if self.quantisation in WRITTEN else ''}"
            )
        if self.untouched:
            some = ", ".join(self.untouched[:3]) + (", ..." if len(self.untouched) > 3 else "")
            yield f"untouched   {counted(len(self.untouched), 'tensor')}, exported as they are: {some}"
        context = "not named" if self.context is None else f"{self.context:,} tokens"
        yield f"context     {context}{self._scaled()}"
        yield f"template    {self.template}"

    def _scaled(self) -> str:
        if self.native_context is None or self.native_context == self.context:
            return ""
        return f"; beyond {self.native_context:,}, positions are scaled ({self.rope_scaling})"

    def json(self) -> dict[str, Any]:
        """Return the facts as plain values."""
        return asdict(self)


def inspect_model(path: str) -> ModelFacts:
    """Read the configuration, the headers of the files and the tokenizer of a model.

    Args:
        path: Model directory or hub id.

    Raises:
        ModelError: The model is not trained here, or its files do not belong together, with the reason.
    """
    config = read_config(path)
    rows = row_range(config)
    refuse_encoder(config)
    model, place = build_skeleton(config, dtype=torch.bfloat16), model_directory(path)
    weights = PlannedWeights(model, place) if has_weights(place) else None
    blocks = find_blocks(model)
    layers = [group for group in group_layers(blocks) if not blocks[group[0]].is_beside]
    sizes = [sum(value.numel() for n in group for value in blocks[n].parameters.values()) for group in layers]
    return ModelFacts(
        model_type=config.model_type,
        model_class=type(model).__name__,
        num_params=sum(value.numel() for value in model.parameters()),
        num_trained=sum(value.numel() for value in model.parameters() if value.requires_grad),
        num_active=active_parameters(model),
        num_layers=len(layers),
        largest_layer=max(sizes),
        experts=experts_of(model.config),
        towers=_frozen(model, of_text=False),
        fixed=_frozen(model, of_text=True),
        ties=tuple(tuple(names) for names in tied_names(model).values() if len(names) > 1),
        quantisation=method_of(place),
        num_quantised=0 if weights is None else weights.num_quantised,
        untouched=() if weights is None else tuple(source.key for source in weights.untouched),
        file_bytes=0 if weights is None else sum(file.stat().st_size for file in weights.files),
        context=rows.longest,
        native_context=rows.native,
        rope_scaling=rows.scaling,
        template=_template(path),
    )


def _frozen(model: PreTrainedModel, *, of_text: bool) -> dict[str, int]:
    """Return the frozen parts that rows of text use, or do not, by the first names that tell them apart."""
    sizes: Counter[str] = Counter()
    beside = beside_text(model)
    for name, value in model.named_parameters():
        if not value.requires_grad and (id(value) in beside) != of_text:
            sizes[".".join(name.split(".")[:2])] += value.numel()
    return dict(sizes)


def _template(path: str) -> str:
    try:
        tokenizer = load_tokenizer(path)
    except MegatrainError as error:
        return f"no tokenizer: {error}"
    return "a chat template" if tokenizer.chat_template else "no chat template; data.chat_template gives one"
