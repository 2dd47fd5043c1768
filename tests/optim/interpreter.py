"""Triton's interpreter, in which kernels run on the CPU: as exact as a GPU, and with its traffic counted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

NEEDED = "Triton is not installed: run make triton, or pip install triton"


def multiply_add(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c of float32 values, rounded once: `adamw.device.multiply_add` says why."""
    product = a.astype(np.float64) * b
    wide = c.astype(np.float64)
    total = product + wide
    part = total - product
    error = (product - (total - part)) + (wide - part)  # exact: Knuth's two-sum
    is_even = total.view(np.int64) & 1 == 0
    to_odd = np.where(is_even & np.isfinite(error) & (error != 0), np.copysign(np.inf, error), total)
    return np.nextafter(total, to_odd).astype(np.float32)


@contextmanager
def interpreted() -> Iterator[None]:
    """Have the interpreter compute as devices do.

    Its own fused multiply-add rounds the product too. It takes numbers among the arguments for constants of
    the source, of which -0.0 becomes 0.0 and denormals are fp64: for a compiled kernel they are fp32.
    """
    builder = pytest.importorskip("triton.runtime.interpreter", reason=NEEDED)
    language = pytest.importorskip("triton.language", reason=NEEDED)
    handle, convert = builder.TensorHandle, builder._implicit_cvt

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        assert z.dtype.scalar.name == "fp32"
        return handle(multiply_add(x.data, y.data, z.data), z.dtype.scalar)

    def as_argument(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        return language.tensor(handle(np.array([value], np.float32), language.float32), language.float32)

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(builder.InterpreterBuilder, "create_fma", create_fma)
        patch.setattr(builder, "_implicit_cvt", as_argument)
        yield


def interpreted_on_cpu() -> AbstractContextManager[None]:
    """Return `interpreted`, or skip the test where Triton compiles."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here: kernels run on the device")
    return interpreted()


@contextmanager
def counted() -> Iterator[SimpleNamespace]:
    """Count the bytes that kernels load and store; what a mask leaves out is not touched."""
    builder = pytest.importorskip("triton.runtime.interpreter", reason=NEEDED).InterpreterBuilder
    found = SimpleNamespace(loaded=0, stored=0)
    load, store = builder.create_masked_load, builder.create_masked_store

    def nbytes(pointers: Any, mask: Any) -> int:
        lanes = int(np.broadcast_to(mask.data, pointers.data.shape).sum())
        return lanes * (pointers.get_element_ty().primitive_bitwidth // 8)

    def counted_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        found.loaded += nbytes(ptrs, mask)
        return load(self, ptrs, mask, *rest, **named)

    def counted_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        found.stored += nbytes(ptrs, mask)
        return store(self, ptrs, value, mask, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", counted_load)
        patch.setattr(builder, "create_masked_store", counted_store)
        yield found
