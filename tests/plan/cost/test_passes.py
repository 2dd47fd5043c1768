"""Passes without gradients are priced by their program: many together take their compute, and one fetch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.config.choice import Choice, StepBatch
from megatrain.plan.cost.passes import Passes
from megatrain.plan.cost.rates import Rates
from megatrain.plan.cost.step_time import Step
from megatrain.plan.search.planner import plan_of
from megatrain.plan.search.request import Request
from tests.plan.anatomies import Shape, llama_like, machine

LAYERS = 6
ANATOMY = llama_like(Shape(num_layers=LAYERS))
BATCH = StepBatch(micro_batch_size=1, seq_len=1024, num_micro_batches=4)
PLAIN = Choice(num_gradient_buffers=2, lockstep=2).with_defaults(LAYERS)


def passes(choice: Choice = PLAIN, *, room: int = 1000, link: int = 1) -> Passes:
    spec = replace(machine(), h2d_bytes_per_s=machine().h2d_bytes_per_s / link)
    return Passes.of(Step(Rates(spec, "bf16"), ANATOMY, choice, BATCH), room)


@pytest.mark.parametrize("fields", [{}, {"resident_layers": 2}, {"outer_streams": True}, {"num_slots": 3}])
def test_a_group_fetches_each_streamed_block_once_and_computes_for_each_batch(
    fields: dict[str, object],
) -> None:
    found = passes(replace(PLAIN, **fields), link=50)  # type: ignore[arg-type]
    step, together = found.step, found.together
    streamed = sum(block.size.fetch_bytes for block in step.blocks if block.size.is_streamed)
    assert found.fetched_bytes(together) == streamed > 0
    assert found.fetched_bytes(3 * together + 1) == 4 * streamed
    for count in (1, 3, together):
        assert found.program(count).nbytes("fetch") == streamed
    forward, _, _, _ = step.costs.sums()
    each = forward + step.costs.head_forward_s + step.costs.outer_s
    copies = step.rates.fetch_s(streamed)
    assert found.group_s(1) >= copies
    assert found.group_s(together) >= max(together * each, copies) * (1 - 1e-9)
    assert found.group_s(together) <= 1.05 * max(together * each, copies)
    assert found.seconds(5 * together + 2) == 5 * found.group_s(together) + found.group_s(2)
    one_by_one = together * found.group_s(1)
    assert one_by_one > 5 * found.group_s(together)


def test_as_many_pass_together_as_hide_their_copies_and_fit() -> None:
    """At least those of a round; where nothing is fetched, no more than these."""
    slow = passes(link=50)
    assert slow.together > 10
    assert passes(link=50, room=7).together == 7
    assert passes(link=50, room=1).together == PLAIN.lockstep == 2
    resident = replace(PLAIN, resident_layers=LAYERS, outer_resident=True)
    assert passes(resident).together == 2
    alone = slow.step.costs.sums()[0] + slow.step.costs.head_forward_s
    assert slow.together * alone >= 7.9 * slow.step.rates.fetch_s(slow.fetched_bytes(1))


def test_a_plan_says_what_an_evaluation_costs() -> None:
    request = Request(spec=machine(), anatomy=ANATOMY, batch=BATCH)
    plan = plan_of(request, PLAIN)
    found = Passes(request.step(PLAIN), plan.together)
    assert plan.together >= 2
    assert plan.tokens_together == plan.together * 1024
    assert plan.pass_s == found.group_s(plan.together)
    assert plan.pass_bytes == found.fetched_bytes(1)
