"""Ranks on the test device, whose tensors Gloo cannot take: what they exchange goes through the host.

With the stand-in for NCCL it goes from device to device, in the order of streams alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import run_ranks
from tests.host_device.on_device.ranks_on_device import train_on_a_full_device, train_on_device

SETTINGS: list[dict[str, Any]] = [
    {"gathers": True},
    {"gathers": True, "precision": "bf16", "updates": "immediate", "max_grad_norm": None},
    {"family": "mixtral", "lockstep": 2, "num_micro_batches": 8},
    {"resident_layers": 4, "gradients": "device", "precision": "bf16"},
]


def assert_same_bits(place: Path, sizes: tuple[int, ...], *, nccl: bool, **settings: Any) -> None:
    alone = run_ranks(place / "1", 1, train_on_device, **settings)[0]
    assert len(set(alone["masters"])) == 3
    for size in sizes:
        told = run_ranks(place / str(size), size, train_on_device, nccl=nccl, **settings)
        assert told == [alone] * size


@pytest.mark.parity
@pytest.mark.parametrize("nccl", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_ranks_have_the_bits_of_one_device(tmp_path: Path, settings: dict[str, Any], nccl: bool) -> None:
    assert_same_bits(tmp_path, (2, 4), nccl=nccl, **settings)


def test_two_ranks_whose_devices_order_all_have_the_bits_of_one(tmp_path: Path) -> None:
    """They gather weights, exchange gradients, and share new weights of resident layers."""
    assert_same_bits(tmp_path, (2,), nccl=True, gathers=True, resident_layers=2)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("nccl", [True, False])
@pytest.mark.parametrize("after", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "settings", [SETTINGS[0], {**SETTINGS[2], "precision": "bf16"}, SETTINGS[3]], ids=str
)
def test_ranks_give_up_a_step_that_one_device_has_no_room_for(
    tmp_path: Path, settings: dict[str, Any], after: float, nccl: bool
) -> None:
    """The others' devices wait in exchanges by then, which no thread can end."""
    settings = {"lockstep": 4, "num_micro_batches": 8, **settings}
    alone = run_ranks(tmp_path / "1", 1, train_on_device, **settings)[0]
    for fails in range(2):
        how: dict[str, Any] = {"nccl": nccl, "fails": fails, "after": after}
        found = run_ranks(tmp_path / f"2-{fails}", 2, train_on_a_full_device, **how, **settings)
        assert found == [[int(rank == fails), 1, alone] for rank in range(2)]
