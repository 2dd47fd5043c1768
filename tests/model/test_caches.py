"""A layer's own key-value caches: as they were when the model's forward began, whatever it does to them."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from megatrain.model.caches import with_own_caches


def test_a_layer_changes_its_own_copy_and_copies_no_other_layer_s() -> None:
    cache = DynamicCache()
    states = torch.ones(1, 2, 3, 4)
    for layer in range(3):
        cache.update(states, states, layer)
    held = list(cache.layers)
    (own,), named = with_own_caches((cache,), {"past_key_values": cache, "other": 1})
    assert named["past_key_values"] is not own is not cache
    own.update(states, states, 1)
    own.update(states, states, 3)  # one that the model has not passed
    assert own.get_seq_length(1) == 6
    assert [layer.get_seq_length() for layer in own.layers] == [3, 6, 3, 3]
    assert own.layers[1] is own.layers[1] is own.layers[-3] is own.layers[:2][1]
    for number, layer in enumerate(held):
        assert cache.layers[number] is layer
        assert own.layers[number] is not layer
        assert layer.get_seq_length() == 3
    assert len(cache.layers) == 3


def test_what_is_no_cache_is_handed_on() -> None:
    given = (torch.ones(1), [1]), {"mask": None}
    assert with_own_caches(*given) == given
