"""State of which several files hold elements, as several nodes write it: read whole, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatrain.config.choice import StepBatch
from megatrain.errors import CheckpointError
from megatrain.layout.blocks import span_name, split_span_name
from megatrain.train.resume.state import own_tensors, read_state, trained_blocks, write_state
from tests.distributed.cases import cut_at
from tests.distributed.threads import RankLanes, Turns
from tests.families import FAMILIES
from tests.reference import attach_plainly, make_model
from tests.stream.runs import HYPER

KEY = "exp_avg/model.layers.0.mlp.up_proj.weight"
NUMEL = 1536
HOLE = (range(100), range(50, 150), range(200, NUMEL))
"""As many elements as there are, some of them twice."""


@pytest.mark.parametrize("name", ["remainder/a.b", "exp_avg/a[0:4]", "exp_avg/a{b}"])
def test_names_of_spans_are_undone(name: str) -> None:
    assert split_span_name(span_name(name, range(3, 70))) == (name, range(3, 70))
    assert split_span_name(name) == (name, None)


def engine_of(ranks: Any = None, **settings: Any) -> Any:
    model = make_model(FAMILIES["llama_tied"]())
    device: Any = "cpu"
    if ranks is not None:
        device = RankLanes(ranks.turns, ranks.rank)
        batch = StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=4, num_runs=4)
        settings |= {"ranks": ranks, "batch": batch}
    engine = attach_plainly(model, device=device, precision="bf16", **settings)
    engine.adamw(**HYPER)
    return engine


def state_of(engine: Any) -> dict[str, Tensor]:
    """Return all state of an engine, with values that tell each element from the others."""
    found = {}
    for number in trained_blocks(engine.host):
        with engine.host.borrow(number) as block:
            found.update({key: tensor.clone() for key, tensor in block.optimizer_tensors().items()})
    return found


def fill(engine: Any) -> None:
    for number in trained_blocks(engine.host):
        with engine.host.borrow(number, writes=True) as block:
            for place, tensor in enumerate(block.optimizer_tensors().values()):
                values = torch.arange(tensor.numel()) + 7 * place + number
                tensor.copy_((values % 250).to(tensor.dtype).view(tensor.shape))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    engine = engine_of()
    fill(engine)
    write_state(engine, tmp_path)
    return tmp_path


def cut(place: Path, spans: Mapping[str, range]) -> None:
    """Replace a tensor by spans of it, in files of their own."""
    file = next(file for file in (place / "state").iterdir() if KEY in load_file(file))
    tensors = load_file(file)
    whole = tensors.pop(KEY).view(-1)
    save_file(tensors, file)
    for number, (name, span) in enumerate(spans.items()):
        save_file({name: whole[span.start : span.stop].clone()}, file.with_stem(f"{file.stem}-node-{number}"))


def test_a_tensor_in_spans_is_read_whole(saved: Path) -> None:
    expected = engine_of()
    read_state(expected.host, saved)
    numel = state_of(expected)[KEY].numel()
    spans = [range(100, numel), range(100)]
    cut(saved, {span_name(KEY, span): span for span in spans})
    found = engine_of()
    read_state(found.host, saved)
    assert state_of(expected)[KEY].count_nonzero() > numel // 2
    for name, tensor in state_of(expected).items():
        assert torch.equal(state_of(found)[name], tensor), name


@pytest.mark.parametrize(
    ("spans", "sentence"),
    [
        ({span_name(KEY, range(100)): range(100)}, f"does not have each element of {KEY} once"),
        ({span_name(KEY, span): span for span in HOLE}, f"does not have each element of {KEY} once"),
        ({span_name(KEY, range(100)): range(99)}, rf"{KEY} is \(99,\)"),
        ({span_name(KEY, range(100, 50)): range(50)}, rf"{KEY} is \(50,\)"),
    ],
)
def test_spans_that_are_not_whole_are_refused(saved: Path, spans: Mapping[str, range], sentence: str) -> None:
    cut(saved, spans)
    with pytest.raises(CheckpointError, match=sentence):
        read_state(engine_of().host, saved)


@pytest.mark.parametrize("settings", [{}, {"optimizer_state": "int8"}, {"fragments": True}], ids=str)
def test_what_nodes_keep_is_all_of_the_state_once(settings: dict[str, Any]) -> None:
    """Each element of each tensor is in the file of one node; many tensors are cut."""

    def names(ranks: Any) -> list[list[tuple[str, int]]]:
        engine = engine_of(ranks, **settings)
        host = engine.host
        return [
            [
                (key, tensor.numel())
                for number in trained_blocks(host)
                for key, tensor in own_tensors(host, number, host.blocks[number], node).items()
            ]
            for node in range(2)
        ]

    with cut_at(320):
        (found, *others) = Turns(2, 2).run(names)
    assert others == [found]
    parts: dict[str, list[tuple[int, int]]] = {}
    for key, numel in (pair for node in found for pair in node):
        name, elements = split_span_name(key)
        parts.setdefault(name, []).append((0, numel) if elements is None else (elements.start, numel))
        assert elements is None or len(elements) == numel
    assert sum(len(spans) > 1 for spans in parts.values()) > 5
    for spans in parts.values():
        first = min(spans)[0]
        for start, numel in sorted(spans):
            assert start == first
            first += numel
