import dataclasses
import itertools
import platform
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.optim.adamw.host import AdamWStep, Planes, update_many
from megatrain.optim.pool import WorkerPool
from megatrain.optim.tasks import TASK_NUMEL
from megatrain.store.master import join_master, split_master

NUM_STEPS = 8
HYPER = AdamWStep(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)


@pytest.fixture(scope="module")
def pool() -> WorkerPool:
    return WorkerPool(2)


def update(pool: WorkerPool, hyper: AdamWStep, **planes: Any) -> None:
    update_many(pool, [(hyper, Planes(**planes))])


def randn(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def make_gradient(numel: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Gradients of all sizes, from 1e-7 to 1e-1."""
    size = 10 ** (torch.rand(numel, generator=torch.Generator().manual_seed(seed)) * 6 - 7)
    return (randn(numel, seed + 1) * size).to(dtype)


def make_planes(numel: int, *, split: bool, gradient: torch.dtype, seed: int = 0) -> Planes:
    working: Tensor = randn(numel, seed) * 0.02
    remainder = None
    if split:
        working, remainder = split_master(working)
    return Planes(
        working=working,
        remainder=remainder,
        exp_avg=torch.zeros(numel),
        exp_avg_sq=torch.zeros(numel),
        gradient=make_gradient(numel, seed, gradient),
    )


def clone(planes: Planes) -> Planes:
    copies: dict[str, Any] = {
        name: plane.clone() for name, plane in tensors(planes).items() if plane is not None
    }
    return Planes(**{"remainder": None, **copies})


def tensors(planes: Planes) -> dict[str, Any]:
    return {field.name: getattr(planes, field.name) for field in dataclasses.fields(planes)}


def master_of(planes: Planes) -> Tensor:
    if planes.remainder is None:
        return planes.working
    return join_master(planes.working, planes.remainder)


def assert_equal(actual: Planes, expected: Planes) -> None:
    for name, plane in tensors(actual).items():
        torch.testing.assert_close(plane, getattr(expected, name), rtol=0, atol=0, equal_nan=True, msg=name)


class Oracle:
    """torch.optim.AdamW(fused=True) on a padded parameter: its last few elements would round differently."""

    def __init__(self, master: Tensor, hyper: AdamWStep) -> None:
        self.numel = master.numel()
        self.parameter = torch.nn.Parameter(self.pad(master))
        self.optimizer = torch.optim.AdamW(
            [self.parameter],
            lr=hyper.lr,
            betas=(hyper.beta1, hyper.beta2),
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            fused=True,
        )

    def pad(self, flat: Tensor) -> Tensor:
        return torch.nn.functional.pad(flat, (0, -flat.numel() % 64))

    def step(self, gradient: Tensor, hyper: AdamWStep) -> None:
        self.parameter.grad = self.pad(gradient.float()).mul_(torch.tensor(hyper.grad_scale))
        self.optimizer.param_groups[0]["lr"] = hyper.lr
        self.optimizer.step()

    def assert_equals(self, planes: Planes) -> None:
        state = self.optimizer.state[self.parameter]
        for actual, expected in (
            (master_of(planes), self.parameter.detach()),
            (planes.exp_avg, state["exp_avg"]),
            (planes.exp_avg_sq, state["exp_avg_sq"]),
        ):
            torch.testing.assert_close(actual, expected[: self.numel], rtol=0, atol=0)


@pytest.mark.parametrize("gradient", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("numel", [1, 15, 16, 17, 63, 511, 513, 100_003])
def test_equals_torch_fused(pool: WorkerPool, numel: int, split: bool, gradient: torch.dtype) -> None:
    planes = make_planes(numel, split=split, gradient=gradient)
    oracle = Oracle(master_of(planes).clone(), HYPER)
    for step in range(1, NUM_STEPS + 1):
        hyper = dataclasses.replace(HYPER, step=step, lr=1e-3 * step / 3, grad_scale=0.37)
        planes = dataclasses.replace(planes, gradient=make_gradient(numel, step, gradient))
        oracle.step(planes.gradient, hyper)
        update(pool, hyper, **tensors(planes))
        oracle.assert_equals(planes)


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_decay": 0.0},
        {"lr": 3e-5, "beta2": 0.999, "eps": 1e-6},
        {"lr": 0.0},
        {"beta2": 0.9999, "weight_decay": 1.0},
        {"beta1": 0.5},  # torch's lerp has two forms, and changes over here
        {"beta1": 0.3},
        {"beta1": 0.0},
        {"beta2": 0.0},
    ],
    ids=str,
)
def test_equals_torch_fused_for_other_hyper_parameters(pool: WorkerPool, changes: dict[str, float]) -> None:
    base = dataclasses.replace(HYPER, **changes)  # type: ignore[arg-type]
    planes = make_planes(20_000, split=True, gradient=torch.bfloat16)
    oracle = Oracle(master_of(planes), base)
    for step in range(1, NUM_STEPS + 1):
        hyper = dataclasses.replace(base, step=step)
        planes = dataclasses.replace(planes, gradient=make_gradient(20_000, step, torch.bfloat16))
        oracle.step(planes.gradient, hyper)
        update(pool, hyper, **tensors(planes))
    oracle.assert_equals(planes)


@pytest.mark.parametrize("beta2", [0.9, 0.95, 0.98, 0.99, 0.999, 0.9999])
def test_late_and_early_bias_corrections_equal_torch_fused(pool: WorkerPool, beta2: float) -> None:
    """The kernel corrects a product in place of dividing: for every divisor it must be the quotient."""
    hyper = dataclasses.replace(HYPER, beta2=beta2)
    for step in (1, 2, 3, 7, 10, 50, 111, 1000, 12_345, 100_000):
        planes = make_planes(30_000, split=False, gradient=torch.float32, seed=step)
        oracle = Oracle(planes.working.clone(), hyper)
        oracle.step(torch.zeros(30_000), hyper)  # makes the state
        oracle.parameter.data.copy_(oracle.pad(planes.working))
        oracle.optimizer.state[oracle.parameter]["step"].fill_(step - 1)
        oracle.step(planes.gradient, hyper)
        update(pool, dataclasses.replace(hyper, step=step), **tensors(planes))
        oracle.assert_equals(planes)


def test_extreme_gradients_equal_torch_fused(pool: WorkerPool) -> None:
    """Squares that over- and underflow, zeros and denormals."""
    values = [0.0, -0.0, 1e-45, 1e-38, -1e-23, 1e-20, 1e18, 1.9e19, -1e30, 3e38, 1e38, 1.0]
    planes = make_planes(12, split=True, gradient=torch.float32)
    planes.gradient.copy_(torch.tensor(values))
    oracle = Oracle(master_of(planes), HYPER)
    for step in range(1, 4):
        oracle.step(planes.gradient, HYPER)
        update(pool, dataclasses.replace(HYPER, step=step), **tensors(planes))
    oracle.assert_equals(planes)
    assert planes.exp_avg_sq.isinf().any()


def test_non_finite_gradients_reach_the_master(pool: WorkerPool) -> None:
    """The kernel hides nothing: who calls it judges the norm first."""
    planes = make_planes(40, split=True, gradient=torch.bfloat16)
    planes.gradient[3], planes.gradient[39] = torch.nan, torch.inf
    update(pool, HYPER, **tensors(planes))
    assert master_of(planes).isnan().nonzero().flatten().tolist() == [3, 39]


def test_threads_and_cuts_change_no_bit() -> None:
    numel = TASK_NUMEL + 12_345
    start = make_planes(numel, split=True, gradient=torch.bfloat16)
    expected = clone(start)
    update(WorkerPool(1), HYPER, **tensors(expected))
    for num_threads in (2, 3, 7):
        actual = clone(start)
        pool = WorkerPool(num_threads)
        update(pool, HYPER, **tensors(actual))
        pool.close()
        assert_equal(actual, expected)
    actual = clone(start)
    cuts = [0, 1, 17, 1000, 65_536, 500_001, numel]
    pieces = [actual.slice(first, last) for first, last in itertools.pairwise(cuts)]
    update_many(WorkerPool(2), [(HYPER, piece) for piece in pieces])
    assert_equal(actual, expected)


def test_many_ranges_equal_one_by_one(pool: WorkerPool) -> None:
    ranges = [
        (
            dataclasses.replace(HYPER, weight_decay=0.1 * (seed % 2), step=1 + seed),
            make_planes(
                numel, split=seed % 3 > 0, gradient=(torch.bfloat16, torch.float32)[seed % 2], seed=seed
            ),
        )
        for seed, numel in enumerate([1, 5, 64, 4096, 0, 70_000, 33, 17_000, 300_001, 7] * 4)
    ]
    expected = [(hyper, clone(planes)) for hyper, planes in ranges]
    update_many(pool, ranges)
    for (hyper, one), (_, actual) in zip(expected, ranges, strict=True):
        update(pool, hyper, **tensors(one))
        assert_equal(actual, one)


def test_no_ranges_is_no_work(pool: WorkerPool) -> None:
    update_many(pool, [])


def test_wrong_planes_are_refused(pool: WorkerPool) -> None:
    planes = make_planes(8, split=True, gradient=torch.bfloat16)
    for changes in (
        {"remainder": None},
        {"exp_avg": planes.exp_avg.double()},
        {"gradient": planes.gradient[:7]},
        {"exp_avg_sq": torch.zeros(16)[::2]},
        {"gradient": planes.gradient.half()},
    ):
        with pytest.raises(AssertionError):
            update_many(pool, [(HYPER, dataclasses.replace(planes, **changes))])
    with pytest.raises(AssertionError, match="step is 0"):
        update(pool, dataclasses.replace(HYPER, step=0), **tensors(planes))


def test_kernel_is_vectorised() -> None:
    """A scalar loop would be right, and several times slower."""
    import numba
    import numpy as np

    from megatrain.optim.adamw import kernels

    compiled = numba.njit(nogil=True, error_model="numpy")(kernels.update.py_func)
    halves, floats = np.zeros(64, np.int16), np.zeros(64, np.float32)
    compiled(HYPER.scalars(), halves, halves, floats, floats, halves, 0, 64)
    (assembly,) = compiled.inspect_asm().values()
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        assert "vsqrtps" in assembly
        assert "vdivps" in assembly
        assert "vfmadd" in assembly
        assert "ymm" in assembly or "zmm" in assembly
    elif machine in ("aarch64", "arm64"):
        assert any("fsqrt" in line and (".4s" in line or "z" in line) for line in assembly.splitlines())
        assert "fmla" in assembly
