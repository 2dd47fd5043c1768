"""The verdict on a plan: each of its claims is planned again, and holds on one side of a line alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from megatrain.config.choice import Choice, StepBatch
from megatrain.config.plan import Plan
from megatrain.hardware import Drives
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.cost.economics import economics
from megatrain.plan.search import verdict, wear
from megatrain.plan.search.least_memory import fits
from megatrain.plan.search.micro_batches import in_smaller_micro_batches
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.request import Request, overflow
from megatrain.plan.search.verdict import Kind, in_days, judge
from megatrain.plan.search.wear import spare_drives
from tests.plan.anatomies import Shape, llama_like, machine

ANATOMY = llama_like(Shape(num_layers=6), micro_batch_size=1, seq_len=512)
BATCH = StepBatch(micro_batch_size=1, seq_len=512, num_micro_batches=2)
PLAIN = Choice(fragments=False, sums="device", boundaries="device")
GIB = 1 << 30


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best choice that is found soon."""
    for module in (verdict, wear):
        monkeypatch.setattr(module, "make_plan", _soon)


def _soon(request: Request, *, budget: int = 0, enough_s: float = 0.0) -> Plan:
    return make_plan(request, budget=1_000, enough_s=enough_s)


def request(**changes: object) -> Request:
    given = {
        "spec": machine(),
        "anatomy": ANATOMY,
        "batch": BATCH,
        "choice": replace(PLAIN, mirror_resident=True),
        **changes,
    }
    return Request(**given)  # type: ignore[arg-type]


def with_ram(asked: Request, nbytes: int) -> Request:
    return replace(asked, spec=asked.spec.with_ram(nbytes))


def least_ram(asked: Request) -> int:
    """Return the least host memory with which a request fits, to a part in a thousand."""
    low, high = 0, 64 * GIB
    while high - low > high // 1000:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(with_ram(asked, middle)) else (middle, high)
    return high


@pytest.mark.parametrize("share", [1.0, 1.08, 1.15])
def test_a_plan_is_tight_if_it_does_not_fit_with_a_tenth_less(share: float) -> None:
    asked = request()
    asked = with_ram(asked, int(share * least_ram(asked)))
    plan = make_plan(asked, budget=1_000)
    found = judge(asked, plan, tokens=1)
    is_tight = share < 1 / 0.9
    assert found.kind is (Kind.TIGHT if is_tight else Kind.FITS)
    assert found.exit_code == 0
    assert [less.tier for less in found.with_less] == ["ram"] * is_tight
    if is_tight:
        (less,) = found.with_less
        assert less.machine_bytes == int(0.9 * asked.spec.host_bytes)
        assert not less.plan.fits
        assert found.text == "FITS, TIGHT"
        assert less.text.endswith("it does not fit")


def test_a_plan_is_tight_if_it_is_a_tenth_slower_with_a_tenth_less() -> None:
    """What the smaller plan loses is what a plan for that machine says: here state goes to slow drives."""
    drives = Drives(nbytes=1 << 40, read_bytes_per_s=2e8, write_bytes_per_s=1e8)
    alone = request()
    enough = least_ram(alone)
    for share, is_tight in ((1.08, True), (1.15, False)):
        asked = request(spec=machine(host_bytes=int(share * enough), drives=drives))
        plan = make_plan(asked, budget=1_000)
        assert not plan.choice.tiers
        found = judge(asked, plan, tokens=1)
        assert (found.kind is Kind.TIGHT) == is_tight
        smaller = make_plan(with_ram(asked, int(0.9 * asked.spec.host_bytes)), budget=1_000)
        assert (smaller.tokens_per_s < 0.9 * plan.tokens_per_s) == is_tight
        for less in found.with_less:
            assert less.tier == "ram"
            assert less.plan.tokens_per_s == pytest.approx(smaller.tokens_per_s, rel=0.02)
            lost = 100 * (1 - smaller.tokens_per_s / plan.tokens_per_s)
            assert less.text.endswith(f"{less.plan.tokens_per_s:,.0f} tokens/s, {lost:.0f} % slower")


@pytest.mark.parametrize("mib", [36, 108])
def test_a_plan_that_loses_less_is_not_tight(mib: int) -> None:
    """Its choice does not fit with less memory of the device, and another one is nearly as fast."""
    asked = request(spec=machine(device_bytes=mib << 20, link=3e8))
    plan = make_plan(asked, budget=1_000)
    smaller = replace(asked, spec=replace(asked.spec, device_bytes=int(0.9 * (mib << 20))))
    if mib == 108:
        assert overflow(smaller, plan.choice)
    assert make_plan(smaller, budget=1_000).tokens_per_s > 0.9 * plan.tokens_per_s
    assert judge(asked, plan, tokens=1).kind is Kind.FITS


def test_a_plan_that_smaller_micro_batches_would_save_is_not_tight() -> None:
    """As long as their size is open: a run that has begun with it keeps it, on any machine."""
    asked = request(
        anatomy=llama_like(Shape(num_layers=6), micro_batch_size=4, seq_len=512),
        batch=StepBatch(micro_batch_size=4, seq_len=512, num_micro_batches=2),
    )
    low, high = 0, GIB
    while high - low > high // 1000:
        middle = (low + high) // 2
        spec = replace(asked.spec, device_bytes=middle)
        low, high = (low, middle) if fits(replace(asked, spec=spec)) else (middle, high)
    asked = replace(asked, spec=replace(asked.spec, device_bytes=int(1.05 * high)))
    plan = make_plan(asked, budget=1_000)
    counted = []

    def recount(micro_batch_size: int) -> Anatomy:
        counted.append(micro_batch_size)
        return llama_like(Shape(num_layers=6), micro_batch_size=micro_batch_size, seq_len=512)

    (less,) = judge(asked, plan, tokens=1).with_less
    assert (less.tier, less.plan.fits) == ("device", False)
    others = partial(in_smaller_micro_batches, asked, recount)
    assert judge(asked, plan, tokens=1, others=others).kind is Kind.FITS
    assert counted == [2], "half as large is enough"
    smaller = next(others())
    spec = replace(smaller.spec, device_bytes=int(0.9 * 1.05 * high))
    found = make_plan(replace(smaller, spec=spec), budget=1_000)
    assert smaller.batch.step_tokens == asked.batch.step_tokens
    assert found.tokens_per_s > 0.9 * plan.tokens_per_s


def test_what_does_not_fit_is_nothing_else() -> None:
    asked = request(spec=machine(device_bytes=10 << 20))
    found = judge(asked, make_plan(asked, budget=1), tokens=1)
    assert (found.kind, found.exit_code, found.text) == (Kind.DOES_NOT_FIT, 3, "DOES NOT FIT")
    assert found.json()["with_less"] == []


# -- host memory that stays free -----------------------------------------------------------------------------


@pytest.mark.parametrize(("ram", "free"), [(64 * GIB, 0.05 * 64 * GIB), (512 * GIB, 8 * GIB)])
def test_some_host_memory_stays_free_unless_a_limit_is_given(ram: int, free: float) -> None:
    asked = with_ram(request(), ram)
    all_of_it = replace(asked, host_limit=ram).limits["ram"]
    left = asked.limits["ram"]
    assert all_of_it is not None
    assert left is not None
    assert all_of_it - left == pytest.approx(free, abs=1)
    for one in (asked, replace(asked, host_limit=ram)):
        limit = one.limits["ram"]
        assert limit is not None
        assert one.machine_bytes(limit) == pytest.approx(ram, abs=4)


# -- drives --------------------------------------------------------------------------------------------------


def on_drives(rated_bytes: float | None, **changes: object) -> Request:
    drives = Drives(
        nbytes=1 << 40, read_bytes_per_s=2e9, write_bytes_per_s=1e9, rated_bytes_written=rated_bytes
    )
    return request(spec=machine(host_bytes=601 << 20, drives=drives, flops=1e11), **changes)


TOKENS = 10**9
WRITTEN = make_plan(on_drives(1.0), budget=1_000).bytes_per_step["drive_written"]
WHOLE_RUN = WRITTEN * -(-TOKENS // BATCH.step_tokens)


@pytest.mark.parametrize("commit_every", [None, 1])
def test_a_run_wears_out_its_drive_if_it_writes_more_than_is_left(commit_every: int | None) -> None:
    """On the day on which its rated endurance is written; an earlier process may have had some of it."""
    free = on_drives(1.0, commit_every=commit_every, names_drives=commit_every is not None)
    written = make_plan(free, budget=1_000).bytes_per_step["drive_written"]
    whole_run = written * -(-TOKENS // BATCH.step_tokens)
    for share, before in ((1.01, 0.0), (1.51, 0.5), (0.4, 0.0), (0.9, 0.5)):
        drives = replace(free.spec.drives, rated_bytes_written=share * whole_run)  # type: ignore[type-var]
        asked = replace(free, spec=replace(free.spec, drives=drives))
        plan = make_plan(asked, budget=1_000)
        found = judge(asked, plan, tokens=TOKENS, written_bytes=int(before * whole_run))
        if share - before > 1:
            assert found.wear is None
            assert found.exit_code == 0
            continue
        assert (found.kind, found.exit_code) == (Kind.WEARS_OUT, 9)
        assert found.wear is not None
        days = economics(plan, asked.spec, asked.anatomy, tokens=TOKENS).days
        assert found.wear.num_days == pytest.approx(days)
        assert found.wear.day == pytest.approx((share - before) * days)
        assert re.fullmatch(r"FITS, (TIGHT, )?WEARS OUT the drive on day \S+ of \S+", found.text)
        assert found.json()["wear"] == {"day": found.wear.day, "num_days": found.wear.num_days}


def test_every_way_out_that_is_named_spares_the_drives() -> None:
    """The setting in its text is the request that was planned, and leaves something of the drives."""
    asked = on_drives(0.4 * WHOLE_RUN, commit_every=1, names_drives=True)
    plan = make_plan(asked, budget=1_000)
    assert judge(asked, plan, tokens=TOKENS).kind is Kind.WEARS_OUT
    ways = list(spare_drives(asked, plan, tokens=TOKENS, is_running=True))
    assert ways
    in_ram = replace(asked, commit_every=None, names_drives=False)
    changes: dict[str, Callable[[str], Request]] = {
        r"train\.tokens_per_step=(\d+) train\.grad_accumulation=auto: ": lambda n: replace(
            asked, batch=replace(BATCH, num_micro_batches=int(n) // BATCH.seq_len)
        ),
        r"memory\.commit_every=(\d+): ": lambda n: replace(asked, commit_every=int(n)),
        r"memory\.commit_every=(null) \(": lambda _: replace(asked, commit_every=None),
        r"optim\.state=(\w+) memory\.tiers=auto \(not exact\): ": lambda state: replace(in_ram, state=state),
    }
    seen = set()
    for way in ways:
        (pattern,) = (pattern for pattern in changes if re.match(pattern, way))
        match = re.match(pattern, way)
        assert match is not None
        changed = changes[pattern](match[1])
        found = make_plan(changed, budget=1_000)
        assert found.fits
        assert judge(changed, found, tokens=TOKENS).wear is None, way
        money = economics(found, changed.spec, changed.anatomy, tokens=TOKENS)
        days = (
            "nothing is written" if money.drive_days is None else f"{in_days(money.drive_days)} days to rated"
        )
        assert days in way
        seen.add(pattern)
    assert len(seen) >= 2, ways


def test_nothing_is_claimed_of_drives_whose_endurance_is_not_known() -> None:
    asked = on_drives(None)
    found = judge(asked, make_plan(asked, budget=1_000), tokens=10**15)
    assert found.wear is None
    assert found.exit_code == 0
    assert found.json()["endurance_known"] is False
    assert "how long the drives last is not known" in found.sentence


def test_all_ranks_of_a_node_wear_its_drives() -> None:
    one = on_drives(1e15)
    plan = make_plan(one, budget=1_000)
    shared = replace(plan, batch=replace(plan.batch, num_ranks=4))
    alone, together = (economics(each, one.spec, ANATOMY, tokens=TOKENS) for each in (plan, shared))
    assert alone.drive_days is not None
    assert together.drive_days == pytest.approx(alone.drive_days / 4)
