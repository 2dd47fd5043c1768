"""AdamW against the memory bandwidth and against torch, and the gradient norm against torch, side by side.

    python -m benchmarks.optimizer.adamw [--numel N] [--rounds R] [--out FILE]

Each round runs every variant once, in turn, on the same huge-page memory; a ratio is the median over the
rounds of the ratio within a round, so that a busy machine disturbs both sides. Bytes: 26 per parameter for
AdamW on a split master with bf16 gradients, 8 per element for the yardstick, an in-place multiply (the faster
of torch's and a compiled one). The rival of the update is `torch.optim.AdamW(fused=True)` on fp32 parameters
and gradients plus the copy of the weights to bf16 that training needs; of the norm,
`torch.linalg.vector_norm(bf16, dtype=fp32)`.
"""

from __future__ import annotations

import argparse
import functools
import mmap
import statistics
import time
from collections.abc import Callable

import torch
from numba import njit
from torch import Tensor

from benchmarks.report import emit, hardware, spread
from megatrain.optim.adamw.host import AdamWStep, Planes, update_many
from megatrain.optim.pool import WorkerPool, worker_threads
from megatrain.optim.sums import sum_of_squares
from megatrain.store.master import split_master_into

ADAMW_BYTES = 26
RMW_BYTES = 8
HUGE_PAGE_BYTES = 2 << 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=1 << 26, help="parameters (default: 64 Mi)")
    parser.add_argument("--rounds", type=int, default=15, help="measured repetitions (default: 15)")
    parser.add_argument("--out", help="file to save the JSON line to")
    arguments = parser.parse_args()
    variants = make_variants(arguments.numel)
    result = {"benchmark": "adamw", "numel": arguments.numel, "rounds": arguments.rounds}
    details = {}
    for suffix, num_threads in (("", worker_threads()), ("_1t", 1)):
        torch.set_num_threads(num_threads)
        pool = WorkerPool(num_threads)
        seconds = measure(
            {name: functools.partial(run, pool) for name, run in variants.items()}, arguments.rounds
        )
        pool.close()
        per_round = ratios(seconds)
        print(f"{num_threads} thread(s), {arguments.numel / 1e6:.0f}M parameters, median [min, max]")
        for name, samples in seconds.items():
            print(f"  {name:24} {show(samples, 1e3)} ms")
        for name, samples in per_round.items():
            print(f"  {name:34} {show(samples)}")
            result[name + suffix] = statistics.median(samples)
        details[f"threads_{num_threads}" + suffix] = {
            "seconds": {name: spread(samples) for name, samples in seconds.items()},
            "ratios": {name: spread(samples) for name, samples in per_round.items()},
            "adamw_bytes_per_s": ADAMW_BYTES * arguments.numel / statistics.median(seconds["adamw"]),
        }
    emit({**result, "details": details, "hardware": hardware()}, arguments.out)


def make_variants(numel: int) -> dict[str, Callable[[WorkerPool], object]]:
    """Return what is timed, by name; memory and data are those of an early training step."""
    arena = functools.partial(allocate, numel)
    master, exp_avg, exp_avg_sq = arena(torch.float32), arena(torch.float32), arena(torch.float32)
    working, remainder = arena(torch.bfloat16), arena(torch.int16)
    gradient, gradient_fp32 = arena(torch.bfloat16), arena(torch.float32)
    generator = torch.Generator().manual_seed(0)
    master.normal_(0, 0.02, generator=generator)
    gradient_fp32.normal_(0, 1e-3, generator=generator)
    gradient.copy_(gradient_fp32)
    split_master_into(master, working, remainder)

    parameter = torch.nn.Parameter(master)
    parameter.grad = gradient_fp32
    rival = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.1, fused=True)
    rival.state[parameter] = {
        "step": torch.zeros(()),
        "exp_avg": arena(torch.float32),
        "exp_avg_sq": arena(torch.float32),
    }
    rival_copy = arena(torch.bfloat16)
    hyper = AdamWStep(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3, grad_scale=0.5)
    values = arena(torch.float32).fill_(1.0)

    def adamw(pool: WorkerPool) -> None:
        planes = Planes(
            working=working,
            remainder=remainder,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            gradient=gradient,
        )
        update_many(pool, [(hyper, planes)])

    def torch_fused_plus_copy(pool: WorkerPool) -> None:
        rival.step()
        rival_copy.copy_(parameter.detach())

    def torch_norm(pool: WorkerPool) -> None:
        assert torch.linalg.vector_norm(gradient, dtype=torch.float32).item() > 0

    def norm(pool: WorkerPool) -> None:
        assert sum_of_squares(pool, gradient) > 0

    adamw_bytes = (working, remainder, exp_avg, exp_avg_sq)
    assert sum(2 * plane.element_size() for plane in adamw_bytes) + gradient.element_size() == ADAMW_BYTES
    assert parameter.dtype == parameter.grad.dtype == torch.float32
    assert working.dtype == rival_copy.dtype == torch.bfloat16
    return {
        "rmw_torch": lambda pool: values.mul_(1.0000001),
        "adamw": adamw,
        "rmw_compiled": lambda pool: multiply(pool, values),
        "torch_fused_plus_copy": torch_fused_plus_copy,
        "norm": norm,
        "torch_norm": torch_norm,
    }


def allocate(numel: int, dtype: torch.dtype) -> Tensor:
    """Return zeros on huge pages, as the arenas of a run are."""
    num_bytes = numel * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    start = -flat.data_ptr() % HUGE_PAGE_BYTES
    return flat[start : start + num_bytes].view(dtype).zero_()


@njit(nogil=True, error_model="numpy")
def _multiply(values, factor):
    for index in range(values.size):
        values[index] *= factor


def multiply(pool: WorkerPool, values: Tensor) -> None:
    """Multiply in place on the threads of the update, cut as the update is."""
    import numpy as np

    factor = np.float32(1.0000001)
    pool.run([functools.partial(_multiply, chunk.numpy(), factor) for chunk in values.split(1 << 20)])


def measure(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round, after two rounds that are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(-2, rounds):
        for name, run in variants.items():
            started = time.perf_counter()
            run()
            if number >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def ratios(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the three figures for each round, each the higher the better."""
    # The faster yardstick is chosen once, by its median, not per round: a minimum of two is biased downward
    # in time.
    rmw = min((seconds["rmw_torch"], seconds["rmw_compiled"]), key=statistics.median)
    adamw = seconds["adamw"]
    return {
        "adamw_over_rmw": [
            ADAMW_BYTES / mine / (RMW_BYTES / theirs) for mine, theirs in zip(adamw, rmw, strict=True)
        ],
        "adamw_over_torch_fused_plus_copy": [
            theirs / mine for mine, theirs in zip(adamw, seconds["torch_fused_plus_copy"], strict=True)
        ],
        "norm_over_torch": [
            theirs / mine for mine, theirs in zip(seconds["norm"], seconds["torch_norm"], strict=True)
        ],
    }


def show(samples: list[float], scale: float = 1.0) -> str:
    """Format median and spread."""
    values = (statistics.median(samples), min(samples), max(samples))
    return "{:.2f} [{:.2f}, {:.2f}]".format(*(scale * value for value in values))


if __name__ == "__main__":
    main()
