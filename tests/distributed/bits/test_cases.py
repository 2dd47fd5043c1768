"""What only some micro-batches have: one rank adds it up as a resident model does."""

from __future__ import annotations

import pytest

from tests.distributed.cases import DATA, MISSING, TRAINED, add_gates, micro_batches
from tests.families import FAMILIES
from tests.products import every_value
from tests.reference import Resident, attach_plainly, make_model
from tests.stream.runs import HYPER, assert_same_masters, assert_same_round


@pytest.mark.sampled(3)
@every_value(
    family=["llama", "mixtral", "gpt2"],
    data=list(DATA),
    trained=list(TRAINED),
    missing=list(MISSING),
)
def test_one_rank_equals_a_resident_tree(family: str, data: str, trained: str, missing: str) -> None:
    model = make_model(FAMILIES[family]())
    TRAINED[trained](model)
    add_gates(model)
    reference = Resident(model, num_runs=4, **HYPER)
    engine = attach_plainly(model, device="checked", num_micro_batches=4, num_runs=4)
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    for step in range(2):
        batches = micro_batches(4, seed=step, data=data, missing=missing)
        assert_same_round(engine, reference, batches, [10 * step + number for number in range(4)])
        norm = optimizer.step().grad_norm
        assert norm == pytest.approx(reference.norm(), rel=1e-6)
        reference.step(norm, 0.5)
        assert_same_masters(engine, reference)
    gates = [name for name in optimizer.steps if name.endswith(".gate")]
    assert [optimizer.steps[gate] for gate in gates] == [0 if missing == "always" else 2] * 2


def test_one_word_reaches_some_experts_only() -> None:
    model = make_model(FAMILIES["mixtral"]())
    reached = []
    for batch in micro_batches(4, seed=0, data="one word", missing="always"):
        model.zero_grad()
        model(**batch).loss.backward()
        experts = model.get_submodule("model.layers.0.mlp.experts").gate_up_proj
        reached.append(experts.grad.abs().sum(dim=(1, 2)).gt(0).tolist())
    assert [sum(each) for each in reached] == [2, 2, 2, 2]
    assert len(set(map(tuple, reached))) > 1  # so an expert has tokens on one rank, and none on another
