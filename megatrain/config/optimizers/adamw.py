"""AdamW: two moments of every element, exactly or in fewer bytes, which is opt-in and not exact.

| format | planes per trained element | bytes |
|---|---|---|
| fp32 | `exp_avg`, `exp_avg_sq` in fp32 | 8 |
| bf16 | both in bf16, rounded stochastically | 4 |
| int8 | a code of 8 bits each; one fp32 scale each per `SCALE_NUMEL` elements | 2.03 |

Source: Decoupled Weight Decay Regularization (Loshchilov and Hutter, 2019).
"""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.config.optimizers.optimizer import RATE, Element, Optimizer, Plane, Setting, is_rate


def _are_decays(betas: Sequence[float]) -> bool:
    return len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas)


def _adamw(state: str, element: Element, *, usual_rate: float, has_scales: bool = False) -> Optimizer:
    moments = {"exp_avg": Plane(element), "exp_avg_sq": Plane(element)}
    scales = {f"{name}_scale": Plane("float32", is_scale=True) for name in moments}
    is_exact = element == "float32"
    return Optimizer(
        name="adamw",
        state=state,
        summary="fp32 masters and moments" if is_exact else f"moments in {state}",
        planes=moments | (scales if has_scales else {}),
        settings={
            "betas": Setting((0.9, 0.95), "each must be in [0, 1)", _are_decays),
            "eps": Setting(1e-8, RATE, is_rate),
        },
        flops=15,
        device_bytes=650,  # in 55 passes
        scratch_bytes=35,  # three fp64, two fp32, three bools
        is_exact=is_exact,
        caveat="" if is_exact else f"moments in {state} are not exact: the result differs from AdamW's",
        draws_noise=not is_exact,
        goes_on_drives=is_exact,
        may_fuse=True,
        usual_rate=usual_rate,
        rate_name=state,  # files of machines had it before there were other optimizers
    )


FP32 = _adamw("fp32", "float32", usual_rate=1.0)
BF16 = _adamw("bf16", "bfloat16", usual_rate=0.63)
INT8 = _adamw("int8", "uint8", usual_rate=0.34, has_scales=True)
"""Rates are those of two cores: compressing is work (benchmarks/results, state compression)."""

FORMATS = (FP32, BF16, INT8)
