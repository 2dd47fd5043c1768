"""A recomputation sends every token to the experts of the forward, whatever its router's scores are then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megatrain.model.experts.routes import Routes, routers_of
from megatrain.model.profile.count import count_anatomy
from megatrain.stream.engine import Engine
from tests.families import FAMILIES
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.runs import assert_same_round, start

CHAIN = ("recompute", "drop_boundary", "drop_boundary", "drop_boundary")
NUM_MICRO_BATCHES = 2


class Perturbed:
    """Notes what the experts of every layer are given, while scores turn around after the forward."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first: dict[int, list[Tensor]] = {}
        self.again: dict[int, list[Tensor]] = {}
        self._is_again = False
        head: Any = engine.model.get_output_embeddings()
        head.register_forward_pre_hook(lambda *_: setattr(self, "_is_again", True))
        for number, layer in enumerate(engine.arrangement.layers):
            for router in routers_of(layer.module):
                self._turn(type(router.module), monkeypatch)
                experts = layer.module.get_submodule(f"{router.name.rpartition('.')[0]}.experts")
                experts.register_forward_pre_hook(self._note(number))

    def _turn(self, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
        inner = kind.forward
        if hasattr(inner, "is_turned"):
            return

        def forward(router: nn.Module, hidden: Tensor) -> Any:
            return inner(router, -hidden if self._is_again else hidden)

        forward.is_turned = True  # type: ignore[attr-defined]
        monkeypatch.setattr(kind, "forward", forward)

    def _note(self, number: int) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...]) -> None:
            (indices,) = (value for value in args if isinstance(value, Tensor) and value.dtype == torch.int64)
            (self.again if self._is_again else self.first).setdefault(number, []).append(indices.clone())

        return note

    @property
    def is_same(self) -> bool:
        """Whether every run again of a layer has chosen as one of the first runs."""
        assert self.again.keys() == self.first.keys()
        return all(
            any(torch.equal(again, first) for first in self.first[number])
            for number, runs in self.again.items()
            for again in runs
        )


def train(engine: Engine) -> None:
    engine.forward_backward(make_batches(NUM_MICRO_BATCHES))


def attached(family: str, activations: Any, **settings: Any) -> Engine:
    config = FAMILIES[family]()
    config.output_router_logits = False  # its loss would choose, too
    return attach_plainly(make_model(config), activations=activations, lockstep=NUM_MICRO_BATCHES, **settings)


@pytest.mark.parametrize("activations", ["recompute", "recompute_cheap", CHAIN, "drop_boundary"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_experts_are_those_of_the_forward(
    family: str, activations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = attached(family, activations)
    perturbed = Perturbed(engine, monkeypatch)
    train(engine)
    assert perturbed.is_same


@pytest.mark.parametrize(
    "settings", [{"fragments": True}, {"boundaries": "host"}, {"activations": "keep_attention"}], ids=str
)
def test_experts_are_those_of_the_forward_in_every_way_to_run(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = attached("qwen3_moe", **{"activations": "recompute", **settings})
    perturbed = Perturbed(engine, monkeypatch)
    train(engine)
    assert perturbed.is_same


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_without_kept_routes_a_perturbed_router_chooses_others(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The perturbation of these tests is one that the kept routes withstand, and nothing else does."""
    engine = attached(family, "recompute")
    for layer in engine.arrangement.layers:
        layer.router_names = []
    perturbed = Perturbed(engine, monkeypatch)
    train(engine)
    assert not perturbed.is_same


@pytest.mark.parametrize("is_kept", [True, False])
def test_experts_in_chunks_are_those_of_the_forward(is_kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches take turns there between a layer's router and its experts."""
    engine = attached("deepseek_v3", "recompute", expert_chunks=2, num_slots=4)
    perturbed = Perturbed(engine, monkeypatch)
    for number, layer in enumerate(engine.arrangement.layers):
        for name in layer.router_names:
            experts: Any = layer.module.get_submodule(f"{name.rpartition('.')[0]}.experts")
            note, inner = perturbed._note(number), experts.forward

            def forward(*args: Any, note: Any = note, inner: Any = inner) -> Any:
                note(None, args)
                return inner(*args)

            experts._forward_pre_hooks.clear()
            experts.__dict__["forward"] = forward
        if not is_kept:
            layer.router_names = []
    train(engine)
    assert perturbed.is_same == is_kept


def test_weights_of_kept_experts_are_those_of_the_new_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that recomputes with other scores gives the kept experts the weights of these."""
    engine = attached("mixtral", "recompute")
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    kind = type(routers_of(engine.arrangement.layers[0].module)[0].module)
    inner = kind.forward

    def forward(router: nn.Module, hidden: Tensor) -> Any:
        logits, weights, indices = inner(router, hidden + 0.5 * torch.sin(hidden) * bool(ready))
        found.append((logits.detach(), weights.detach(), indices))
        return logits, weights, indices

    ready: list[bool] = []
    engine.model.get_output_embeddings().register_forward_pre_hook(lambda *_: ready.append(True))
    monkeypatch.setattr(kind, "forward", forward)
    train(engine)
    assert len(found) == 2 * 4 * NUM_MICRO_BATCHES
    for logits, weights, indices in found[4 * NUM_MICRO_BATCHES :]:
        read = logits.float().softmax(-1).gather(1, indices)
        torch.testing.assert_close(weights, read / read.sum(-1, keepdim=True), rtol=1e-6, atol=0)


@pytest.mark.parametrize("boundaries", ["device", "host"])
@pytest.mark.parametrize(
    "activations", [CHAIN, ("keep", "drop_boundary", "offload", "drop_boundary")], ids=str
)
def test_a_step_equals_a_resident_one_where_layers_run_three_times(activations: Any, boundaries: str) -> None:
    """`tests/stream/test_parity.py` has the other policies, in every family."""
    _, reference, engine, _ = start("deepseek_v3", activations=activations, boundaries=boundaries)
    assert_same_round(engine, reference, make_batches(NUM_MICRO_BATCHES))


@contextmanager
def kept_bytes() -> Iterator[list[int]]:
    """Add up the bytes of all routes of a run, by visit."""
    found: list[int] = []
    inner = Routes.running

    def running(routes: Routes) -> Any:
        @contextmanager
        def context() -> Iterator[None]:
            is_first = not routes._has_run
            with inner(routes):
                yield
            if is_first:
                found.append(sum(kept.nbytes for kept in routes.kept))

        return context()

    with mock.patch.object(Routes, "running", running):
        yield found


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("mixtral", [2 * 4] * 4),
        ("qwen3_moe", [2 * 4, 0, 2 * 4, 2 * 4]),
        # two groups of which the best two experts count, one group of them, and two experts
        ("deepseek_v3", [0, *[(2 * 2 + 1 + 2) * 4] * 3]),
    ],
)
def test_the_plan_counts_the_bytes_that_are_kept(family: str, expected: list[int]) -> None:
    """Four bytes for each token and each choice."""
    (batch,) = make_batches(1)
    rows, tokens = batch["input_ids"].shape
    expected = [each * rows * tokens for each in expected]
    config = FAMILIES[family]()
    anatomy = count_anatomy(config, micro_batch_size=rows, seq_len=tokens, precision="fp32")
    assert [layer.route_bytes for layer in anatomy.layers] == expected
    assert [layer.saved_bytes["drop_boundary"] for layer in anatomy.layers] == expected
    rest = {layer.saved_bytes["recompute"] - layer.route_bytes for layer in anatomy.layers}
    assert len(rest) == 1  # their inputs
    engine = attach_plainly(make_model(config), activations="recompute")
    with kept_bytes() as found:
        engine.forward_backward([batch])
    assert found == [each for each in expected if each]


def test_a_layer_without_experts_has_no_routes() -> None:
    engine = attach_plainly(make_model(FAMILIES["llama"]()), activations="recompute")
    with kept_bytes() as found:
        train(engine)
    assert found == []
