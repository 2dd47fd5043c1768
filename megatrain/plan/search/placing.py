"""The places of a choice's gradients and state: RAM as far as it holds them, spare device memory, drives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from megatrain.config.choice import AUTO, Choice
from megatrain.layout import pools
from megatrain.plan.memory.block_sums import BlockSums
from megatrain.plan.memory.host_pools import placed_bytes
from megatrain.plan.search.request import Request, host_bytes, overflowing, pools_of

SMALL = 4
"""Layers up to which every number of layers that are kept, resident or whose gradients wait is listed."""


def may_wait_elsewhere(request: Request, choice: Choice) -> bool:
    """Return whether complete gradients may wait off the host: where no sum of rounds waits there."""
    is_one_round = choice.lockstep >= request.batch.num_micro_batches
    is_free = choice.sums == "nvme" or (choice.sums == "device" and is_one_round)
    return choice.updates == "deferred" and is_free


def sum_options(request: Request) -> list[str]:
    """List where gradients of several rounds may add up, or wait in between.

    A CPU would only copy them more often, and the sums of several runs are joined on the device.
    """
    options = ["device"] if request.spec.is_cpu or request.batch.num_runs > 1 else ["device", "host"]
    return options + (["nvme"] if may_sum_on_drives(request) and request.anatomy.precision == "bf16" else [])


def may_sum_on_drives(request: Request) -> bool:
    """Return whether sums may wait on drives: there is room for one of each gradient, of one rank."""
    return request.may_use_drives and request.batch.num_runs == request.batch.num_ranks == 1


def least_sums(request: Request) -> list[str]:
    """List where sums take least memory: those on the host take no less than those of the device."""
    return [place for place in sum_options(request) if place != "host"]


def placed(request: Request, frame: Choice) -> Choice:
    """Return a frame with gradients and state where they fit, with as little on the device as that takes."""
    return place_in_ram(request, place_gradients(request, frame))


def placements(request: Request, frame: Choice) -> Iterator[Choice]:
    """Yield a frame with gradients and state where they fit, with few gradients on the device and with many.

    Those in spare device memory leave RAM for more of the state, and the link is theirs when it is free. Of a
    small model every number of them is listed.
    """
    yield placed(request, frame)
    if request.choice.gradients != AUTO or not may_wait_elsewhere(request, frame):
        return
    most = most_gradients_on_device(request, frame)
    for number in range(1, most + 1) if len(frame.activations) <= SMALL else {most} - {0}:
        yield place_in_ram(request, _with_gradients(frame, number, 0))


def spread(request: Request, frame: Choice) -> Iterator[Choice]:
    """Yield a frame with gradients where each tier is spared most: on the host, on the device, on drives."""
    yield frame
    if request.choice.gradients != AUTO or not may_wait_elsewhere(request, frame) or request.spec.is_cpu:
        return
    most = most_gradients_on_device(request, frame)
    yield _with_gradients(frame, most, 0)
    if _may_use_drives(request, frame):
        yield _with_gradients(frame, most, len(frame.activations) - most)


def place_gradients(request: Request, choice: Choice) -> Choice:
    """Let gradients wait in RAM as far as it holds them, then in spare device memory, then on drives.

    The last layers' are on drives: they are complete first and updated last. The first layers' are on the
    device. With state on drives, RAM holds them, as that takes what is left of it.
    """
    if request.choice.gradients != AUTO:
        return choice
    choice = _with_gradients(choice, 0, 0)
    if not may_wait_elsewhere(request, choice):
        return choice
    limit, num_layers = request.limits["ram"], len(choice.activations)
    assert limit is not None

    def over(on_device: int, on_drives: int) -> int:
        return host_bytes(request, _with_gradients(choice, on_device, on_drives)) - limit

    if request.spec.is_cpu or over(0, 0) <= 0:
        return choice
    most = most_gradients_on_device(request, choice)
    if over(most, 0) <= 0:
        return _with_gradients(choice, _fewest(most, lambda n: over(n, 0)), 0)
    if not _may_use_drives(request, choice):
        return _with_gradients(choice, most, 0)
    return _with_gradients(choice, most, _fewest(num_layers - most, lambda n: over(most, n)))


def _may_use_drives(request: Request, choice: Choice) -> bool:
    return request.may_use_drives and not choice.outer_resident and not choice.resident_layers


def most_gradients_on_device(request: Request, choice: Choice) -> int:
    """Return how many of the first layers' gradients spare device memory holds."""
    limit, num_layers = request.limits["device"], len(choice.activations)
    if limit is None:
        return num_layers
    sums, batch = BlockSums.of(request.anatomy, choice), request.batch

    def waiting(number: int) -> int:
        placed = _with_gradients(choice, number, 0)
        places = sums.gradient_places(placed, batch.num_micro_batches)
        return places.on_device.total(pools.waiting_gradient, batch.num_ranks)

    spare = -overflowing(request, _with_gradients(choice, 0, 0), "device")
    return most_within(num_layers, lambda n: waiting(n) - spare) if spare >= 0 else 0


def _with_gradients(choice: Choice, on_device: int, on_drives: int) -> Choice:
    others = len(choice.activations) - on_device - on_drives
    places = (*["device"] * on_device, *["host"] * others, *["nvme"] * on_drives)
    return choice if choice.gradients == places else replace(choice, gradients=places)


def _fewest(limit: int, over: Callable[[int], int]) -> int:
    """Return the smallest number up to `limit` that is not over by a byte; `limit` is allowed anyway."""
    low, high = 0, limit
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if over(middle) <= 0 else (middle + 1, high)
    return low


def place_in_ram(request: Request, choice: Choice) -> Choice:
    """Keep in RAM what fits of what could be on the drives: first weights, then state; the largest blocks."""
    if not choice.tiers or request.choice.blocks_in_ram != AUTO:
        return choice

    limit = request.limits["ram"]
    assert limit is not None
    others = host_bytes(request, choice) - placed_bytes(
        request.anatomy, choice, request.batch, request.optimizer
    )
    if request.spec.is_cpu:  # what is on the device does not change
        others += sum(pool.nbytes for pool in pools_of(request, choice) if pool.tier == "ram")
        others -= host_bytes(request, choice)

    def over(**counts: int) -> int:
        placed = replace(choice, **counts)  # type: ignore[arg-type]
        return placed_bytes(request.anatomy, placed, request.batch, request.optimizer) + others - limit

    num_blocks = BlockSums.of(request.anatomy, choice).num_blocks
    weights = 0
    if choice.tier("working") == "nvme":
        weights = most_within(num_blocks, lambda n: over(weights_in_ram=n))
    most = weights if choice.tier("working") == "nvme" else num_blocks
    state = most_within(most, lambda n: over(blocks_in_ram=n, weights_in_ram=weights))
    return replace(choice, blocks_in_ram=state, weights_in_ram=weights)


def most_within(limit: int, over: Callable[[int], int]) -> int:
    """Return the largest number up to `limit` that is not over by a byte; 0 is allowed anyway.

    Bytes grow nearly evenly with the number, so a line through what is known guesses better than the middle.
    """
    above = over(limit)
    if limit == 0 or above <= 0:
        return limit
    low, high, below = 0, limit, min(0, over(0))
    is_even = True
    while high - low > 1:
        guess = low + int((high - low) * -below / (above - below)) if is_even else (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        bytes_over = over(guess)
        is_even = not is_even or high - low < 2 * min(guess - low, high - guess)
        if bytes_over <= 0:
            low, below = guess, bytes_over
        else:
            high, above = guess, bytes_over
    return low
