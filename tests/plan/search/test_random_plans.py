"""Plans of models, machines and settings that are drawn: none is faster than physics, and memory never hurts.

The bounds are the tests' own: the datasheet's FLOP/s, the weights over the link once in a step, AdamW's bytes
through host memory, and the state on drives read once.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatrain.config.choice import StepBatch
from megatrain.config.plan import Plan
from megatrain.hardware import load_machine, machine_names
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.search.least_memory import enough_ram
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.remedies import advise
from megatrain.plan.search.request import Request, overflow
from megatrain.plan.search.search import SEARCH_OPERATIONS
from megatrain.plan.search.verdict import Kind, judge
from tests.plan.anatomies import Shape, llama_like

SHAPES = {
    "1B": Shape(num_layers=16, hidden=2048, inner=8192, vocab=128_000),
    "8B": Shape(num_layers=32, hidden=4096, inner=14_336, vocab=128_000),
    "14B": Shape(num_layers=48, hidden=5120, inner=13_824, vocab=152_000),
    "30B of experts": Shape(
        num_layers=48, hidden=2048, inner=768, vocab=152_000, num_experts=128, num_active=8
    ),
    "70B": Shape(num_layers=80, hidden=8192, inner=28_672, vocab=128_000),
    "120B of experts": Shape(
        num_layers=36, hidden=2880, inner=2880, vocab=200_000, num_experts=128, num_active=4
    ),
}
MACHINES = [name for name in machine_names() if not load_machine(name).is_cpu and not name[0].isdigit()]

SOON = (1, 3)
"""Those that `make test` draws."""

SLOWER = 0.02
"""Part of its speed that a plan may lose with more memory: a search ends when it has placed enough."""


def drawn(number: int) -> Request:
    """Return a request, the same for the same number, with 0.6 to 2.5 times the memory that is enough."""
    draw = random.Random(f"plan {number}")
    seq_len, rows = draw.choice((1024, 2048, 4096)), draw.choice((1, 1, 2, 4))
    shape = draw.choice([*SHAPES.values()])
    anatomy = llama_like(shape, micro_batch_size=rows, seq_len=seq_len)
    spec = load_machine(draw.choice(MACHINES))
    count = max(1, draw.choice((16_384, 65_536, 131_072)) // (rows * seq_len))
    asked = Request(
        spec=spec.with_drive_bytes(draw.choice((0, 0, 2 * 10**12, 16 * 10**12))),
        anatomy=anatomy,
        batch=StepBatch(micro_batch_size=rows, seq_len=seq_len, num_micro_batches=count),
        clips=draw.random() < 0.7,
        state=draw.choice(("fp32", "fp32", "fp32", "bf16", "int8")),
    )
    if asked.spec.drives is not None and asked.state == "fp32" and draw.random() < 0.3:
        asked = replace(asked, commit_every=draw.choice((1, 10)))
    enough = enough_ram(replace(asked, spec=asked.spec.with_drive_bytes(0), commit_every=None))
    ram = 12 * anatomy.num_params if enough is None else enough.nbytes
    return replace(asked, spec=asked.spec.with_ram(int(draw.uniform(0.6, 2.5) * ram)))


def least_seconds(request: Request, plan: Plan) -> dict[str, float]:
    """Return what a step cannot be faster than, by the reckoning of this file alone."""
    spec, anatomy, choice = request.spec, request.anatomy, plan.choice
    tokens = plan.batch.step_tokens
    on_device = sum(_params(anatomy)[: choice.resident_layers])
    outer = sum(part.num_params for part in anatomy.outer) * choice.outer_resident
    away = anatomy.num_params - on_device - outer
    bounds = {
        "products": anatomy.model_flops_per_token * tokens / spec.peak("bf16"),
        "link": 2 * (sum(_params(anatomy)) - on_device) / spec.h2d_bytes_per_s,
        "AdamW": {"fp32": 26, "bf16": 16, "int8": 12}[request.state] * away / spec.host_bytes_per_s,
    }
    if choice.tiers and spec.drives is not None:
        layers = sorted(_params(anatomy), reverse=True)
        there = 10 * sum(layers[choice.blocks_in_ram :]) if not choice.fragments else 0
        bounds["drives"] = there / spec.drives.read_bytes_per_s
    return bounds


def _params(anatomy: Anatomy) -> list[int]:
    return [sum(part.num_params for part in layer.fragments) for layer in anatomy.layers]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[] if number in SOON else [pytest.mark.parity]) for number in range(70)],
)
def test_no_plan_is_under_its_bounds_and_more_memory_is_never_slower(number: int) -> None:
    asked = drawn(number)
    plan = make_plan(asked)
    found = judge(asked, plan, tokens=10**9)
    assert (found.kind is Kind.DOES_NOT_FIT) == (not plan.fits)
    larger = replace(asked, spec=asked.spec.with_ram(int(1.3 * asked.spec.host_bytes)))
    if not plan.fits:
        for remedy in advise(asked, lambda **_: asked.anatomy):
            assert make_plan(remedy.request, budget=1).fits, remedy.text
        return
    assert not overflow(asked, plan.choice)
    for cause, seconds in least_seconds(asked, plan).items():
        assert plan.step_s >= 0.999 * seconds, cause
    # where RAM lacks, state on the device alone is searched too, in three numbers of layers
    roomy = make_plan(larger, budget=4 * SEARCH_OPERATIONS)
    assert roomy.fits
    assert roomy.tokens_per_s >= (1 - SLOWER) * plan.tokens_per_s
    for less in found.with_less:
        assert not less.plan.fits or less.slower > 0.1
