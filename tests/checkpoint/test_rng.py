from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.checkpoint import rng
from megatrain.errors import CheckpointError


def draw() -> list[Any]:
    numbers: list[Any] = [random.gauss(0, 1), random.random(), random.getrandbits(64)]
    numbers += [np.random.standard_normal(), np.random.random(3).tolist(), int(np.random.randint(1 << 40))]
    numbers += [torch.rand(5).tolist(), torch.randn(3).tolist(), torch.randperm(9).tolist()]
    return numbers


@pytest.mark.parametrize("num_before", range(4))
def test_generators_go_on_bit_for_bit(num_before: int) -> None:
    """Also in the middle of a pair of normal numbers, of which a generator keeps the second."""
    for _ in range(num_before):
        random.gauss(0, 1)
        np.random.standard_normal()
        torch.rand(1)
    states = json.loads(json.dumps(rng.encode_rng(), allow_nan=False))
    expected = draw()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert draw() != expected
    rng.restore_rng(states)
    assert rng.encode_rng() == states
    assert draw() == expected


def test_looking_changes_nothing() -> None:
    assert rng.encode_rng() == rng.encode_rng()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("python", None),
        ("python", {"version": 2, "words": "", "gauss": None}),
        ("python", {"version": 3, "words": "????", "gauss": None}),
        ("numpy", {"words": "AAAA", "position": 0, "has_gauss": 0, "gauss": 0.0}),
        ("numpy", {}),
        ("torch", "AAAA"),
        ("torch", 3),
        ("accelerator", None),
        ("accelerator", {"kind": "cuda"}),
    ],
)
def test_unusable_states_are_refused_and_change_nothing(key: str, value: Any) -> None:
    states = rng.encode_rng()
    draw()
    before = rng.encode_rng()
    with pytest.raises(CheckpointError, match="random generator states are not usable"):
        rng.restore_rng({**states, key: value})
    assert rng.encode_rng() == before
    del states[key]
    with pytest.raises(CheckpointError):
        rng.restore_rng(states)
    assert rng.encode_rng() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_states_of_missing_devices_are_said(caplog: pytest.LogCaptureFixture) -> None:
    states = rng.encode_rng()
    rng.restore_rng({**states, "accelerator": {"kind": "cuda", "states": [states["torch"]]}})
    assert "random states of 1 cuda devices, this machine has 0; from here on, results are" in caplog.text


def test_checkpoints_of_before_there_were_other_accelerators_still_load(
    caplog: pytest.LogCaptureFixture,
) -> None:
    states = rng.encode_rng()
    expected = draw()
    del states["accelerator"]
    rng.restore_rng({**states, "cuda": []})
    assert draw() == expected
    assert caplog.text == ""
    rng.restore_rng({**states, "cuda": [states["torch"]]})
    assert "1 cuda devices" in caplog.text or torch.cuda.is_available()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_generators_go_on_bit_for_bit() -> None:
    torch.rand(3, device="cuda")
    states = json.loads(json.dumps(rng.encode_rng()))
    expected = torch.randn(100, device="cuda").tolist()
    torch.cuda.manual_seed_all(1)
    rng.restore_rng(states)
    assert torch.randn(100, device="cuda").tolist() == expected
