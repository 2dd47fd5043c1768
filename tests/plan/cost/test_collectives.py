"""What ranks send each other is priced from the program's own bytes, on the links that it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.config.choice import Choice, StepBatch
from megatrain.hardware import HardwareSpec
from megatrain.plan.cost.collectives import Collectives
from megatrain.plan.cost.rates import Rates
from megatrain.plan.cost.step_time import Step
from megatrain.plan.cost.timetable import Task
from megatrain.plan.program.kinds import Lane
from tests.plan.anatomies import Shape, llama_like, machine

LAYERS = 4
ANATOMY = llama_like(Shape(num_layers=LAYERS, hidden=512, inner=2048, vocab=4096))
CHOICE = Choice(num_gradient_buffers=2, lockstep=2).with_defaults(LAYERS)
NODE = replace(
    machine(update_rate=1e9, host_rate=1e12),
    peer_bytes_per_s=4e9,
    peer_latency_s=1e-3,
    network_bytes_per_s=2e9,
    network_latency_s=1e-2,
)
ROW = {
    "peers": (4, 1, True),
    "through the host": (4, 1, False),
    "nodes": (4, 2, True),
    "one each": (4, 4, True),
}


def of(num_ranks: int, num_nodes: int, has_peers: bool = True) -> Collectives:
    return Collectives.of(rates(num_ranks, num_nodes, has_peers), batch(num_ranks, num_nodes, has_peers))


def rates(num_ranks: int, num_nodes: int, has_peers: bool) -> Rates:
    node: HardwareSpec = NODE if has_peers else replace(NODE, peer_bytes_per_s=None)
    return Rates(node.with_ranks(num_ranks // num_nodes, num_nodes).of_rank(), "bf16")


def batch(num_ranks: int, num_nodes: int, has_peers: bool) -> StepBatch:
    return StepBatch(
        micro_batch_size=1,
        seq_len=1024,
        num_micro_batches=4,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        gathers=has_peers and num_ranks > num_nodes,
    )


def step(num_ranks: int, num_nodes: int, has_peers: bool, choice: Choice = CHOICE) -> Step:
    return Step(
        rates(num_ranks, num_nodes, has_peers), ANATOMY, choice, batch(num_ranks, num_nodes, has_peers)
    )


def seconds(tasks: list[Task], lane: Lane, kind: str) -> float:
    return sum(task.seconds for task in tasks if task.lane is lane and task.kind == kind)


def test_an_exchange_takes_peers_first_and_the_network_then() -> None:
    assert of(8, 1).exchange_s(7e9) == pytest.approx(1e-3 + 7e9 / 4e9)
    # of 16 shares, 14 go to 7 other ranks of the node, two to each, and one to the other node
    assert of(16, 2).exchanged_near(15e6) == pytest.approx(14e6)
    assert of(16, 2).exchange_s(15e6) == pytest.approx(2 * 1e-3 + 14e6 / 4e9 + 1e-2 + 8 * 1e6 / 2e9)
    assert of(2, 2).exchange_s(1e6) == pytest.approx(1e-2 + 1e6 / 2e9), "no peers, no peers' latency"
    assert of(4, 1, has_peers=False).exchange_s(1e9) == pytest.approx(1e-3), "the copies are apart"


def test_an_owner_reads_every_rank_s_sum_of_its_share_and_writes_one() -> None:
    spec = of(4, 1).rates.spec
    own = 1e6
    assert of(4, 1).sum_s(3 * own) == pytest.approx(5 * own / spec.device_bytes_per_s)
    # on two nodes each adds up four parts of two shares, and then two parts of its own
    assert of(8, 2).sum_s((6 + 1) * own) == pytest.approx((2 * 5 + 3) * own / spec.device_bytes_per_s)


@pytest.mark.parametrize("num_resident", [0, 2, LAYERS])
@pytest.mark.parametrize("name", ROW)
def test_bytes_of_the_bounds_are_those_of_the_program(name: str, num_resident: int) -> None:
    """From the sums over blocks, of which no program is listed: fetched, gathered, exchanged, offloaded."""
    choice = replace(CHOICE, resident_layers=num_resident, outer_resident=num_resident == LAYERS)
    found = step(*ROW[name], choice)
    moved, copied = found.moved_bytes, found.copied_bytes
    assert copied.up == moved["fetch"] + moved["load"]
    assert copied.down == moved["offload"]
    assert copied.gathered == moved["gather"]
    assert copied.exchanged == moved["exchange"] > 0
    assert found.update_bytes == moved["update"]
    assert (moved["gather"] > 0) == (found.batch.gathers and num_resident < LAYERS)
    resident = [op for op in found.program().operations if op.label == "spread" and op.lane is Lane.GATHER]
    assert copied.given == sum(op.nbytes for op in resident)
    assert len(resident) == (len(found.blocks) if num_resident == LAYERS else num_resident)
    if num_resident == LAYERS:
        assert copied.up == copied.down == found.update_bytes == 0
    found.step_s  # noqa: B018  # asserts that it is no faster than its bounds


def test_ranks_update_a_share_each_with_a_share_of_the_host() -> None:
    """Four ranks take as long for all updates as one alone; on four nodes each has a host of its own."""
    alone, together, apart = (step(*row) for row in ((1, 1, True), (4, 1, True), (4, 4, True)))
    busy = {}
    for name, found in (("alone", alone), ("together", together), ("apart", apart)):
        tasks, _ = found.tasks()
        busy[name] = seconds(tasks, Lane.HOST, "update")
    assert busy["together"] == pytest.approx(busy["alone"], rel=0.05)  # shares are cut at whole chunks
    assert busy["apart"] == pytest.approx(busy["alone"] / 4, rel=0.05)


def test_without_access_to_each_other_an_exchange_takes_both_ways_of_the_link() -> None:
    found = step(4, 1, False)
    tasks, _ = found.tasks()
    sent = found.moved_bytes["exchange"]
    spec = found.rates.spec
    assert seconds(tasks, Lane.EXCHANGE, "exchange") == pytest.approx(sent / spec.d2h_bytes_per_s, rel=0.02)
    back_s = seconds(tasks, Lane.GATHER, "exchange") - seconds_of_sums(found)
    assert back_s == pytest.approx(sent / spec.h2d_bytes_per_s, rel=0.02)
    with_peers = step(4, 1, True)
    link_s = {
        name: found.bounds_s["copies to the device"] for name, found in (("no", found), ("yes", with_peers))
    }
    assert link_s["no"] - link_s["yes"] == pytest.approx(
        (sent + with_peers.moved_bytes["gather"]) / spec.h2d_bytes_per_s
    )
    assert found.link_of[Lane.EXCHANGE] is Lane.OFFLOAD
    assert found.link_of[Lane.GATHER] is Lane.FETCH
    assert with_peers.link_of[Lane.GATHER] is with_peers.link_of[Lane.EXCHANGE] is Lane.EXCHANGE


def seconds_of_sums(found: Step) -> float:
    exchanges = [op.nbytes for op in found.program().operations if op.label == "exchange"]
    return sum(found.collectives.sum_s(n) + found.rates.spec.peer_latency_s for n in exchanges)


def test_a_slow_network_bounds_a_step_and_halving_it_doubles_the_bound() -> None:
    fast = step(4, 2, True)
    node = replace(NODE, network_bytes_per_s=1e9, network_latency_s=0.0).with_ranks(2, 2)
    half = Step(Rates(node.of_rank(), "bf16"), ANATOMY, CHOICE, fast.batch)
    whole_s = fast.bounds_s["network"] - NODE.network_latency_s
    assert half.bounds_s["network"] == pytest.approx(2 * whole_s)
    slow = Step(Rates(replace(node, network_bytes_per_s=1e7).of_rank(), "bf16"), ANATOMY, CHOICE, fast.batch)
    assert slow.step_s >= slow.bounds_s["network"] == max(slow.bounds_s.values())


def test_resident_weights_take_the_links_of_an_exchange_and_a_share_s_update() -> None:
    """Each of four ranks updates a quarter, and gives the others as many weights as it takes of them."""
    choice = replace(CHOICE, resident_layers=LAYERS, outer_resident=True)
    found, alone = step(4, 1, True, choice), step(1, 1, True, choice)
    tasks, _ = found.tasks()
    given = [op.nbytes for op in found.program().operations if op.label == "spread"]
    weights = sum(block.sizes.working_bytes for block in found.blocks)
    assert sum(given) == pytest.approx(3 / 4 * weights, rel=0.05)  # shares are cut at whole chunks
    expected_s = sum(NODE.peer_latency_s + nbytes / 4e9 for nbytes in given)
    assert seconds(tasks, Lane.GATHER, "spread") == pytest.approx(expected_s)
    assert found.costs.step_s == pytest.approx(alone.costs.step_s / 4, rel=0.05)
    through_s = seconds(step(4, 1, False, choice).tasks()[0], Lane.EXCHANGE, "spread")
    assert through_s == pytest.approx(sum(given) / NODE.d2h_bytes_per_s, rel=0.02)
