"""Whether a model is done with its first layer's input when that layer has run."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from megatrain.model.tiles import first_input
from megatrain.model.tiles.first_input import is_done_with_embeddings
from tests.families import FAMILIES
from tests.reference import make_model


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom", "gpt2", "olmo2"])
def test_most_families_are_done_with_it(family: str) -> None:
    assert is_done_with_embeddings(FAMILIES[family]())


@pytest.mark.parametrize("saves", [False, True])
def test_what_is_saved_beside_the_layers_is_missed(saves: bool) -> None:
    """A square saves the embeddings themselves for its backward, a sum nothing of them."""
    model = make_model(FAMILIES["llama"]())
    beside: list[Tensor] = []

    def note(_: Any, __: Any, output: Tensor) -> None:
        beside.append((output.square() if saves else output).sum())

    model.model.embed_tokens.register_forward_hook(note)
    model.lm_head.register_forward_hook(lambda _, __, logits: logits + beside[-1])
    assert first_input._is_done(model) is not saves
