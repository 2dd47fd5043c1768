"""Long rows in tiles wait elsewhere and come back late, tile by tile: the bits are those of whole visits."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatrain.model.tiles import attention
from megatrain.store.drives import system as calls
from megatrain.stream.activations.offload import OffloadedActivations
from megatrain.stream.forward import layer_visit
from tests.expert_families import APART
from tests.families import FAMILIES
from tests.products import pairwise_rows
from tests.store.disks import Counted
from tests.stream.activations.test_kept_results import count, shrink
from tests.stream.activations.test_on_drives import tiers_in
from tests.stream.forward.test_tiles import TILE, start_in_tiles
from tests.stream.runs import assert_same_steps


@pytest.fixture(autouse=True)
def _in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LEAST_IN_GROUPS", 0)
    monkeypatch.setattr(calls, "system", Counted())


ROWS_OF_PAIRS = pairwise_rows(
    {
        "family": ["llama", "phi", "deepseek_v3", "olmo2"],
        "boundaries": ["host", "nvme"],
        "activations": ["keep_attention", "recompute", "recompute_cheap", "mixed"],
        "device": ["cpu", "checked", "emulated"],
        "num_micro_batches": [1, 3],
        "lockstep": [1, 2],
        "precision": ["fp32", "bf16"],
        "fragments": [False, True],
    }
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", ROWS_OF_PAIRS, ids=lambda row: "-".join(map(str, row.values())))
def test_late_rows_have_the_bits_of_a_resident_model(row: dict[str, Any], tmp_path: Path) -> None:
    settings = dict(row)
    family, boundaries = settings.pop("family"), settings["boundaries"]
    if settings["activations"] == "mixed":
        layers = {**FAMILIES, **APART}[family]().num_hidden_layers
        settings["activations"] = tuple(["recompute", "keep_attention"] * layers)[:layers]
    settings["num_slots"] = 3 if settings["fragments"] else 2
    settings["num_gradient_buffers"] = 3
    tiers = tiers_in(tmp_path) if boundaries == "nvme" else None
    _, reference, engine, optimizer = start_in_tiles(family, tiers=tiers, **settings)
    shrink(engine)
    brought = []
    inner = OffloadedActivations._bring_rows

    def bring(self: OffloadedActivations, visit: Any, held: Any, tile: slice) -> torch.Tensor:
        brought.append(tile.stop - tile.start)
        return inner(self, visit, held, tile)

    with mock.patch.object(OffloadedActivations, "_bring_rows", bring):
        assert_same_steps(
            engine, optimizer, reference, steps=2, num_micro_batches=settings["num_micro_batches"]
        )
    # phi's norm is read by attention and MLP both: it runs whole, on a whole row
    if family != "phi" or row["activations"] in ("keep_attention", "mixed"):
        assert set(brought) == {TILE, 2}, "rows of 16 tokens come in tiles of 7, 7 and 2"
    engine.detach()
    if tiers is not None:
        assert engine.arrangement.offloaded.drive_bytes[0] > 0


def test_attention_runs_once_and_neither_do_products_before_it() -> None:
    """The second run under keep_attention has neither attention nor the products before it."""
    _, _, engine, _ = start_in_tiles("llama", activations="keep_attention", boundaries="host")
    shrink(engine)
    layers, groups = len(engine.arrangement.layers), 2
    ids = torch.randint(3, 90, (2, 16))
    runs: list[int] = []
    inner = attention._Run.asked

    def asked(self: Any, part: torch.Tensor, tile: slice) -> Any:
        runs.append(tile.start)
        return inner(self, part, tile)

    with mock.patch.object(attention._Run, "asked", asked):
        assert count(engine, [{"input_ids": ids, "labels": ids}]) == (layers * groups, layers * groups)
    # two tiles in the forward, as the first one is what the attention was found by; in the backward three for
    # each group, and three of which gradients are taken
    assert len(runs) == layers * (2 + groups * 3 + 3)
    engine.detach()


def test_embeddings_are_let_go_where_nobody_reads_them() -> None:
    model, _, engine, _ = start_in_tiles("llama", activations="recompute", boundaries="host")
    shrink(engine)
    ids = torch.randint(3, 90, (2, 16))
    given: list[torch.Tensor] = []
    inner = layer_visit.let_go

    def let_go(hidden: torch.Tensor) -> None:
        given.append(hidden)
        inner(hidden)

    with mock.patch.object(layer_visit, "let_go", let_go):
        engine.forward_backward([{"input_ids": ids, "labels": ids}])
        engine.zero_grad()
        assert [hidden.shape for hidden in given] == [(0,)]
        output = model(input_ids=ids, labels=ids, output_hidden_states=True)
        assert len(given) == 1, "someone has asked for all hidden states"
        assert output.hidden_states[0].shape == (2, 16, 32)
        output.loss.backward()
        engine.zero_grad()
        embeddings = torch.randn(2, 16, 32)
        model(inputs_embeds=embeddings, labels=ids).loss.backward()
        assert len(given) == 1
        assert embeddings.shape == (2, 16, 32)
    engine.zero_grad()
    engine.detach()
