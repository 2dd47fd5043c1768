"""Sign-SGD with momentum, and without: every element moves by the learning rate, or stays.

| format | planes per trained element | bytes, and of host state in all |
|---|---|---|
| fp32 | `momentum` in fp32 | 4, 8 |
| bf16 | `momentum`, rounded to the nearest bf16 value | 2, 6 |
| none | none: the sign is that of the step's gradient | 0, 4 |

Source: signSGD: Compressed Optimisation for Non-Convex Problems (Bernstein et al., 2018), of which algorithm
2, Signum, is the form with momentum; the decay of weights is decoupled, as AdamW's.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.config.optimizers.optimizer import ELEMENT_BYTES, Element, Optimizer, Plane, Setting


def _begin_with_decay(betas: Sequence[float]) -> bool:
    return len(betas) > 0 and 0.0 <= betas[0] < 1.0


_BETAS = Setting((0.9,), "the first is the decay of the momentum, and must be in [0, 1)", _begin_with_decay)


def _signsgd(state: str, element: Element | None, summary: str, caveat: str = "") -> Optimizer:
    return Optimizer(
        name="signsgd",
        state=state,
        summary=summary,
        planes={} if element is None else {"momentum": Plane(element)},
        settings={} if element is None else {"betas": _BETAS},
        flops=7,
        device_bytes=112 if element is None else 148 + 2 * ELEMENT_BYTES[element],  # in 14 passes, or 19
        scratch_bytes=8,  # two fp32
        is_exact=not caveat,
        caveat=caveat,
        goes_on_drives=element is not None,
    )


FORMATS = (
    _signsgd("fp32", "float32", "fp32 masters and momentum"),
    _signsgd(
        "bf16",
        "bfloat16",
        "fp32 masters, momentum in bf16",
        "a momentum in bf16 is not exact: the result differs from that of one in fp32",
    ),
    _signsgd("none", None, "fp32 masters without momentum"),
)
