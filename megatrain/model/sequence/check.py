"""The check that a model computes the same for rows whose tokens are shared out.

What is known to look along the row elsewhere than in attention is refused by the configuration, before a
weight is read. Then the model itself runs twice on a few tokens: as ever, and with its row as the shards of
one batch (`Folded`), which goes through the same code as shards of several ranks. What is not position by
position, has a value per head, makes its own masks or shifts its own labels then computes something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatrain.errors import MegatrainError, ModelError, first_line
from megatrain.model.documents.apart import why_not_by_position
from megatrain.model.layer_configs import layer_configs
from megatrain.model.sequence.attention import check_heads, rows_shared
from megatrain.model.sequence.rows import cut_rows
from megatrain.model.sequence.shards import Folded
from megatrain.model.shares import adds_router_loss, count_targets

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_GROWING = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies follow from the largest position that they are given."""
_TOLERANCE = {torch.float32: 1e-4}
_ROUGH = 0.05
"""The tolerance in other dtypes: a model that looks past its shard differs by much more."""


class Drawn(Protocol):
    """The states of random generators."""

    def is_same(self, other: Any, /) -> bool:
        """Whether nothing was drawn in between."""


def refuse_config(config: PretrainedConfig, number: int) -> None:
    """Refuse a model that is known not to compute the same in so many shards of a row.

    Raises:
        ModelError: The model looks along the row elsewhere than in attention.
        ConfigError: The model's heads cannot be shared out.
    """
    text = config.get_text_config()
    why = why_not_by_position(config)
    if why is None and adds_router_loss(config):
        why = f"the {text.model_type} model has a router loss (output_router_logits), which is of whole rows"
    growing = sorted(set(_rope_types(getattr(text, "rope_parameters", None))) & set(_GROWING))
    if why is None and growing:
        why = f"the {text.model_type} model has rotary embeddings that follow the row's length ({growing[0]})"
    if why is not None:
        raise _refused(why)
    for layer in layer_configs(text):
        heads, keys = (getattr(layer, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
        if isinstance(heads, int):
            check_heads(text.model_type, heads, keys if isinstance(keys, int) else heads, number)


def refuse_model(
    model: PreTrainedModel,
    number: int,
    run: Callable[[Mapping[str, Any]], Any],
    random_state: Callable[[], Drawn],
) -> None:
    """Refuse a model that computes something else in so many shards of a row.

    Args:
        model: The model, in the mode in which it trains.
        number: The number of shards.
        run: The function that calls the model, without gradients, on a batch with labels, and returns its
            output.
        random_state: The function that returns the state of the generators from which the model draws.

    Raises:
        ModelError: The model computes something else, or it draws random numbers.
    """
    name = model.config.get_text_config().model_type
    batch = _probe(model, number)
    before = random_state()
    whole = run(batch)
    if not before.is_same(random_state()):
        raise _refused(
            f"the {name} model draws random numbers (dropout), which would be others in shards; set its "
            "dropout to 0"
        )
    shards = Folded(number)
    cut = [cut_rows(batch, _At(number, index)) for index in range(number)]
    folded = {key: torch.cat([part[key] for part in cut]) for key in cut[0]}
    folded["num_items_in_batch"] = torch.tensor(count_targets(batch))
    try:
        with rows_shared(model, shards) as rows, rows.active():
            found = run(folded)
    except MegatrainError:
        raise
    except Exception as error:  # a model's own code fails in its own way
        why = first_line(error)
        raise _refused(f"the {name} model cannot be called with a part of a row ({why})") from error
    if not rows.num_calls:
        raise _refused(f"the {name} model does not ask transformers for its attention function")
    logits = found.logits.flatten(0, 1)[None]
    of_logits = float((logits.float() - whole.logits.float()).norm() / whole.logits.float().norm())
    of_loss = abs(float(found.loss) - float(whole.loss)) / max(abs(float(whole.loss)), 1e-3)
    worst = max(of_logits, of_loss)
    if not math.isfinite(worst) or worst > _TOLERANCE.get(whole.logits.dtype, _ROUGH):
        what = (
            "tokens see others elsewhere than in attention" if of_logits >= of_loss else "its loss is another"
        )
        raise _refused(f"the {name} model differs by {worst:.2g} in shards of a row: {what}")


class _At(Folded):
    """One of the rows, to cut a batch for it."""

    def __init__(self, number: int, index: int) -> None:
        super().__init__(number)
        self.index = index


def _probe(model: PreTrainedModel, number: int) -> dict[str, Tensor]:
    """Make a row of two documents, whose border is in no shard's first place."""
    length = 4 * number
    generator = torch.Generator().manual_seed(0)
    vocab = int(getattr(model.config.get_text_config(), "vocab_size", 0) or 2)
    ids = torch.randint(0, vocab, (1, length), generator=generator)
    border = length // 2 + 1
    positions = torch.cat([torch.arange(border), torch.arange(length - border)])[None]
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}


def _rope_types(parameters: Any) -> Iterator[str]:
    """Yield the kinds of rotary embeddings, of which layers may have several."""
    if isinstance(parameters, Mapping):
        if isinstance(parameters.get("rope_type"), str):
            yield parameters["rope_type"]
        for value in parameters.values():
            yield from _rope_types(value)


def _refused(why: str) -> ModelError:
    return ModelError(f"{why}, so its rows cannot be shared out; use parallel.sequence=1")
