"""Advice: every remedy that is proposed fits as it is written, and no number in it is too large."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from megatrain.config.choice import AUTO, Choice, StepBatch
from megatrain.config.sizes import parse_bytes
from megatrain.hardware import Drives, HardwareSpec
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.search.choices import least_bytes
from megatrain.plan.search.least_memory import enough_drives, enough_ram, fits
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.remedies import advise, list_memory, list_settings, with_ways_out
from megatrain.plan.search.request import Request
from megatrain.plan.search.sizes import DRIVE_SIZES, MEMORY_SIZES, Size, least_size
from tests.plan.anatomies import Shape, llama_like, machine

SHAPE = Shape(num_layers=6)
BATCH = StepBatch(micro_batch_size=2, seq_len=1024, num_micro_batches=4)
DRIVES = Drives(nbytes=1 << 40, read_bytes_per_s=2e9, write_bytes_per_s=1e9)

TIGHT: dict[str, dict[str, Any]] = {
    "host limit": {"host_limit": 30 << 20},
    "device limit": {"device_limit": 20 << 20},
    "both limits": {"host_limit": 30 << 20, "device_limit": 20 << 20},
    "resident layers": {"device_limit": 60 << 20, "choice": Choice(resident_layers=6)},
    "slots and activations": {
        "device_limit": 40 << 20,
        "choice": Choice(num_slots=6, activations=("keep",) * 6),
    },
    "RAM": {"spec": machine(host_bytes=601 << 20)},
    "RAM, drives excluded": {"spec": machine(host_bytes=601 << 20), "choice": Choice(tiers=frozenset())},
    "RAM beside drives": {"spec": machine(host_bytes=574 << 20, drives=DRIVES)},
    "small drives": {"spec": machine(host_bytes=601 << 20, drives=replace(DRIVES, nbytes=10 << 20))},
    "device": {"spec": machine(device_bytes=36 << 20)},
    "device, narrower": {"spec": machine(device_bytes=30 << 20)},
    "everything": {"spec": machine(device_bytes=30 << 20, host_bytes=569 << 20)},
}


def count(**changes: Any) -> Anatomy:
    return llama_like(SHAPE, **{"micro_batch_size": 2, "seq_len": 1024, **changes})


def request(**changes: Any) -> Request:
    """Make a request in which the device's memory takes no part in that of the host."""
    choice = replace(changes.pop("choice", Choice()), mirror_resident=True)
    return Request(**{"spec": machine(), "anatomy": count(), "batch": BATCH, **changes}, choice=choice)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", TIGHT)
def test_everything_that_is_proposed_is_planned_and_fits(case: str) -> None:
    tight = request(**TIGHT[case])
    assert not make_plan(tight, budget=1).fits
    proposed = advise(tight, count)
    assert proposed
    for remedy in proposed:
        assert make_plan(remedy.request, budget=1).fits, remedy.text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", TIGHT)
def test_settings_come_before_hardware(case: str) -> None:
    kinds = ["--" in remedy.text for remedy in advise(request(**TIGHT[case]), count)]
    assert kinds == sorted(kinds)


def test_the_rows_of_a_pair_stay_together() -> None:
    """Of two rows that are one pair, no smaller micro-batch is proposed; of two pairs, one."""
    found = {}
    for rows, room in ((2, 40 << 20), (4, 48 << 20)):
        tight = request(
            spec=machine(device_bytes=room),
            anatomy=count(micro_batch_size=rows),
            batch=replace(BATCH, micro_batch_size=rows, rows_each=2),
        )
        settings = list_settings(tight, count)
        found[rows] = [r for r in settings if r.text.startswith("train.micro_batch_size=1 ")]
    assert not found[2]
    (remedy,) = found[4]
    assert (remedy.request.batch.micro_batch_size, remedy.request.batch.num_micro_batches) == (2, 8)


def test_the_largest_part_of_a_step_that_fits_is_proposed() -> None:
    """Boundaries of 64 micro-batches wait on the host: a step of several rounds would keep sums there."""
    batch = replace(BATCH, num_micro_batches=64)
    choice = Choice(boundaries="host", lockstep=64)

    def held(part: int) -> int:
        fewer = replace(batch, num_micro_batches=64 // part)
        return least_bytes(request(batch=fewer, choice=replace(choice, lockstep=64 // part)), "ram") or 0

    def words(part: int, tokens: int) -> str:
        return f"a step of {tokens} tokens, 1/{part}"

    tight = request(batch=batch, host_limit=(held(4) + held(2)) // 2, choice=replace(choice, lockstep=AUTO))
    (found,) = [r for r in list_settings(tight, count, words) if r.text.startswith("a step")]
    assert found.text == f"a step of {2 * 1024 * 16} tokens, 1/4"
    assert found.request.batch == replace(batch, num_micro_batches=16)
    assert fits(found.request)
    assert not fits(replace(tight, batch=replace(batch, num_micro_batches=32)))
    assert not [r for r in list_settings(tight, count) if r.text.startswith("a step")]


def before(option: str, sizes: list[Size]) -> int:
    """Return the bytes of the size before that of an option."""
    at = [size.text for size in sizes].index(option.split()[-1])
    return sizes[at - 1].nbytes


@pytest.mark.parametrize("case", ["RAM", "RAM, drives excluded", "RAM beside drives", "small drives"])
def test_memory_that_is_proposed_is_the_least_of_its_rounding(case: str) -> None:
    tight = request(**TIGHT[case])
    proposed = {remedy.text: remedy for remedy in list_memory(tight)}
    assert any("--ram" in text for text in proposed)
    for text, remedy in proposed.items():
        assert fits(remedy.request), text
        options = dict(re.findall(r"--(ram|nvme) (\S+)", text))
        spec: HardwareSpec = remedy.request.spec
        if "ram" in options:
            assert spec.host_bytes == parse_bytes(options["ram"], "--ram")
            smaller = spec.with_ram(before(options["ram"], MEMORY_SIZES))
            assert not fits(replace(remedy.request, spec=smaller)), text
        if "nvme" in options:
            assert spec.drives is not None
            assert spec.drives.nbytes == parse_bytes(options["nvme"], "--nvme")
            smaller = spec.with_drive_bytes(before(options["nvme"], DRIVE_SIZES))
            assert not fits(replace(remedy.request, spec=smaller)), text


@pytest.mark.parametrize(("case", "field"), [("host limit", "host_limit"), ("device limit", "device_limit")])
def test_a_limit_that_is_proposed_is_the_least_of_its_rounding(case: str, field: str) -> None:
    tight = request(**TIGHT[case])
    remedy = next(iter(list_settings(tight, count)))
    key, _, value = remedy.text.partition("=")
    assert key == f"memory.{field}"
    assert getattr(remedy.request, field) == parse_bytes(value, key)
    lower: dict[str, Any] = {field: before(value, MEMORY_SIZES)}
    assert not fits(replace(tight, **lower))


def test_what_was_set_is_freed_one_setting_at_a_time() -> None:
    """No remedy changes two settings where one is enough, nor one that need not change."""
    choice = Choice(num_slots=6, activations=("keep",) * 6, lockstep=1)
    texts = [remedy.text for remedy in list_settings(request(device_limit=44 << 20, choice=choice), count)]
    freed = [text for text in texts if text.startswith("memory.")]
    together = next(text for text in freed if " " in text)
    assert "memory.lockstep" not in together
    assert {word.partition("=")[0] for word in together.split()} == {"memory.num_slots", "memory.activations"}


def test_the_verdict_names_the_need_that_the_advice_meets() -> None:
    """`at least`, the table, and the memory that is proposed are of one arithmetic, with drives too."""
    for case in ("RAM", "RAM beside drives"):
        tight = request(**TIGHT[case])
        plan = make_plan(tight)
        enough = enough_ram(tight)
        assert enough is not None
        given = replace(tight, spec=tight.spec.with_ram(enough.nbytes)).limits["ram"]
        assert given is not None
        below = replace(tight, spec=tight.spec.with_ram(before(enough.text, MEMORY_SIZES))).limits["ram"]
        assert below is not None
        assert below < plan.tier_bytes("ram") <= given
        assert f"--ram {enough.text}" in [remedy.text for remedy in advise(tight, count)]


def test_drives_are_as_large_as_the_state_on_them() -> None:
    tight = request(**TIGHT["RAM"])
    enough = enough_drives(tight)
    assert enough is not None
    spec = tight.spec.with_drive_bytes(enough.nbytes)
    on_drives = make_plan(replace(tight, spec=spec), budget=1).tier_bytes("nvme")
    assert 0.9 * enough.nbytes < on_drives <= enough.nbytes


def test_a_run_that_cannot_begin_gets_settings_only() -> None:
    tight = request(**TIGHT["RAM"])
    remedies = advise(tight, count, is_running=True)
    assert remedies
    assert not any("--" in remedy.text for remedy in remedies)
    assert with_ways_out("too little", remedies).startswith("too little; use ")
    assert "megatrain plan" in with_ways_out("too little", [])


@pytest.mark.parametrize("sizes", [MEMORY_SIZES, DRIVE_SIZES])
def test_sizes_are_read_as_they_are_written(sizes: list[Size]) -> None:
    assert [size.nbytes for size in sizes] == [parse_bytes(size.text, "size") for size in sizes]
    assert sorted(sizes) == sizes
    assert all(len(re.sub(r"\D|0+(?=\D)", "", size.text)) <= 2 for size in sizes)


@pytest.mark.parametrize("guess", [1, 10**6, 43 << 30, 44 << 30, 45 << 30, 10**15])
@pytest.mark.parametrize(("need", "text"), [(1, "1KiB"), ((43 << 30) + 1, "44GiB"), (44 << 30, "44GiB")])
def test_the_least_size_is_found_from_any_guess(guess: int, need: int, text: str) -> None:
    found = least_size(MEMORY_SIZES, lambda nbytes: nbytes >= need, guess=guess)
    assert found is not None
    assert found.text == text
    assert least_size(MEMORY_SIZES, lambda nbytes: False, guess=guess) is None


def test_more_memory_than_a_limit_allows_comes_without_the_limit() -> None:
    """`--ram` alone would leave the limit in force, and not fit."""
    tight = request(spec=machine(host_bytes=560 << 20), host_limit=30 << 20)
    texts = [remedy.text for remedy in list_memory(tight) if "--ram" in remedy.text]
    assert texts
    assert all(text.startswith("memory.host_limit=null ") for text in texts)


def test_tiles_are_proposed_where_a_long_row_does_not_fit() -> None:
    """In micro-batches of one row that is still too large; not where it passes in tiles already."""
    batch = replace(BATCH, micro_batch_size=1, seq_len=8192)
    whole, tiled = (count(micro_batch_size=1, seq_len=length) for length in (8192, 2048))

    def recount(**changes: Any) -> Anatomy:
        return tiled if changes == {"tile": 4096} else count(**{"micro_batch_size": 1, **changes})

    least = least_bytes(request(anatomy=tiled, batch=batch), "device")
    assert least is not None
    tight = request(anatomy=whole, batch=batch, device_limit=least + (1 << 20))
    found = {remedy.text: remedy.request for remedy in list_settings(tight, recount)}
    assert found["train.tile_tokens=4096"].batch.tile == 4096
    assert fits(found["train.tile_tokens=4096"])
    again = replace(tight, batch=replace(batch, tile_tokens=4096))
    assert "train.tile_tokens=4096" not in [remedy.text for remedy in list_settings(again, recount)]
