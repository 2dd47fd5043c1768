"""Bytes that a compiler's kernels read and write, counted against sums by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.model.profile.metering import Meter

ROWS, WIDTH = 32, 64
NBYTES = 2 * ROWS * WIDTH


def bf16(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def test_a_norm_reads_its_input_and_writes_what_the_product_reads() -> None:
    hidden, scale, weight = bf16(ROWS, WIDTH), bf16(WIDTH), bf16(WIDTH, WIDTH)
    with Meter() as meter:
        wide = hidden.float()
        normed = scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)
        normed @ weight
    assert meter.cost.fused_bytes == NBYTES + 2 * WIDTH + NBYTES
    assert meter.cost.num_kernels == 2
    assert meter.cost.moved_bytes > 6 * meter.cost.fused_bytes, "each by itself, through copies in fp32"


def test_a_gate_reads_two_products_and_writes_one_input() -> None:
    hidden, weight = bf16(ROWS, WIDTH), bf16(WIDTH, WIDTH)
    with Meter() as meter:
        gate, up = hidden @ weight, hidden @ weight
        (torch.nn.functional.silu(gate) * up) @ weight
    assert meter.cost.fused_bytes == 2 * NBYTES + NBYTES
    assert meter.cost.num_kernels == 4


def test_what_another_group_reads_is_made_again_from_what_is_in_memory() -> None:
    left, right, weight = bf16(ROWS, WIDTH), bf16(ROWS, WIDTH), bf16(WIDTH, WIDTH)
    with Meter() as meter:
        total = left + right
        product = total.relu() @ weight  # reads two, writes what the product reads
        total + product  # reads two and the product; nobody reads what it makes
    assert meter.cost.fused_bytes == 3 * NBYTES + 3 * NBYTES


def test_what_is_read_outside_is_written() -> None:
    left, right = bf16(ROWS, WIDTH), bf16(ROWS, WIDTH)
    with Meter() as meter:
        total = left + right
        meter.write([total])
        meter.write([total])
    assert meter.cost.fused_bytes == 3 * NBYTES


def test_a_sum_in_place_reads_and_writes() -> None:
    total, weight = bf16(ROWS, WIDTH), bf16(WIDTH, WIDTH)
    with Meter() as meter:
        total.add_(total @ weight)
    assert meter.cost.fused_bytes == 2 * NBYTES + NBYTES


def test_an_address_that_is_used_again_is_another_tensor() -> None:
    weight = bf16(WIDTH, WIDTH)
    with Meter() as meter:
        for _ in range(3):
            made = bf16(ROWS, WIDTH) * 2  # freed before the next is made
            made @ weight
    assert meter.cost.fused_bytes == 3 * NBYTES, "written each time; ones are made in the kernel"


def test_a_lookup_is_a_kernel_of_its_own() -> None:
    table, ids = bf16(WIDTH, WIDTH), torch.zeros(ROWS, dtype=torch.int64)
    with Meter() as meter:
        torch.nn.functional.embedding(ids, table)
    assert meter.cost.fused_bytes == 8 * ROWS + NBYTES + 2 * WIDTH * WIDTH
    assert meter.cost.num_kernels == 1
