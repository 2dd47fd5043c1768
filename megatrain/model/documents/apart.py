"""The check that a model keeps documents that share a row apart, by their positions alone.

transformers makes a mask of blocks from `position_ids` that begin anew, where the model's own code gives them
to what makes its masks, and no layer carries a state or a bias from one token to the next past the mask. That
is read from the code, without running it.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from megatrain.errors import ModelError
from megatrain.model.documents.able import why_not_without_mask
from megatrain.model.documents.begins import hands_on, is_flash, is_ours, not_handed_on
from megatrain.model.small import SPECIAL_TOKENS, try_small_model
from megatrain.model.weights.parts import class_of, maker_of

_MOST_DIFFERENCE = 1e-3
"""The allowed difference of logits, as a part of their spread; documents that see each other make 0.1."""

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def why_not_apart(config: PretrainedConfig) -> str | None:
    """Say why documents in one row would see each other; None: they do not.

    Args:
        config: The model's configuration, with its attention implementation.
    """
    why = why_not_by_position(config)
    if why is not None:
        return why
    text_config = config.get_text_config()
    if is_flash(config):  # it makes no mask, and is told where documents begin
        return None if hands_on(config) else not_handed_on(config)
    if is_ours(config) and (why := why_not_without_mask(config)) is not None:
        return f"attention without a mask cannot do {why}"
    if maker_of(config) is not AutoModelForCausalLM:
        return _why_not_tried(config)
    model_class = class_of(config)
    calls = [] if model_class is None else list(_mask_calls(model_class))
    if not calls or not all(calls):
        return f"the {text_config.model_type} model makes its masks without positions"
    return None


def _why_not_tried(config: PretrainedConfig) -> str | None:
    """Say why documents are not apart in a class for images and text; a small model of it is asked."""
    try:
        difference = try_small_model(config, _difference, is_whole=True)
    except ModelError as error:
        return f"nobody can try the {config.model_type} model: {error}"
    if difference < _MOST_DIFFERENCE:
        return None
    return f"in the {config.model_type} model tokens see those of other documents in their row"


def _difference(model: PreTrainedModel) -> float:
    """Return how much the logits of a document change by another one ahead of it in the row."""
    lengths = 5, 7
    tokens = torch.arange(sum(lengths))[None] * 7 % 40 + SPECIAL_TOKENS
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        row = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[:, lengths[0] :]
        alone = model(input_ids=tokens[:, lengths[0] :], use_cache=False).logits
    return float((row - alone).abs().max() / alone.std())


def why_not_by_position(config: PretrainedConfig) -> str | None:
    """Say why a model knows where tokens are by more than their positions and a mask; None: by these alone.

    Args:
        config: The model's configuration.
    """
    text_config = config.get_text_config()
    name = text_config.model_type
    model_class = class_of(config)
    if model_class is None:
        return f"the code of the {name} model is not known"
    others = sorted(set(getattr(text_config, "layer_types", None) or ()) - _ATTENTION)
    if others or getattr(model_class, "_is_stateful", False):
        kinds = f" ({', '.join(others)})" if others else ""
        return f"the {name} model has layers that carry a state from token to token{kinds}"
    if (
        getattr(text_config, "alibi", False)
        or "position_ids" not in inspect.signature(model_class.forward).parameters
    ):
        return f"the {name} model takes no positions"
    return None


def _mask_calls(model_class: type) -> Iterator[bool]:
    """Yield for each call that makes a mask, in the file of a model, whether it is given positions."""
    module = sys.modules[model_class.__module__]
    for _, member in inspect.getmembers(module, inspect.isclass):
        if member.__module__ != module.__name__ or "forward" not in vars(member):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(vars(member)["forward"]))))
        nodes = list(ast.walk(tree))
        keys = {
            key.value
            for node in nodes
            if isinstance(node, ast.Dict)
            for key in node.keys
            if isinstance(key, ast.Constant)
        }
        makers = {  # such as `make = create_causal_mask if window is None else create_...`
            node.targets[0].id
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            if not isinstance(node.value, (ast.Call, ast.Dict)) and any(map(_is_maker, ast.walk(node.value)))
        }
        for call in nodes:
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            if _is_maker(call.func) or call.func.id in makers:
                named = {keyword.arg for keyword in call.keywords}
                yield "position_ids" in (named | keys if None in named else named)


def _is_maker(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else ""
    return name.startswith("create_") and "mask" in name and "bidirectional" not in name
