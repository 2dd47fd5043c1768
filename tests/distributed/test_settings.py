"""Settings that several ranks cannot follow are refused, and never changed in silence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatrain.checkpoint.save import save
from megatrain.config.choice import Choice, StepBatch
from megatrain.distributed.launch import own_backend
from megatrain.errors import CheckpointError, ConfigError
from megatrain.hardware import accelerators
from megatrain.layout.ownership import Share
from megatrain.stream.arrange import part_of
from megatrain.train.planning.allocation import plan_memory
from megatrain.train.planning.counting import PlannedModel
from megatrain.train.ranks import gathers_weights, require_checkpoint
from tests.distributed.threads import Turns
from tests.distributed.training import train
from tests.train.project import make_config

BATCH = StepBatch(micro_batch_size=1, seq_len=8, num_micro_batches=8, num_runs=4)


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        ({"resident_blocks": 1}, "resident_layers (memory.resident_blocks) is 1, but 2 ranks"),
        ({"gradients": "device"}, "gradients (memory.gradients) is device, but 2 ranks"),
    ],
    ids=str,
)
def test_the_plan_of_a_run_refuses_what_ranks_cannot_do(
    tmp_path: Path, memory: dict[str, Any], said: str
) -> None:
    shards: dict[str, Any] = {"parallel": {"shards": 2}, "train": {"grad_accumulation": 2, "steps": 1}}
    config = make_config(tmp_path, "run", memory=memory, **shards)
    model = PlannedModel(config.model.path, None, lambda line: None)
    with pytest.raises(ConfigError) as caught:
        Turns(2).run(lambda ranks: plan_memory(config, model, None, ranks))
    assert said in str(caught.value)


def test_a_part_is_of_one_rank() -> None:
    choice, part = part_of(2, Choice(gradients=("host",) * 3, lockstep=8), BATCH)
    assert part is not None
    assert (part.num_micro_batches, part.num_runs, part.num_ranks) == (4, 2, 2)
    assert (choice.lockstep, choice.resident_layers, choice.sums) == (4, 0, "device")


def test_runs_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a step has 4 runs .* which 8 ranks cannot .*parallel.shards=8"):
        part_of(8, Choice(), BATCH)


def test_scales_that_two_ranks_would_share_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"int8, which does not go with updates=immediate .* use optim.state=bf16"
    ):
        Turns(2).run(lambda ranks: train(ranks, state="int8", updates="immediate", max_grad_norm=None))


def test_a_cut_parts_no_scale() -> None:
    """Scales are of 256 elements, counted from where a parameter begins."""
    first, second = Share(range(384), range(0)), Share(range(384, 1024), range(0))
    assert first.cut(64, 1024) == [range(64, 384)]
    assert first.cut(64, 1024, 256) == [range(64, 576)]
    assert second.cut(64, 1024, 256) == [range(576, 1024)]
    assert second.cut(0, 320, 256) == []
    assert first.cut(128, 448, 256) == [range(128, 384)]
    assert second.cut(128, 448, 256) == [range(384, 448)]


def test_a_node_without_the_checkpoint_or_with_another_one_is_refused(tmp_path: Path) -> None:
    second: Any = SimpleNamespace(node=1, local_rank=0)
    there = save(
        tmp_path / "there",
        step=2,
        write=lambda directory: (directory / "file").write_text("a"),  # type: ignore[arg-type]
        meta={"tokens": 7},
        keep_last=1,
    )
    require_checkpoint(second, there, {"tokens": 7})
    with pytest.raises(CheckpointError, match=r"node 1 has another checkpoint at .*there"):
        require_checkpoint(second, there, {"tokens": 8})
    (there / "file").write_text("b")
    with pytest.raises(CheckpointError, match=r"node 1: .* is damaged: file .* Every node reads"):
        require_checkpoint(second, there, {"tokens": 7})
    with pytest.raises(CheckpointError, match=r"node 1: there is no checkpoint .* a copy of the checkpoint"):
        require_checkpoint(second, tmp_path / "gone", {"tokens": 7})


def test_a_node_s_plan_holds_its_part_and_what_each_of_its_ranks_has(tmp_path: Path) -> None:
    shards: dict[str, Any] = {"parallel": {"shards": 4}, "train": {"grad_accumulation": 8, "steps": 1}}
    shards["memory"] = {"lockstep": 1}
    shards["train"]["precision"] = "bf16"
    config = make_config(tmp_path, "run", **shards)

    def pools(num_nodes: int) -> dict[str, int]:
        model = PlannedModel(config.model.path, None, lambda line: None)
        ranks: Any = SimpleNamespace(size=4, num_nodes=num_nodes, gathers=False)
        planned = plan_memory(config, model, None, ranks)
        assert planned is not None
        return {pool.name: pool.nbytes for pool in planned.plan.pools}

    one, two = pools(1), pools(2)
    assert two["working"] == one["working"]
    parts = ("remainder", "exp_avg", "exp_avg_sq", "gradient")
    kept = [two[name] / one[name] for name in parts]
    assert kept == pytest.approx([kept[0]] * 4)
    assert 0.2 < kept[0] < 0.8  # whole blocks of so small a model are one rank's
    own = two["accumulator"]
    assert (one["accumulator"], one["other ranks"], two["other ranks"]) == (own, 3 * own, own)
    assert one["other ranks' computing"] == 3 * two["other ranks' computing"]
    assert "state of other nodes" not in one
    assert two["state of other nodes"] > 0


def test_ranks_get_an_accelerator_each_and_no_more_ranks_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    monkeypatch.setattr(accelerators, "accelerator", lambda: "cuda")
    for name in ("cuda", "auto"):
        assert [own_backend(name, rank, 2) for rank in range(2)] == ["cpu:gloo,cuda:nccl"] * 2
    assert taken == [0, 1, 0, 1]
    for name in ("cpu", "emulated", "checked"):
        assert own_backend(name, 3, 4) == "cpu:gloo"
    with pytest.raises(ConfigError, match=r"^4 ranks want one CUDA device each, and there are 2; use fewer"):
        own_backend("cuda", 0, 4)
    with pytest.raises(ConfigError, match=r"^train.device is cuda:1, but .* use train.device=cuda$"):
        own_backend("cuda:1", 0, 2)
    assert taken == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("setting", "device", "reach", "gathers"),
    [
        ("auto", "cpu", True, False),
        ("on", "cpu", False, True),
        ("auto", "cuda", True, True),
        ("auto", "cuda", False, False),
        ("off", "cuda", True, False),
    ],
)
def test_ranks_gather_where_all_devices_reach_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, device: str, reach: bool, gathers: bool
) -> None:
    asked: list[int] = []

    def reach_each_other(count: int) -> bool:
        asked.append(count)
        return reach

    cuda = replace(accelerators.VENDORS["cuda"], reach_each_other=reach_each_other)
    monkeypatch.setitem(accelerators.VENDORS, "cuda", cuda)
    monkeypatch.setattr("megatrain.train.ranks.compute_device", torch.device)
    config = make_config(tmp_path, "run", parallel={"gather": setting}, train={"device": device})
    found = Turns(2).run(lambda ranks: gathers_weights(config, cast("Any", ranks)))
    assert found == [gathers] * 2
    assert asked == ([2, 2] if (setting, device) == ("auto", "cuda") else [])
