import math

import pytest
import torch

from megatrain.optim.clip import clip_coefficient, global_norm
from megatrain.optim.pool import WorkerPool
from megatrain.optim.sums import sum_of_squares


@pytest.mark.parametrize("max_norm", [1.0, 0.1, 3.7, 100.0, 1])
def test_coefficient_is_what_torch_multiplies_by(max_norm: float) -> None:
    norms = torch.rand(200, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-8, 8, 200)
    for norm in [
        *norms,
        torch.tensor(0.0),
        torch.tensor(max_norm, dtype=torch.float32),
        torch.tensor(math.inf),
    ]:
        parameter = torch.nn.Parameter(torch.zeros(1))
        parameter.grad = torch.ones(1)
        torch.nn.utils.clip_grads_with_norm_([parameter], max_norm, norm)
        assert clip_coefficient(norm.item(), max_norm) == parameter.grad.item()


def test_no_limit_is_no_clipping() -> None:
    assert clip_coefficient(1e9, None) == 1.0


def test_nan_norm_gives_nan() -> None:
    assert math.isnan(clip_coefficient(math.nan, 1.0))


def test_norm_equals_clip_grad_norm() -> None:
    pool = WorkerPool(2)
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(numel)) for numel in (3, 1000, 200_000, 77_777)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 1e-3
    norm = global_norm(sum_of_squares(pool, p.grad) for p in parameters if p.grad is not None)
    assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(parameters, 1.0).item(), rel=1e-6)


def test_norm_is_a_float32_value_whatever_the_order() -> None:
    sums = [10.0**exponent / 3 for exponent in range(-8, 8)]
    norm = global_norm(sums)
    assert norm == global_norm(reversed(sums))
    assert norm == torch.tensor(norm, dtype=torch.float32).item()
    assert norm == pytest.approx(math.sqrt(sum(sums)), rel=1e-7)


def test_norm_of_nothing_is_zero() -> None:
    assert global_norm([]) == 0.0


def test_norm_keeps_inf_and_nan() -> None:
    assert global_norm([1.0, math.inf]) == math.inf
    assert math.isnan(global_norm([1.0, math.inf, math.nan]))
    assert global_norm([1e100]) == math.inf  # beyond float32
