"""What hooks of a caller see where rows pass in tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.families import FAMILIES
from tests.reference import attach_plainly, make_model

TOKENS, TILE = 256, 32
EMBEDS, NORM, LAST_NORM = "model.embed_tokens", "model.layers.0.post_attention_layernorm", "model.norm"
FIRST_NORM = "model.layers.0.input_layernorm"


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 100, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def seen_by(name: str, tile_tokens: int, *, is_input: bool = False) -> Tensor:
    """Return what a hook that was there before attach has seen in a step's forward, once it is over."""
    config = FAMILIES["llama"]()
    config.max_position_embeddings = TOKENS
    model = make_model(config)
    seen: list[Tensor] = []

    def look(_: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        seen.append(given[0] if is_input else output)

    model.get_submodule(name).register_forward_hook(look)
    engine = attach_plainly(
        model, activations="recompute", boundaries="host", tile_tokens=tile_tokens, head_chunk_tokens=64
    )
    engine.adamw(lr=1e-3)
    engine.forward_backward([batch()])
    engine.detach()
    return seen[0].detach()


@pytest.mark.parametrize("name", [NORM, FIRST_NORM, LAST_NORM])
def test_a_hook_on_a_norm_sees_what_it_returns(name: str) -> None:
    torch.testing.assert_close(seen_by(name, TILE), seen_by(name, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "is_input"), [(EMBEDS, False), (FIRST_NORM, True)])
def test_embeddings_that_a_hook_keeps_are_not_let_go(name: str, is_input: bool) -> None:
    found = seen_by(name, TILE, is_input=is_input)
    assert torch.equal(found, seen_by(name, 0, is_input=is_input))
