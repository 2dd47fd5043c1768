"""What kernels are tested in: an interpreter that rounds as devices do, and the assembly of a GPU."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.optim.interpreter import NEEDED, interpreted_on_cpu, multiply_add
from tests.optim.test_compressed import same_bits
from tests.optim.test_device import adversarial_triples, numbers, rounded

ROOT = Path(__file__).parents[2]


def in_kernel(function: str, *arguments: Tensor) -> Tensor:
    """Run one of Triton's functions on vectors."""
    triton = pytest.importorskip("triton", reason=NEEDED)
    import triton.language as tl

    @triton.jit
    def apply(a, b, c, out, FUNCTION: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.arange(0, COUNT)
        x = tl.load(a + place)
        if FUNCTION == "fma":
            tl.store(out + place, tl.fma(x, tl.load(b + place), tl.load(c + place)))
        elif FUNCTION == "div_rn":
            tl.store(out + place, tl.div_rn(x, tl.load(b + place)))
        else:
            tl.store(out + place, tl.sqrt_rn(x))

    out = torch.empty_like(arguments[0])
    unused = [None] * (3 - len(arguments))
    with interpreted_on_cpu():
        apply[(1,)](*arguments, *unused, out, FUNCTION=function, COUNT=out.numel())
    return out


def test_a_multiply_add_is_rounded_once() -> None:
    """Those of the interpreter as it comes are not, so kernels would be held to something else."""
    triples = adversarial_triples(1 << 14, 0)
    a, b, c = torch.tensor(triples, dtype=torch.float64).float().T.contiguous()
    found = in_kernel("fma", a, b, c)
    twice = 0
    for (x, y, z), result, plain in zip(triples, found.tolist(), (a * b + c).tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        assert result == (rounded(exact) if exact else 0.0), (x.hex(), y.hex(), z.hex())
        twice += plain != result
    assert twice > len(triples) / 100, "the triples do not tell one rounding from two"
    some = torch.tensor(
        list(itertools.product((0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan), repeat=3))
    )
    with np.errstate(all="ignore"):
        found = torch.from_numpy(multiply_add(*some.T.contiguous().numpy()))
    assert same_bits(found, (some[:, 0].double() * some[:, 1] + some[:, 2]).float())


def test_quotients_and_roots_are_rounded_once() -> None:
    """Denormals among them."""
    count = 1 << 14
    a, b = numbers(count, 1, -44, 30), numbers(count, 2, -30, 3)
    b[b == 0] = 1.0
    for x, y, result in zip(a.tolist(), b.tolist(), in_kernel("div_rn", a, b).tolist(), strict=True):
        exact = Fraction(x) / Fraction(y)
        assert result == (rounded(exact) if exact else 0.0), (x.hex(), y.hex())
    found = in_kernel("sqrt_rn", a.abs())
    assert torch.equal(found, a.abs().double().sqrt().float())  # exact: 53 >= 2 * 24 + 2
    assert (a.abs() < 2**-126).sum() > 100


COMPILE = """
import dataclasses, json, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from megatrain.hardware.accelerators import VENDORS
from megatrain.config.optimizers import adamw
from megatrain.optim.adamw import fused, fused_kernels
from tests.optim.test_fused import HYPER, numbers, planes_of

class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0

class Launcher:
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        return lambda *values, **named: compiled.append(self.kernel.warmup(*values, grid=grid, **named))

compiled = []
driver.set_active(Driver())
VENDORS["cpu"] = VENDORS["cuda"]
fused_kernels.update = Launcher(fused_kernels.update)
for base, moments, split in (
    (0, adamw.FP32, True),
    (0, adamw.FP32, False),
    (2**32 - 256, adamw.BF16, True),
    (0, adamw.INT8, True),
):
    planes = planes_of(4096, moments, split=split, gradient=numbers(4096, 5, -9, 0))
    fused.update_fused([(dataclasses.replace(HYPER, noise=(2**31, 7, base)), planes)])
json.dump([kernel.asm["ptx"] for kernel in compiled], sys.stdout)
"""


def test_what_is_compiled_for_an_nvidia_gpu_computes_as_ieee_says(tmp_path: Path) -> None:
    """All but the launch: it approximates, flushes and contracts nothing, and copies what is planned."""
    pytest.importorskip("triton", reason=NEEDED)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    planned = [28.0, 28.0, 20.0, 16.0]  # of which those of scales, less than a byte, are copied one by one
    for text, nbytes in zip(json.loads(ended.stdout), planned, strict=True):
        floats = re.findall(r"\b(\w+[.\w]*)\.f32\b", text)
        assert not re.search(r"\.(ftz|approx|full)\b", text)
        assert {"div.rn", "sqrt.rn", "fma.rn", "mul.rn", "add.rn", "sub.rn"} <= set(floats)
        assert all(name.endswith(".rn") or re.match("setp|selp|abs", name) for name in floats), set(floats)
        # of the eight elements of a thread: nothing is contracted beside what the kernel asks for
        assert floats.count("fma.rn") == 2 * 8
        assert floats.count("sqrt.rn") == 8
        widths = re.findall(r"\b(?:ld|st)\.global\.v(\d)\.b32\b", text)
        assert 4 * sum(map(int, widths)) == nbytes * 8
