"""Values in RAM that change by themselves are found: of trained state a share, of frozen weights all."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.errors import HardwareError, TornStateError
from megatrain.stream.engine import Engine
from megatrain.stream.execute import memory_watch
from megatrain.stream.execute.memory_watch import MemoryWatch
from tests.reference import make_batches
from tests.stream.runs import add_adapters, start

UNIT = 1 << 11


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_watch, "UNIT_NUMEL", UNIT)
    monkeypatch.setattr(memory_watch, "FROZEN_BYTES", 1 << 10)


def begin(rotation: int, **settings: Any) -> tuple[Engine, Any, MemoryWatch, list[Any]]:
    """Return an engine that is watched, its optimizer, and micro-batches."""
    _, _, engine, optimizer = start(**{"device": "cpu", **settings})
    return engine, optimizer, optimizer.watch_memory(rotation), make_batches(1)


def step(engine: Engine, optimizer: Any, batches: list[Any]) -> None:
    """Take a whole step, counted as a run does."""
    optimizer.memory_watch.step += 1
    engine.forward_backward(batches)
    assert not optimizer.step().skipped
    engine.settle()


def all_planes(engine: Engine) -> list[tuple[int, str, np.ndarray[Any, Any]]]:
    """Return the bytes of every plane of trained state that an update changes, padding left out."""
    found = []
    for number, block in enumerate(engine.host.blocks):
        layout = block.layout
        working = [
            block.working[e.byte_offset : e.byte_offset + e.nbytes]
            for e in layout.entries
            if e.state_offset is not None
        ]
        planes = [("working", part) for part in working]
        planes += [(name, plane.view(torch.uint8)) for name, plane in block.planes.items()]
        found += [(number, name, part.numpy()) for name, part in planes if part.numel()]
    return found


def test_a_flip_stops_and_names_block_plane_and_parameter() -> None:
    engine, optimizer, _, batches = begin(1, precision="bf16")
    for _ in range(3):
        step(engine, optimizer, batches)
    block = engine.host.blocks[1]
    entry = block.layout.trained[2]
    assert entry.state_offset is not None
    block.planes["exp_avg_sq"].view(torch.int32)[entry.state_offset + 3] ^= 1 << 5
    with pytest.raises(HardwareError) as caught:
        step(engine, optimizer, batches)
    words = str(caught.value)
    assert "in block 1, plane exp_avg_sq, " in words
    assert f"{entry.name} (elements {entry.state_offset:,} to " in words
    assert "after the update of step 3, as was noticed in step 4" in words
    assert caught.value.since == 3
    with pytest.raises(TornStateError, match="a value in RAM has changed by itself") as torn:
        engine.forward_backward(batches)
    assert torn.value.exit_code == 10
    with pytest.raises(TornStateError):
        engine.sync()


@pytest.mark.parametrize("updates", ["deferred", "serial", "immediate"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("rotation", [1, 3])
def test_no_bit_is_another_than_without(updates: str, precision: str, rotation: int) -> None:
    clips = None if updates == "immediate" else 0.5
    settings: dict[str, Any] = {"updates": updates, "precision": precision, "max_grad_norm": clips}
    engine, optimizer, watch, batches = begin(rotation, **settings)
    _, _, plain, other = start(**{"device": "cpu", **settings})
    for _ in range(2 * rotation):
        step(engine, optimizer, batches)
        plain.forward_backward(batches)
        other.step()
    plain.settle()
    watch.check_all()
    for mine, its in zip(engine.host.blocks, plain.host.blocks, strict=True):
        assert mine.working.equal(its.working)
        for name, plane in mine.planes.items():
            assert plane.equal(its.planes[name]), name


@pytest.mark.parametrize("state", ["bf16", "int8"])
def test_compressed_moments_and_their_scales_are_watched(state: str) -> None:
    settings: dict[str, Any] = {"precision": "bf16", "optimizer_state": state}
    _, _, plain, other = start(**{"device": "cpu", **settings})
    engine, optimizer, _, batches = begin(1, **settings)
    for _ in range(2):
        step(engine, optimizer, batches)
        plain.forward_backward(batches)
        other.step()
    plain.settle()
    for mine, its in zip(engine.host.blocks, plain.host.blocks, strict=True):
        for name, plane in mine.planes.items():
            assert plane.equal(its.planes[name]), name
    for name in engine.host.blocks[0].planes:
        engine.host.blocks[0].planes[name].view(torch.uint8)[1] ^= 1
        with pytest.raises(HardwareError, match=f"plane {name},"):
            optimizer.memory_watch.check_all()
        engine.host.blocks[0].planes[name].view(torch.uint8)[1] ^= 1
        engine.arrangement.integrity.cause = None


def test_each_unit_is_watched_in_one_step_of_a_rotation() -> None:
    engine, optimizer, watch, batches = begin(4)
    seen: list[set[tuple[int, int]]] = []
    for _ in range(8):
        step(engine, optimizer, batches)
        seen.append({(block, number) for block, held in enumerate(watch._held) for number in held})
    every = set.union(*seen)
    assert len(every) == sum(-(-(span.stop - span.start) // UNIT) for spans in watch._spans for span in spans)
    for turn in range(4):
        assert seen[turn] == seen[turn + 4]
        assert all(not seen[turn] & seen[other] for other in range(turn))


def test_whoever_may_write_is_no_fault() -> None:
    """A restored checkpoint, and a value that is put, are not changes by themselves."""
    engine, optimizer, watch, batches = begin(1)
    step(engine, optimizer, batches)
    name = next(iter(engine.host.names()))
    engine.host.put(name, torch.zeros_like(engine.host.weight(name)))
    watch.check_all()
    step(engine, optimizer, batches)
    for number, block in enumerate(engine.host.blocks):
        with engine.host.borrow(number, writes=True):
            block.working.add_(1)
    watch.check_all()
    step(engine, optimizer, batches)


def test_a_skipped_step_is_looked_at_too() -> None:
    """A flipped exponent makes the loss NaN, the step is skipped, and the cause is named all the same."""
    engine, optimizer, _, batches = begin(1)
    step(engine, optimizer, batches)
    engine.host.blocks[0].working.view(torch.float32)[5] = torch.nan
    with pytest.raises(HardwareError, match="in block 0, plane working"):
        step(engine, optimizer, batches)


@contextmanager
def faults_noted(watch: MemoryWatch, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HardwareError]]:
    """Note every fault and go on, so that one engine serves for many flips."""
    noted: list[HardwareError] = []
    compare, compare_frozen = watch._compare, watch._compare_frozen

    def tolerant(function: Any) -> Any:
        def call(*args: Any) -> None:
            try:
                function(*args)
            except HardwareError as error:
                noted.append(error)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(watch, "_compare", tolerant(compare))
        patch.setattr(watch, "_compare_frozen", tolerant(compare_frozen))
        patch.setattr(watch._executor.integrity, "condemn", lambda error: None)
        yield noted


def share_found(num_flips: int, rotation: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> float:
    """Return the share of flips, at a random byte and moment of a step, that are found and well named."""
    chance = random.Random(rotation)
    engine, optimizer, watch, batches = begin(rotation, **settings)
    for _ in range(rotation):
        step(engine, optimizer, batches)
    places = all_planes(engine)
    weights = [part.size for *_, part in places]
    whole = [
        (block.working.clone(), {n: p.clone() for n, p in block.planes.items()})
        for block in engine.host.blocks
    ]
    began = time.perf_counter()
    step(engine, optimizer, batches)
    step_s = time.perf_counter() - began
    found = 0
    with faults_noted(watch, monkeypatch) as noted:
        for _ in range(num_flips):
            for state, (working, planes) in zip(engine.host.blocks, whole, strict=True):
                state.working.copy_(working)
                for name, kept in planes.items():
                    state.planes[name].copy_(kept)
            watch.forget()
            first = chance.randrange(rotation)  # any of the turns
            watch._turns = [first] * len(engine.host.blocks)
            noted.clear()
            step(engine, optimizer, batches)  # hashes
            assert not noted
            ((block, plane, part),) = chance.choices(places, weights)
            index, bit = chance.randrange(part.size), chance.randrange(8)

            def flip(part: Any = part, index: int = index, bit: int = bit) -> None:
                part[index] ^= 1 << bit

            timer = threading.Timer(chance.random() * step_s, flip)
            timer.start()
            watch.step += 1
            engine.forward_backward(batches)
            optimizer.step()
            engine.settle()
            timer.join()
            watch.check_all()  # a flip behind the update is found by the next one
            if noted:
                assert f"in block {block}, plane {plane}," in str(noted[0])
                found += 1
    engine.close(removes=True)
    return found / num_flips


def test_the_share_of_flips_that_is_found_is_the_share_that_is_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The standard deviation of 60 flips at 1/2 is 6 points; `make parity` has 1,000."""
    assert share_found(60, 2, monkeypatch) == pytest.approx(1 / 2, abs=0.2)
    assert share_found(8, 1, monkeypatch, precision="bf16") == 1


@pytest.mark.parity
@pytest.mark.parametrize(("rotation", "precision"), [(1, "fp32"), (2, "bf16"), (4, "fp32")])
def test_of_1000_flips_the_share_that_is_watched_is_found(
    monkeypatch: pytest.MonkeyPatch, rotation: int, precision: str
) -> None:
    found = share_found(1000, rotation, monkeypatch, precision=precision)
    assert found == pytest.approx(1 / rotation, abs=0.03)


def frozen_flips_found(num_flips: int, monkeypatch: pytest.MonkeyPatch) -> int:
    chance, rotation = random.Random(0), 3
    engine, optimizer, watch, batches = begin(rotation, prepare=add_adapters)
    step(engine, optimizer, batches)
    places = [
        (number, block.working[e.byte_offset : e.byte_offset + e.nbytes].numpy())
        for number, block in enumerate(engine.host.blocks)
        for e in block.layout.entries
        if e.state_offset is None
    ]
    assert sum(part.size for _, part in places) == watch.frozen_bytes
    found = 0
    with faults_noted(watch, monkeypatch) as noted:
        for _ in range(num_flips):
            noted.clear()
            ((block, part),) = chance.choices(places, [part.size for _, part in places])
            index, bit = chance.randrange(part.size), chance.randrange(8)
            part[index] ^= 1 << bit
            for _ in range(rotation):
                watch.step += 1
                engine.forward_backward(batches)
                optimizer.step()
                engine.settle()
            (error,) = noted
            assert f"in block {block}, plane working, " in str(error)
            assert error.since < watch.step
            part[index] ^= 1 << bit
            found += 1
    return found


def test_all_flips_in_frozen_weights_are_found_within_a_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert frozen_flips_found(8, monkeypatch) == 8


@pytest.mark.parity
def test_all_of_1000_flips_in_frozen_weights_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert frozen_flips_found(1000, monkeypatch) == 1000


def test_every_single_bit_of_a_unit_is_seen() -> None:
    engine, optimizer, watch, batches = begin(1, precision="bf16")
    step(engine, optimizer, batches)
    held = next(iter(watch._held[0].values()))
    for plane, memory in held.planes:
        part = np.asarray(memory)
        for index in range(0, part.size, 7):
            for bit in range(8):
                part[index] ^= 1 << bit
                with pytest.raises(HardwareError, match=f"plane {plane},"):
                    watch._compare(0, held, 2)
                part[index] ^= 1 << bit
