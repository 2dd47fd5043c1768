"""Saved activations come back from the host bit for bit, in the bytes and the order that were promised."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from megatrain.errors import ModelError
from megatrain.plan.program.kinds import Lane
from megatrain.store.arena import Arena
from megatrain.stream.activations import host_ring
from megatrain.stream.activations.host_ring import HostBuffer
from megatrain.stream.activations.offload import OffloadedActivations
from megatrain.stream.activations.saved_tensors import Held
from megatrain.stream.lanes import (
    AcceleratorLanes,
    Cause,
    CheckedLanes,
    EmulatedLanes,
    EmulatedMachine,
    Event,
    InlineLanes,
    Lanes,
    OrderingError,
)
from tests.reference import assert_same_bits

SIZE = 4096
"""Elements of a tensor that is worth a copy."""

BACKENDS: dict[str, Callable[[], Lanes]] = {
    "inline": InlineLanes,
    "checked": CheckedLanes,
    "emulated": lambda: EmulatedLanes(EmulatedMachine(seed=1)),
}

MISSING_WAITS = {
    "the visit's compute, before the copy out": Cause(Lane.SAVE, Lane.COMPUTE, "saved"),
    "the copy out, before the memory is freed": Cause(Lane.COMPUTE, Lane.SAVE, "saved"),
    "compute's use of the memory, before the copy in": Cause(Lane.RESTORE, Lane.COMPUTE, "restored"),
    "the copy in, before its use": Cause(Lane.COMPUTE, Lane.RESTORE, "restored"),
    "the host buffer's last use, before the next copy out": Cause(Lane.SAVE, Lane.RESTORE, "offloaded"),
}


class ForgetfulLanes(CheckedLanes):
    """Checked lanes that leave out the waits of one cause, as a bug in the offloaded would."""

    def __init__(self, forgotten: Cause) -> None:
        super().__init__()
        self.forgotten = forgotten
        self.num_forgotten = 0

    def _wait(self, lane: Lane, event: Event, cause: Cause) -> None:
        if cause == self.forgotten:
            self.num_forgotten += 1
        else:
            super()._wait(lane, event, cause)


class CountingLanes(CheckedLanes):
    """Checked lanes that note the cause of every wait."""

    def __init__(self) -> None:
        super().__init__()
        self.causes: set[Cause] = set()

    def _wait(self, lane: Lane, event: Event, cause: Cause) -> None:
        self.causes.add(cause)
        super()._wait(lane, event, cause)


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same_layout(actual: Tensor, expected: Tensor) -> None:
    assert (actual.dtype, actual.shape, actual.stride()) == (
        expected.dtype,
        expected.shape,
        expected.stride(),
    )
    assert torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def away(tensors: Sequence[Tensor]) -> tuple[OffloadedActivations, list[Held]]:
    """Save tensors as visit 0, and take them off the device."""
    offloaded = OffloadedActivations(CheckedLanes(), num_leaving=0)
    helds = [offloaded.save(tensor, 0) for tensor in tensors]
    offloaded.flush(0)
    return offloaded, helds


class Blocks(nn.Module):
    """Blocks whose saved tensors are ordinary, shared, transposed, expanded and sliced."""

    def __init__(self, num_blocks: int = 4, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_blocks))
        self.ups = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(num_blocks))
        self.downs = nn.ModuleList(nn.Linear(width, width) for _ in range(num_blocks))

    def block(self, index: int, x: Tensor) -> Tensor:
        first, second, third = self.ups[index](self.norms[index](x)).chunk(3, dim=-1)
        mixed = torch.softmax(first @ second.transpose(1, 2), dim=-1) @ third
        mixed = mixed * mixed.mean(dim=1, keepdim=True).expand_as(mixed)
        return x + self.downs[index](nn.functional.silu(mixed))


def resident_gradients(model: Blocks, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    hidden = x
    for index in range(len(model.ups)):
        hidden = model.block(index, hidden)
    return list(torch.autograd.grad(hidden.square().sum(), [x, *model.parameters()]))


class Done(torch.autograd.Function):
    """The identity, made before a block: in the backward it runs when the block's is over, as bring does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


def stashed_gradients(
    model: Blocks, offloaded: OffloadedActivations, x: Tensor, *, prefetches: bool = True
) -> list[Tensor]:
    """Run the model with every block's saved tensors on the host between its forward and its backward."""
    x = x.clone().requires_grad_()
    hidden = x
    last = len(model.ups) - 1

    def over(index: int) -> Callable[[], None]:
        def call() -> None:
            offloaded.drop(index)
            if prefetches and index > 1:
                offloaded.prefetch(index - 2)

        return call

    for index in range(last + 1):
        hidden = Done.apply(hidden, over(index))
        with saved_tensors_hooks(partial(offloaded.save, key=index), offloaded.load):
            hidden = model.block(index, hidden)
        offloaded.flush(index)
    loss = hidden.square().sum()
    if prefetches:
        offloaded.prefetch(last)
        offloaded.prefetch(last - 1)
    return list(torch.autograd.grad(loss, [x, *model.parameters()]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("prefetches", [True, False])
@pytest.mark.parametrize("num_leaving", [0, 1, 2])
@pytest.mark.parametrize("name", BACKENDS)
def test_gradients_equal_resident(name: str, num_leaving: int, prefetches: bool) -> None:
    model, lanes = Blocks(), BACKENDS[name]()
    offloaded = OffloadedActivations(lanes, min_bytes=0, num_leaving=num_leaving)
    for step in range(3):
        x = values(step, 2, 16, 32)
        expected = resident_gradients(model, x)
        actual = stashed_gradients(model, offloaded, x, prefetches=prefetches)
        for grad, wanted in zip(actual, expected, strict=True):
            assert_same_bits(grad, wanted, f"step {step}")
    assert offloaded.restored_bytes > 0
    assert offloaded.kept_bytes == 0
    lanes.close()


@pytest.mark.parametrize("num_seeds", [60, pytest.param(200, marks=pytest.mark.parity)])
def test_jitter_of_offloading_gives_the_same_bits(num_seeds: int) -> None:
    model, x = Blocks(), values(0, 2, 16, 32)
    expected = resident_gradients(model, x)
    for seed in range(num_seeds):
        lanes = EmulatedLanes(EmulatedMachine(seed=seed, jitter_s=1e-4))
        offloaded = OffloadedActivations(lanes, min_bytes=0, num_leaving=seed % 3)
        for _ in range(2):
            for grad, wanted in zip(stashed_gradients(model, offloaded, x), expected, strict=True):
                assert_same_bits(grad, wanted, f"jitter seed {seed}")
        lanes.close()


def test_gradients_in_bf16_equal_resident() -> None:
    model, x = Blocks().bfloat16(), values(0, 2, 16, 32, dtype=torch.bfloat16)
    offloaded = OffloadedActivations(CheckedLanes(), min_bytes=0)
    for grad, wanted in zip(
        stashed_gradients(model, offloaded, x), resident_gradients(model, x), strict=True
    ):
        assert_same_bits(grad, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("num_leaving", [0, 1, 2])
def test_gradients_on_cuda_equal_resident(num_leaving: int) -> None:
    """In sizes whose copies take longer than their launch, and with memory that is used again."""
    lanes = AcceleratorLanes(torch.device("cuda", torch.cuda.current_device()))
    model, offloaded = Blocks(8, 512).to(lanes.device), OffloadedActivations(lanes, num_leaving=num_leaving)
    for step in range(5):
        x = values(step, 8, 512, 512).to(lanes.device)
        expected = resident_gradients(model, x)
        actual = stashed_gradients(model, offloaded, x)
        for grad, wanted in zip(actual, expected, strict=True):
            assert_same_bits(grad, wanted, f"step {step}")
    assert offloaded.restored_bytes > 0
    lanes.close()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "slice": lambda x: x[1:, 3:],
    "steps": lambda x: x[:, ::2, 1::3],
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1),
    "windows": lambda x: x.flatten().unfold(0, 8, 4),
    "other dtype": lambda x: x.view(torch.bfloat16)[..., 1:],
    "diagonal": lambda x: x[0].diagonal(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_come_back(layout: str) -> None:
    tensor = LAYOUTS[layout](values(0, 8, 24, 32))
    offloaded, (held,) = away([tensor])
    assert held.tensor is None
    restored = offloaded.load(held)
    assert_same_layout(restored, tensor)
    assert restored.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_restored_tensors_are_aligned_as_their_originals() -> None:
    """Kernels may add in another order for another alignment. Storages of both are aligned themselves."""
    base = values(0, 4 * SIZE)
    for offset in (1, 130, 131):
        offloaded, (held,) = away([base[offset : offset + SIZE]])
        assert offloaded.load(held).storage_offset() * 4 % 512 == offset * 4 % 512
        assert offloaded.restored_bytes == SIZE * 4 + offset * 4 % 512


def test_views_and_repeats_are_copied_once() -> None:
    base = values(0, 64, 192)
    tensors = [base, base, base.t(), base.view(-1), base[:, 64:], *base.chunk(3, dim=1), base[5:]]
    offloaded, helds = away(tensors)
    assert offloaded.saved_bytes == base.nbytes
    restored = [offloaded.load(held) for held in helds]
    for tensor, wanted in zip(restored, tensors, strict=True):
        assert_same_layout(tensor, wanted)
    assert offloaded.restored_bytes == base.nbytes
    assert len({tensor.untyped_storage().data_ptr() for tensor in restored}) == 1


def test_parts_far_apart_in_a_storage_are_copied_without_what_lies_between() -> None:
    base = values(0, 100 * SIZE)
    tensors = [base[90 * SIZE : 91 * SIZE], base[: 2 * SIZE], base[SIZE : 3 * SIZE]]
    offloaded, helds = away(tensors)
    assert offloaded.saved_bytes == 4 * SIZE * 4
    for held, tensor in zip(helds, tensors, strict=True):
        assert_same_layout(offloaded.load(held), tensor)


def test_what_is_not_worth_a_copy_stays() -> None:
    tensors = [
        values(0, SIZE - 1),
        torch.arange(2 * SIZE),
        torch.ones(8 * SIZE, dtype=torch.bool),
        torch.tensor(1.0),
        torch.empty(0, 5),
        torch.empty(SIZE, device="meta"),
        nn.Parameter(values(0, SIZE)),
        nn.Parameter(values(0, 64, SIZE)).t(),
        torch.view_as_complex(values(0, SIZE, 2)).conj().imag,
        values(0, 64, SIZE).to_sparse(),
    ]
    offloaded, helds = away(tensors)
    assert offloaded.saved_bytes == 0
    for held, tensor in zip(helds, tensors, strict=True):
        loaded = offloaded.load(held)
        assert not loaded.requires_grad
        assert loaded.device == tensor.device
        if loaded.layout is torch.strided:
            assert loaded.data_ptr() == tensor.data_ptr()


def test_a_tensor_that_has_not_left_is_returned_as_it_is() -> None:
    offloaded = OffloadedActivations(CheckedLanes())
    first, second = values(0, SIZE), values(1, SIZE)
    held = offloaded.save(first, "first")
    assert offloaded.load(held).data_ptr() == first.data_ptr()
    offloaded.flush("first")
    other = offloaded.save(second, "second")
    offloaded.prefetch("first")  # it was on its way out only
    offloaded.flush("second")
    assert offloaded.load(held).data_ptr() == first.data_ptr()
    assert offloaded.load(other).data_ptr() == second.data_ptr()
    offloaded.drop("second")
    offloaded.drop("first")
    assert offloaded.saved_bytes == 2 * first.nbytes
    assert offloaded.restored_bytes == 0


def storage_ref(tensor: Tensor) -> Callable[[], bool]:
    """Return a question: does the storage still exist?"""
    reference = StorageWeakRef(tensor.untyped_storage())
    return lambda: not reference.expired()


@pytest.mark.parametrize("num_leaving", [0, 1, 2])
def test_device_memory_is_free_after_the_copy(num_leaving: int) -> None:
    """Only the visits on their way out have device memory, and a restored tensor has it while it is held."""
    offloaded = OffloadedActivations(CheckedLanes(), num_leaving=num_leaving)
    helds, alive = [], []
    for key in range(5):
        tensor = values(key, SIZE)
        alive.append(storage_ref(tensor))
        helds.append(offloaded.save(tensor, key))
        del tensor
        offloaded.flush(key)
        assert [ask() for ask in alive] == [number > key - num_leaving for number in range(key + 1)]
    restored = storage_ref(offloaded.load(helds[0]))
    assert restored()
    helds[0] = helds[1]  # autograd is done with the node
    assert not restored()
    offloaded.prefetch(1)
    assert_same_bits(offloaded.load(helds[1]), values(1, SIZE))
    restored = storage_ref(offloaded.load(helds[1]))
    offloaded.drop(1)
    assert not restored()


def test_nothing_is_kept_alive_by_a_node_that_saves_its_own_output() -> None:
    offloaded = OffloadedActivations(InlineLanes())
    x = values(0, SIZE).requires_grad_()
    with saved_tensors_hooks(lambda tensor: offloaded.save(tensor, 0), offloaded.load):
        y = x.exp()
    is_alive = storage_ref(y)
    del y
    assert not is_alive()


def test_saves_that_autograd_has_dropped_are_not_copied() -> None:
    offloaded = OffloadedActivations(CheckedLanes(), num_leaving=0)
    held = offloaded.save(values(0, SIZE), 0)
    dropped = offloaded.save(values(1, SIZE), 0)
    del dropped
    offloaded.flush(0)
    assert offloaded.saved_bytes == 4 * SIZE
    del held
    offloaded.prefetch(0)
    assert offloaded.restored_bytes == 0
    offloaded.drop(0)


def count_arenas(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []

    class Counted(Arena):
        def __init__(self, nbytes: int) -> None:
            made.append(nbytes)
            super().__init__(nbytes)

    monkeypatch.setattr(host_ring, "Arena", Counted)
    return made


@pytest.mark.parametrize("limit_bytes", [None, 1 << 20, 100_000, 60_000, 9_000])
def test_the_second_step_allocates_no_host_memory(
    monkeypatch: pytest.MonkeyPatch, limit_bytes: int | None
) -> None:
    """And copies and keeps the same bytes as the first."""
    made = count_arenas(monkeypatch)
    model, offloaded = Blocks(), OffloadedActivations(CheckedLanes(), limit_bytes, min_bytes=0)
    found = []
    for step in range(3):
        before = (offloaded.saved_bytes, offloaded.restored_bytes, offloaded.kept_bytes)
        x = values(step, 2, 16, 32)
        for grad, wanted in zip(
            stashed_gradients(model, offloaded, x), resident_gradients(model, x), strict=True
        ):
            assert_same_bits(grad, wanted)
        after = (offloaded.saved_bytes, offloaded.restored_bytes, offloaded.kept_bytes)
        found.append([stop - start for start, stop in zip(before, after, strict=True)])
        if step == 0:
            num_made = len(made)
    assert num_made == len(made) > 0
    assert found[0] == found[1] == found[2]
    assert sum(made) == offloaded.host_bytes <= (limit_bytes or offloaded.host_bytes)
    assert (found[0][2] > 0) == (limit_bytes is not None and limit_bytes < 1 << 20)


def test_bytes_are_counted() -> None:
    offloaded = OffloadedActivations(CheckedLanes())
    sizes = [SIZE, 2 * SIZE + 1, 3 * SIZE]
    helds = [offloaded.save(values(key, size), key) for key, size in enumerate(sizes)]
    for key in range(3):
        offloaded.flush(key)
    assert offloaded.saved_bytes == 4 * sum(sizes)
    assert offloaded.host_bytes == 4 * (6 * SIZE + 128), "rounded up to 512 bytes"
    for key in (2, 1, 0):
        offloaded.prefetch(key)
        assert_same_bits(offloaded.load(helds[key]), values(key, sizes[key]))
        offloaded.drop(key)
    assert offloaded.restored_bytes == 4 * sum(sizes[:2]), "the last visit had not left"


def test_the_limit_is_kept_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    offloaded = OffloadedActivations(CheckedLanes(), 4 * SIZE * 4)
    tensors = [values(number, SIZE) for number in range(3)]
    helds = []
    with caplog.at_level(logging.WARNING):
        for key in range(3):
            helds.append([offloaded.save(tensor + key, key) for tensor in tensors])
            offloaded.flush(key)
    assert offloaded.host_bytes == 4 * SIZE * 4
    assert offloaded.saved_bytes == 4 * SIZE * 4
    assert offloaded.kept_bytes == 5 * SIZE * 4
    assert [record.getMessage() for record in caplog.records] == [
        "the host limit of 0.1 MiB for saved activations has no room for 0.0 MiB of visit 1: they stay on "
        "the device, as all do that find no room from now on"
    ]
    for key in (2, 1, 0):
        for held, tensor in zip(helds[key], tensors, strict=True):
            assert_same_bits(offloaded.load(held), tensor + key)
        offloaded.drop(key)


def test_longer_sequences_take_the_place_of_free_buffers() -> None:
    """A limit that fits four long visits holds four, whatever was in the ring before."""
    offloaded = OffloadedActivations(CheckedLanes(), 4 * 2 * SIZE * 4)
    for size in (SIZE, SIZE + SIZE // 2, 2 * SIZE, SIZE):
        helds = [offloaded.save(values(key, size), key) for key in range(4)]
        for key in range(4):
            offloaded.flush(key)
        for key in range(4):
            assert_same_bits(offloaded.load(helds[key]), values(key, size))
            offloaded.drop(key)
        assert offloaded.host_bytes <= 4 * 2 * SIZE * 4
    assert offloaded.kept_bytes == 0


def test_dropped_host_buffers_are_poisoned() -> None:
    offloaded, (held,) = away([values(0, SIZE)])
    assert held.visit is not None
    assert isinstance(held.visit.host, HostBuffer)
    flat = held.visit.host.flat
    assert not flat.view(torch.float32).isnan().any()
    offloaded.drop(0)
    assert flat.view(torch.float32).isnan().all()


def steps_of(offloaded: OffloadedActivations, num_steps: int = 2) -> None:
    """Run steps by hand: three visits out, and back."""
    for _ in range(num_steps):
        helds = []
        for key in range(3):
            helds.append(offloaded.save(values(key, SIZE), key))
            offloaded.flush(key)
        for key in (2, 1, 0):
            offloaded.prefetch(key)
            assert_same_bits(offloaded.load(helds[key]), values(key, SIZE))
            offloaded.drop(key)


@pytest.mark.parametrize("name", MISSING_WAITS)
def test_a_missing_wait_is_found(name: str) -> None:
    cause = MISSING_WAITS[name]
    lanes = ForgetfulLanes(cause)
    message = (
        f"lane {cause.waiting.value} uses {cause.buffer} . without waiting until lane {cause.owner.value}"
    )
    with pytest.raises(OrderingError, match=message):
        steps_of(OffloadedActivations(lanes))
    assert lanes.num_forgotten > 0


@pytest.mark.parametrize("num_leaving", [0, 1, 3])
def test_the_stash_s_own_order_is_sound(num_leaving: int) -> None:
    """No error in a clean run, and every wait that the injections above leave out does occur in it."""
    lanes = CountingLanes()
    steps_of(OffloadedActivations(lanes, num_leaving=num_leaving))
    if num_leaving < 3:
        assert set(MISSING_WAITS.values()) <= lanes.causes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stop", range(1, 24))
@pytest.mark.parametrize("name", BACKENDS)
def test_after_an_exception_anywhere_the_next_step_is_sound(name: str, stop: int) -> None:
    """The offloaded is cleared, no visit or buffer is lost, and the next step is exact."""
    lanes = BACKENDS[name]()
    model, offloaded, x = Blocks(), OffloadedActivations(lanes, min_bytes=0), values(0, 2, 16, 32)
    stashed_gradients(model, offloaded, x)
    host_bytes = offloaded.host_bytes
    countdown = itertools.count(1)

    def fail(*args: Any) -> None:
        if next(countdown) == stop:
            raise KeyboardInterrupt

    handles = [m.register_forward_hook(fail) for m in model.modules()]
    handles += [p.register_hook(fail) for p in model.parameters()]
    with pytest.raises(KeyboardInterrupt):
        stashed_gradients(model, offloaded, x)
    offloaded.clear()
    for handle in handles:
        handle.remove()
    for grad, wanted in zip(
        stashed_gradients(model, offloaded, x), resident_gradients(model, x), strict=True
    ):
        assert_same_bits(grad, wanted)
    assert offloaded.host_bytes == host_bytes
    lanes.close()


@pytest.mark.parametrize("lane", [Lane.SAVE, Lane.RESTORE])
def test_a_failed_copy_reaches_the_caller(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = EmulatedLanes(EmulatedMachine(seed=2))
    model, offloaded, x = Blocks(), OffloadedActivations(lanes, min_bytes=0), values(0, 2, 16, 32)
    enqueue = lanes.enqueue
    countdown = itertools.count(1)

    def fail() -> None:
        raise OSError("the copy failed")

    def failing(wanted: Lane, function: Callable[[], object], **settings: Any) -> None:
        enqueue(wanted, fail if wanted is lane and next(countdown) == 2 else function, **settings)

    monkeypatch.setattr(lanes, "enqueue", failing)
    with pytest.raises(OSError, match="the copy failed"):
        stashed_gradients(model, offloaded, x)
    offloaded.clear()
    for grad, wanted in zip(
        stashed_gradients(model, offloaded, x), resident_gradients(model, x), strict=True
    ):
        assert_same_bits(grad, wanted)
    lanes.close()


def test_a_tensor_that_was_changed_in_place_is_refused() -> None:
    """As autograd itself does, which does not look when there are hooks."""
    for num_flushed in range(3):
        offloaded = OffloadedActivations(CheckedLanes())
        tensor = values(0, SIZE)
        held = offloaded.save(tensor, 0)
        helds = [held]
        for key in range(num_flushed):  # still in the visit, and on the way to the host
            offloaded.flush(key)
            helds.append(offloaded.save(values(1, SIZE), key + 1))
            if key == 0:
                tensor.add_(1)
        tensor.add_(1)
        with pytest.raises(ModelError, match="was changed in place"):
            offloaded.load(held)


def test_a_second_backward_is_refused() -> None:
    offloaded, (held,) = away([values(0, SIZE)])
    offloaded.drop(0)
    with pytest.raises(ModelError, match="second backward"):
        offloaded.load(held)


def test_a_backward_again_before_the_drop_is_exact() -> None:
    """`retain_graph`: autograd keeps what it would have dropped, and so does the host."""
    offloaded = OffloadedActivations(CheckedLanes(), num_leaving=0)
    x = values(0, SIZE).requires_grad_()
    with saved_tensors_hooks(lambda tensor: offloaded.save(tensor, 0), offloaded.load):
        y = x.exp().sin().sum()
    offloaded.flush(0)
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert_same_bits(first, second)
    offloaded.drop(0)


def test_unknown_and_empty_keys_are_no_work() -> None:
    lanes = CountingLanes()
    offloaded = OffloadedActivations(lanes)
    offloaded.save(torch.tensor(1), "small")
    for key in ("small", "never"):
        offloaded.flush(key)
        offloaded.prefetch(key)
        offloaded.drop(key)
    assert not lanes.causes
