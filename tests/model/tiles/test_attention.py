"""Attention in tiles and groups of heads: how often its function runs, and what runs whole."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatrain.config.attention import TILED
from megatrain.config.policies import POLICIES
from megatrain.model.selective import is_attention, keeping
from megatrain.model.tiles.attention import GroupedAttention, groupable
from megatrain.model.tiles.position_wise import tile
from tests.model.tiles.test_tiled import FAMILY, layers_of
from tests.reference import assert_same_bits, make_model


class Calls(TorchDispatchMode):
    """Counts attention's forward kernels and backward kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = 0
        self.heads: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_attention(func):
            self.forward += 1
            self.heads.append(args[0].shape[1])
        self.backward += "flash_attention_for_cpu_backward" in str(func)
        return func(*args, **(kwargs or {}))


def layer_of(**changes: Any) -> tuple[nn.Module, Any]:
    """Return a layer in tiles of 8 tokens, and a function that runs it on rows of 32."""
    sizes = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 64}
    config = LlamaConfig(**{**sizes, "intermediate_size": 48, "num_hidden_layers": 1, **changes})
    model = make_model(config).train()
    tile(model, layers_of(model), 8)
    positions = torch.arange(32)[None]
    angles = model.model.rotary_emb(torch.zeros(1, 32, 32), positions)
    layer = model.model.layers[0]
    return layer, lambda x: layer(x, position_embeddings=angles, position_ids=positions)


@pytest.mark.parametrize(
    ("policy", "runs"), [("keep", 1), ("recompute", 2), ("keep_attention", 1), ("recompute_cheap", 1)]
)
def test_attention_runs_once_for_each_group_and_forward(policy: str, runs: int) -> None:
    _, run = layer_of()
    hidden = torch.randn(2, 32, 32, requires_grad=True)
    counted = Calls()
    with counted:
        if policy == "keep":
            output = run(hidden)
        else:
            contexts = keeping(POLICIES[policy]) if POLICIES[policy].keeps_results else noop_context_fn
            output = checkpoint(run, hidden, use_reentrant=False, context_fn=contexts)
        output.sum().backward()
    assert (counted.forward, counted.backward) == (4 * runs, 4)
    assert set(counted.heads) == {2}, "two heads of queries read each group's keys"


@pytest.mark.parametrize(
    ("heads", "of_keys", "expected"), [(8, 8, 2), (8, 2, 4), (6, 3, 2), (5, 5, 5), (8, 1, 8)]
)
def test_groups_have_equally_many_heads(heads: int, of_keys: int, expected: int) -> None:
    _, run = layer_of(
        hidden_size=heads * 4, num_attention_heads=heads, num_key_value_heads=of_keys, head_dim=4
    )
    counted = Calls()
    with counted:
        run(torch.randn(1, 32, heads * 4, requires_grad=True))
    assert set(counted.heads) == {expected}


def test_a_call_holds_nothing_that_autograd_does_not_save() -> None:
    """A call that held its input would keep all boundaries on the device, whatever a policy says."""
    _, run = layer_of()
    hidden = torch.randn(1, 32, 32, requires_grad=True) * 1
    held = weakref.ref(hidden)
    storage = weakref.ref(hidden.untyped_storage())
    with saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0)):
        output = run(hidden)
    del hidden
    gc.collect()
    assert (held(), storage(), output.shape) == (None, None, (1, 32, 32))


def test_kernels_are_asked_for_a_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's return none of a call without gradients, and take other kernels."""
    asked: list[bool] = []
    inner = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module: Any, query: Tensor, *others: Any, **more: Any) -> Any:
        asked.append(torch.is_grad_enabled() and query.requires_grad)
        return inner(module, query, *others, **more)

    _, run = layer_of()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", attend)
    run(torch.randn(1, 32, 32, requires_grad=True)).sum().backward()
    assert asked == [True] * 8
    with torch.no_grad():
        run(torch.randn(1, 32, 32))
    assert asked[8:] == [False] * 4


class Hand(nn.Module):
    """Attention by hand, with what models of transformers do beside it."""

    def __init__(self, kind: str, attention: str = "sdpa") -> None:
        super().__init__()
        self.config = LlamaConfig(attn_implementation=attention)
        self.kind, self.is_causal, self.num_key_value_groups = kind, True, 1
        self.qkv, self.out, self.gate = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 8)
        self.sinks = nn.Parameter(torch.zeros(4))

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **more: Any) -> Any:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        heads = self.qkv(hidden_states).unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4)
        if "sinks" in self.kind:
            more["s_aux"] = self.sinks if self.kind == "sinks" else self.sinks * 2
        found, weights = attend(self, *heads, attention_mask, scaling=1.0, **more)
        if self.kind == "twice":
            found = found + attend(self, *heads, attention_mask, scaling=2.0, **more)[0]
        if self.kind == "weights":
            weights = found.sum(-1)
        output = self.out(found.flatten(2))
        if self.kind == "gate":
            output = output * torch.sigmoid(self.gate(hidden_states))
        if self.kind == "mixes":
            output = output + self.gate(hidden_states).mean(1, keepdim=True).detach()
        return output, weights


@pytest.mark.parametrize("kind", ["plain", "gate", "sinks", "made sinks", "twice", "weights", "mixes"])
def test_what_is_not_attention_alone_runs_whole(kind: str) -> None:
    """Sinks of the module's own come apart by heads; others are not known to."""
    torch.manual_seed(0)
    module = Hand(kind, TILED).train()
    standing = GroupedAttention(module, 3, module.forward)
    assert groupable(standing, (torch.randn(2, 8, 8),), {}) is (kind in ("plain", "sinks"))


@pytest.mark.parametrize("is_trained", [True, False])
def test_each_group_has_the_sinks_of_its_heads(is_trained: bool) -> None:
    torch.manual_seed(0)
    module = Hand("sinks", TILED)
    module.sinks.data = torch.randn(4)
    module.sinks.requires_grad_(is_trained)
    hidden, found = torch.randn(2, 8, 8, requires_grad=True), []
    names = [name for name, each in module.named_parameters() if each.requires_grad and "gate" not in name]
    trained = [module.get_parameter(name) for name in names]
    for run in (module, GroupedAttention(module, 4, module.forward)):
        output, _ = run(hidden)
        gradients = torch.autograd.grad(output.square().sum(), [hidden, *trained])
        found.append((output, *gradients))
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        if number < 2:
            assert_same_bits(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    if is_trained:
        own, apart = (each[2 + names.index("sinks")] for each in found)
        assert_same_bits(own, apart, "sinks")
        assert own.abs().min() > 1e-4


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 4)])
def test_masks_that_are_given(shape: tuple[int, int]) -> None:
    """One for all heads is for each group; one for each head lets attention run whole."""
    torch.manual_seed(0)
    module = Hand("plain")
    hidden = torch.randn(2, 8, 8, requires_grad=True)
    mask = torch.rand(*shape, 8, 8) > 0.2
    mask |= torch.eye(8, dtype=torch.bool)
    standing = GroupedAttention(module, 4, module.forward)
    for run in (module, standing):
        output, weights = run(hidden, attention_mask=mask)
        (gradient,) = torch.autograd.grad(output.square().sum(), hidden)
        if run is module:
            expected = output, gradient
    assert weights is None
    assert_same_bits(output, expected[0], "output")
    assert_same_bits(gradient, expected[1], "gradient")


@contextmanager
def in_tiles(model: Any, tokens: int) -> Iterator[None]:
    undo = tile(model, layers_of(model), tokens)
    try:
        yield
    finally:
        undo()


def test_a_model_in_tiles_generates_as_before() -> None:
    """With a cache, of a prompt that is longer than a tile."""
    model = make_model(FAMILY["llama"]()).eval()
    prompt = torch.randint(3, 60, (1, 20))
    settings = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    expected = model.generate(prompt, **settings)
    with in_tiles(model, 4):
        assert torch.equal(model.generate(prompt, **settings), expected)
        logits = model(prompt).logits
    assert torch.equal(logits.argmax(-1), model(prompt).logits.argmax(-1))


@pytest.mark.parametrize("within", [False, True], ids=["backward outside", "backward inside"])
def test_autocast_has_the_gradients_of_whole_rows(within: bool) -> None:
    """Autocast keeps casts of weights; one made without a graph, or where nobody reads it, would be found."""
    found = []
    for is_tiled in (False, True):
        model = make_model(FAMILY["llama"]()).train()
        undo = tile(model, layers_of(model), 8) if is_tiled else lambda: None
        ids = torch.randint(3, 90, (2, 32), generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids, use_cache=False).loss
            # a row of one tile runs whole, with the weights of the longer one
            loss = loss + model(ids[:, :8], labels=ids[:, :8], use_cache=False).loss
            if within:
                loss.backward()
        if not within:
            loss.backward()
        undo()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found.append((loss.detach(), gradients))
    (expected, of_whole), (loss, of_tiles) = found
    assert_same_bits(loss, expected, "loss")
    for name, gradient in of_tiles.items():
        whole = of_whole[name]
        assert gradient is not None, name
        assert whole is not None
        difference = float((gradient - whole).norm() / whole.norm())
        assert difference <= (0 if "embed" in name else 1e-2), name
