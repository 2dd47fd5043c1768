"""Deterministic operations: switched on with what the vendor's libraries need, and off again."""

from __future__ import annotations

import os

import pytest
import torch

from megatrain.errors import ConfigError
from megatrain.hardware.determinism import deterministic, set_environment, why_not_deterministic

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def state() -> tuple[bool, bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch._C._get_deterministic_fill_uninitialized_memory(),
        torch.backends.cudnn.benchmark,
    )


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return monkeypatch


def test_it_is_on_inside_and_as_before_outside(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(torch.backends.cudnn, "benchmark", True)
    before = state()
    assert before == (False, False, True, True)
    with deterministic(CPU):
        assert state() == (True, False, False, True)
    assert state() == before
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with deterministic(CUDA):
        assert state() == (True, False, False, False)
    assert state() == before


def test_what_the_user_had_set_is_put_back(environment: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic(CPU):
            assert state()[:2] == (True, False)
        assert state()[:2] == (True, True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_libraries_of_cuda_find_what_they_need(environment: pytest.MonkeyPatch) -> None:
    set_environment(CUDA)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"
    environment.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_environment(CUDA)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    environment.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2")
    with pytest.raises(ConfigError) as caught:
        set_environment(CUDA)
    assert str(caught.value) == (
        "train.deterministic is true, but the environment has CUBLAS_WORKSPACE_CONFIG=:4096:2, with which "
        "results may differ from run to run; unset it, or use :4096:8 or :16:8"
    )


def test_torch_s_own_refusals_are_understood() -> None:
    with deterministic(CPU), pytest.raises(RuntimeError) as caught:
        torch.zeros(4).put_(torch.tensor([1]), torch.ones(1))
    assert why_not_deterministic(caught.value, CPU) == (
        "put_ has no form on the cpu device that gives the same bits in every run; use "
        "train.deterministic=false, or another implementation of it (model.attn_implementation, "
        "model.kernels)"
    )
    late = RuntimeError(
        "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
        "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because "
        "it uses CuBLAS and you have CUDA >= 10.2. To enable deterministic behavior in this case, you must "
        "set an environment variable before running your PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8"
        " or "
        "CUBLAS_WORKSPACE_CONFIG=:16:8."
    )
    assert why_not_deterministic(late, CUDA) == (
        "the cuda device was used before that was known; set CUBLAS_WORKSPACE_CONFIG=:4096:8 "
        "FLASH_ATTENTION_DETERMINISTIC=1 before Python starts"
    )
    assert why_not_deterministic(RuntimeError("another"), CPU) is None
    assert why_not_deterministic(KeyError("x does not have a deterministic implementation"), CPU) is None
