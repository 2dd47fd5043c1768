"""`megatrain plan --longest`: the row that it finds fits and the next does not, and what it says of that."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig

from megatrain.cli import main
from megatrain.errors import CapacityError, ConfigError
from megatrain.hardware import HardwareSpec, save_machine
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.search import verdict
from megatrain.plan.search.planner import make_plan
from megatrain.train.caller import Caller
from megatrain.train.planning import plan_run as planning
from megatrain.train.planning.asking import Reads
from megatrain.train.planning.longest.find import Longest, find_longest
from megatrain.train.planning.longest.report import longest_json, longest_report
from megatrain.train.planning.plan_run import plan_run
from megatrain.train.screen import status_line
from tests.plan.anatomies import Shape, llama_like, machine

GIB = 1 << 30
SMALL = machine(device_bytes=2 * GIB, host_bytes=32 * GIB, update_rate=1e9, flops=2e13, link=1e10)
"""A device that long rows fill, beside much host memory."""
COUNTED: list[int] = []
"""The lengths that were counted."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Anatomies in closed form, searches for a moment, and no counts of anybody else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("megatrain.train.planning.counting._COUNTED", {})
    monkeypatch.setattr("megatrain.model.profile.count.count_anatomy", _in_closed_form)
    monkeypatch.setattr(status_line, "AFTER_S", 1e6)
    for module in (planning, verdict):
        monkeypatch.setattr(module, "make_plan", partial(make_plan, budget=400))
    COUNTED.clear()


def _in_closed_form(config: LlamaConfig, *, seq_len: int, **options: Any) -> Anatomy:
    COUNTED.append(seq_len)
    shape = Shape(
        num_layers=config.num_hidden_layers, hidden=config.hidden_size, inner=4 * config.hidden_size
    )
    keys = ("micro_batch_size", "precision")
    return llama_like(shape, seq_len=seq_len, **{key: options[key] for key in keys})


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    config = LlamaConfig(
        hidden_size=1024, num_hidden_layers=8, num_attention_heads=8, max_position_embeddings=20_000
    )
    config.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def find(llama: Path, tmp_path: Path) -> Callable[..., Longest]:
    def find(spec: HardwareSpec = SMALL, place: Path = llama, **settings: dict[str, Any]) -> Longest:
        raw = {**settings, "model": {"path": str(place)}}
        return find_longest(raw, spec, caller=Caller(counts=tmp_path / "counts"), source="test")

    return find


def fits(place: Path, spec: HardwareSpec, length: int, rows: int = 1) -> bool:
    """Whether `megatrain plan` says that rows of so many tokens fit."""
    train = {"micro_batch_size": 1, "tokens_per_step": rows * length}
    raw = {"model": {"path": str(place)}, "data": {"seq_len": length}, "train": train}
    asked = {"source": "test", "reads": Reads.NONE, "beyond_context": True}
    return plan_run(raw, spec, **asked).plan.fits  # type: ignore[arg-type]


def test_the_longest_row_fits_and_the_next_length_does_not(llama: Path, find: Callable[..., Longest]) -> None:
    found = find()
    assert found.lengths.too_long is not None
    assert fits(llama, SMALL, found.longest)
    assert not fits(llama, SMALL, found.lengths.too_long)
    assert found.planned.plan.fits
    batch = found.planned.plan.batch
    assert (batch.micro_batch_size, batch.seq_len) == (1, found.longest)
    assert found.planned.config.data.seq_len == found.longest
    assert (found.rows.native, found.rows.rope_type) == (20_000, "default")
    text = longest_report(found)
    assert f"longest rows of {found.longest:,} tokens, to a precision of" in text
    assert f"{found.lengths.too_long:,} do not fit" in text
    factor = -(-found.longest // 20_000)
    assert factor > 1
    assert (
        "positions of rows of more than 20,000 tokens have to be scaled; these rows need a factor of" in text
    )
    assert f"setting model.rope_scaling='{{rope_type: yarn, factor: {factor}}}' data.seq_len=" in text
    assert longest_json(found)["rope_factor"] == factor


def test_a_full_device_is_named_with_the_device_that_takes_twice_as_long_rows(
    llama: Path, find: Callable[..., Longest]
) -> None:
    found = find()
    assert found.full is not None
    assert found.beyond is not None
    assert found.full.tier == "device"
    assert found.full.name.startswith("working memory (backward of layer")
    assert f"full    device memory: rows of {found.lengths.too_long:,} tokens need" in longest_report(found)
    (way,) = found.ways
    assert way.seq_len == 2 * found.longest
    size, _, _ = way.text.removeprefix("a machine with ").partition("GiB")
    assert not fits(llama, SMALL, way.seq_len)
    assert fits(llama, replace(SMALL, device_bytes=int(float(size) * GIB)), way.seq_len)


def test_full_host_memory_is_named_with_the_memory_that_takes_longer_rows(
    llama: Path, find: Callable[..., Longest]
) -> None:
    spec = replace(SMALL, device_bytes=64 * GIB).with_ram(5 * GIB)
    found = find(spec, memory={"boundaries": "host", "activations": "recompute", "resident_blocks": 0})
    assert found.full is not None
    assert (found.full.tier, found.full.name) == ("ram", "boundaries")
    assert any(way.text.startswith("--ram ") and way.seq_len == found.lengths.too_long for way in found.ways)
    assert longest_json(found)["full"]["limit_bytes"] == found.planned.request.limits["ram"]


def test_lengths_are_counted_once_and_never_again(find: Callable[..., Longest], tmp_path: Path) -> None:
    first = find()
    assert len(COUNTED) == len(set(COUNTED)) <= 16
    COUNTED.clear()
    assert find().lengths == first.lengths
    assert COUNTED == []


def test_a_step_has_at_least_a_row_and_as_many_as_are_asked_for(find: Callable[..., Longest]) -> None:
    free = find()
    assert find(train={"tokens_per_step": 512}).planned.plan.batch.num_micro_batches == 1
    assert find(train={"tokens_per_step": 512}).longest == free.longest
    three = find(train={"tokens_per_step": 3 * free.longest})
    assert three.planned.plan.batch.num_micro_batches == 3 * free.longest // three.longest
    assert find(train={"grad_accumulation": 5}).planned.plan.batch.num_micro_batches == 5


def test_an_open_step_is_smaller_where_the_usual_one_does_not_fit(
    llama: Path, find: Callable[..., Longest]
) -> None:
    """Gradients of several rounds add up in fp32; those of one row do not."""
    spec = SMALL.with_ram(2600 << 20)
    found = find(spec, memory={"gradients": "host", "sums": "host", "resident_blocks": 0})
    batch = found.planned.plan.batch
    assert found.planned.plan.fits
    assert batch.num_micro_batches == 1 < 131_072 // found.longest
    assert not fits(llama, spec, found.longest, rows=131_072 // found.longest)


def test_learned_positions_end_the_search(find: Callable[..., Longest], tmp_path: Path) -> None:
    GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=3000).save_pretrained(tmp_path / "gpt2")
    found = find(place=tmp_path / "gpt2")
    assert (found.longest, found.lengths.too_long, found.rows.rope_type) == (3000, None, "")
    text = longest_report(found)
    assert "the model has 3,000 positions and takes no longer rows" in text
    assert "full    nothing: all lengths that may be fit" in text


def test_a_model_that_refuses_longer_rows_ends_the_search_with_its_reason(
    find: Callable[..., Longest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(config: LlamaConfig, *, seq_len: int, **options: Any) -> Anatomy:
        if seq_len > 5000:
            raise ConfigError(f"no mask of {seq_len} tokens is made")
        return _in_closed_form(config, seq_len=seq_len, **options)

    monkeypatch.setattr("megatrain.model.profile.count.count_anatomy", refuses)
    found = find()
    assert (found.longest, found.lengths.too_long) == (4864, 5120)
    assert (found.full, found.ways) == (None, ())
    assert "full    nothing, but no mask of 5120 tokens is made" in longest_report(found)


def test_several_gpus_have_a_row_each_at_least(find: Callable[..., Longest]) -> None:
    found = find(replace(SMALL, num_gpus=4, peer_bytes_per_s=1e11))
    batch = found.planned.plan.batch
    assert batch.num_ranks == 4
    assert batch.num_micro_batches * 4 * found.longest == batch.step_tokens >= 4 * found.longest


def test_where_no_row_fits_one_sentence_says_what_would(find: Callable[..., Longest]) -> None:
    with pytest.raises(
        CapacityError, match=r"^not even rows of 256 tokens fit, in steps of 256 tokens: "
    ) as told:
        find(SMALL.with_ram(1 * GIB))
    assert "; use --" in str(told.value)


def test_micro_batches_of_several_rows_are_refused(find: Callable[..., Longest]) -> None:
    with pytest.raises(
        ConfigError, match=r"^train\.micro_batch_size is 2, but the longest row is looked for"
    ):
        find(train={"micro_batch_size": 2})
    assert find(train={"micro_batch_size": 1}).longest == find().longest


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_prints_the_plan_with_the_longest_row(
    llama: Path, find: Callable[..., Longest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_machine(SMALL, tmp_path / "small.json")
    asked = ("plan", "--model", str(llama), "--machine", str(tmp_path / "small.json"), "--longest")
    assert _run(*asked, "--json", "--tokens", "1M") == 0
    printed = json.loads(capsys.readouterr().out)
    found = find()
    assert printed["longest"] == longest_json(found)
    assert printed["batch"]["seq_len"] == printed["longest"]["seq_len"] == found.longest
    assert printed["tokens_per_s"] == pytest.approx(found.planned.plan.tokens_per_s)
    assert printed["tokens"] == 1_000_000
    assert _run(*asked) == 0
    assert f"longest rows of {found.longest:,} tokens" in capsys.readouterr().out


@pytest.mark.parametrize("other", [("--scale",), ("--explain",), ("--seq-len", "512")])
def test_what_longest_does_not_go_with_is_refused(
    other: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("plan", "--model", "none", "--machine", "h100", "--longest", *other) == ConfigError.exit_code
    assert f"error: --longest does not go with {other[0]}; leave it out" in capsys.readouterr().err
