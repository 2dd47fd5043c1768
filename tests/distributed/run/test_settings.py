"""Settings that several ranks cannot follow are refused, and never changed in silence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatrain.checkpoint.format import fingerprint
from megatrain.checkpoint.load import verify
from megatrain.checkpoint.save import save
from megatrain.config.choice import Choice, StepBatch, part_of
from megatrain.config.optimizers import adamw
from megatrain.errors import CheckpointError, ConfigError
from megatrain.hardware import accelerators
from megatrain.layout.blocks import ParameterSpec, lay_out
from megatrain.layout.ownership import Share, shares, state_shares
from megatrain.train.planning.allocation import plan_memory
from megatrain.train.planning.counting import PlannedModel
from megatrain.train.ranks import gathers_weights, require_checkpoint
from tests.distributed.cases import cut_at
from tests.distributed.threads import RankLanes, Turns
from tests.distributed.training import train
from tests.families import FAMILIES
from tests.reference import attach_plainly, make_batches, make_model
from tests.train.project import make_config

BATCH = StepBatch(micro_batch_size=1, seq_len=8, num_micro_batches=8, num_runs=4)


def test_sums_on_the_host_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sums \(memory.sums\) is host, but 2 ranks train together"):
        part_of(2, Choice(sums="host"), BATCH)


def test_a_part_is_of_one_rank() -> None:
    choice, part = part_of(2, Choice(gradients=("host",) * 3, lockstep=8, resident_layers=0), BATCH)
    assert part is not None
    assert (part.num_micro_batches, part.num_runs, part.num_ranks) == (4, 2, 2)
    assert (choice.lockstep, choice.resident_layers, choice.sums) == (4, 0, "device")


def test_runs_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a step has 4 runs .* which 8 ranks cannot .*parallel.shards=8"):
        part_of(8, Choice(), BATCH)


def test_scales_that_two_ranks_would_share_are_refused() -> None:
    said = r"resident blocks .* use optim.state=bf16, or memory.resident_blocks=0"
    with pytest.raises(ConfigError, match=f"int8, which does not go with {said}"):
        Turns(2).run(lambda ranks: train(ranks, state="int8", resident_layers=1))


def test_shares_of_gradients_on_devices_are_not_read() -> None:
    def read(ranks: Any) -> None:
        engine = attach_plainly(make_model(FAMILIES["llama"]()), batch=BATCH, ranks=ranks, gradients="device")
        engine.adamw()
        engine.forward_backward(make_batches(4, seed=ranks.rank))
        with pytest.raises(ConfigError, match="gradients=device lets each rank keep its share of a gradient"):
            next(engine.named_gradients())

    Turns(2).run(read)


def test_moments_with_scales_that_were_not_planned_are_refused() -> None:
    """Shares of the state were cut for others, so two ranks would have elements of one scale."""

    def run(ranks: Any) -> None:
        model = make_model(FAMILIES["llama"]())
        batch = StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=4, num_runs=4)
        engine = attach_plainly(model, device=RankLanes(ranks.turns, ranks.rank), batch=batch, ranks=ranks)
        engine.adamw(lr=1e-3, state="int8")

    with pytest.raises(ConfigError, match=r"planned for fp32, and shared out .* optimizer_state='int8'"):
        Turns(2).run(run)


def test_a_scale_belongs_to_the_share_that_has_its_first_element() -> None:
    """Scales are of 256 elements, counted from where a parameter begins."""

    def weight(name: str, numel: int, dtype: torch.dtype) -> ParameterSpec:
        return ParameterSpec(name=name, shape=(numel,), dtype=dtype, is_trained=True)

    specs = [weight("a", 100, torch.bfloat16), weight("b", 700, torch.bfloat16)]
    layout = lay_out([*specs, weight("c", 1000, torch.float32)])
    assert (layout.num_split, layout.num_state) == (128 + 704, 128 + 704 + 1024)
    with cut_at(320):
        cut = shares(layout.sizes, 0, 2)
    assert cut == [Share(range(320), range(832, 1472)), Share(range(320, 832), range(1472, 1856))]
    # "b" begins at 128, "c" at 832: scales begin at 128 + 256 and at 832 + 768
    moved = state_shares(cut, adamw.INT8, layout.scaled_edge)
    assert moved == [Share(range(384), range(832, 1600)), Share(range(384, 832), range(1600, 1856))]
    assert [layout.scales_of(part) for part in moved[0].ranges] == [slice(0, 2), slice(4, 7)]
    assert [layout.scales_of(part) for part in moved[1].ranges] == [slice(2, 4), slice(7, 8)]
    assert layout.sizes.num_scales == 8
    assert moved[0].cut(128, 832) == [range(128, 384)]
    assert state_shares(cut, adamw.FP32, layout.scaled_edge) == cut


def test_a_node_without_the_checkpoint_or_with_another_one_is_refused(tmp_path: Path) -> None:
    """Another one: of other counters, or of the same step and counters with other bytes."""
    second: Any = SimpleNamespace(rank=1, node=1, local_rank=0)

    def saved(name: str, text: str = "a", tokens: int = 7) -> tuple[Path, str]:
        path = save(
            tmp_path / name,
            step=2,
            write=lambda directory: (directory / "file").write_text(text),  # type: ignore[arg-type]
            meta={"tokens": tokens},
            keep_last=1,
        )
        return path, fingerprint(verify(path))

    there, name = saved("there")
    require_checkpoint(second, there, name)
    for _, other in (saved("later", tokens=8), saved("elsewhere", text="b")):
        with pytest.raises(CheckpointError, match=r"node 1 has another checkpoint at .*there"):
            require_checkpoint(second, there, other)
    (there / "file").write_text("b")
    reader = require_checkpoint(second, there, name, is_read_later=lambda name: name == "file")
    assert reader is not None
    assert list(reader.later) == ["file"]
    with pytest.raises(CheckpointError, match=r"node 1: .* is damaged: file .* Every node reads"):
        require_checkpoint(second, there, name)
    with pytest.raises(CheckpointError, match=r"node 1: there is no checkpoint .* a copy of the checkpoint"):
        require_checkpoint(second, tmp_path / "gone", name)


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
    found = Turns(2).run(
        lambda ranks: gathers_weights(config.parallel.gathers, config.train.device, cast("Any", ranks))
    )
    assert found == [gathers] * 2
    assert asked == ([2, 2] if (setting, device) == ("auto", "cuda") else [])
