"""Saved activations that wait on the host: copied out after a block's forward, back before its backward.

What autograd saves in one visit of a block leaves the device together and returns together: one host buffer,
one copy operation each way. What is copied is the bytes that tensors span in their storages, so views come
back as views, with their strides, and no more is copied than the tensors keep alive on the device.

With `memory.boundaries=nvme` the host buffer is one of a few, and the bytes go on to the drives and come back
from there (`Staging`).

Device memory is never taken from autograd's hands early: a visit's tensors are dropped once compute has been
made to wait for their copy, one visit later, and memory to return into is taken in compute's own order. So
torch's allocator, which reuses memory in the order of the compute stream, needs to know of no other stream,
and at most two visits' tensors are on the device, however far the launching thread is ahead.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor

from megatrain.errors import ModelError
from megatrain.layout.host_buffers import LEAST_OFFLOADED_BYTES
from megatrain.plan.program.buffers import Buffer
from megatrain.plan.program.kinds import Lane
from megatrain.store.drives.scratch import ScratchFiles
from megatrain.stream.activations.host_ring import HostBuffer, HostRing
from megatrain.stream.activations.on_drives import Staged, Staging
from megatrain.stream.activations.saved_tensors import ByteSpan, Held, SavedVisit, Where, cover, may_leave
from megatrain.stream.lanes import Lanes

_log = logging.getLogger(__name__)


class OffloadedActivations:
    """Takes tensors that autograd saves to the host and back, by visit.

    The caller gives `save` and `load` to `torch.autograd.graph.saved_tensors_hooks`, and calls `flush` after
    a visit's forward, `prefetch` one visit before its backward, and `drop` after it; with drives `stow` after
    `flush`, and `recall` ahead of `prefetch`.
    """

    def __init__(
        self,
        lanes: Lanes,
        limit_bytes: int | None = None,
        *,
        min_bytes: int = LEAST_OFFLOADED_BYTES,
        num_leaving: int = 1,
    ) -> None:
        """Start empty.

        Args:
            lanes: The lanes in which copies run.
            limit_bytes: Host memory for saved tensors, at most; None: any number of bytes.
            min_bytes: Tensors in smaller storages stay on the device: starting a copy costs more time than
                their memory is worth.
            num_leaving: Visits whose tensors may be on their way to the host while a later one computes.
        """
        self._lanes = lanes
        self._ring = HostRing(lanes, limit_bytes)
        self._limit = limit_bytes
        self._staging: Staging | None = None
        self._min_bytes = min_bytes
        self._num_leaving = num_leaving
        self._visits: dict[Hashable, SavedVisit] = {}
        self._keys: dict[tuple[int, int], int] = {}
        """Of the newest visit of each block and micro-batch."""
        self._new_key = itertools.count()
        self._leaving: deque[SavedVisit] = deque()
        self._has_warned = False
        self._moved = (0, 0)
        self.saved_bytes = 0
        """Copied to the host so far."""
        self.restored_bytes = 0
        """Copied back so far."""
        self.kept_bytes = 0
        """Left on the device so far because the host limit had no room for them."""
        self.num_dropped = 0
        """How often everything was freed, as after an exception."""

    @property
    def device(self) -> torch.device:
        """What tensors leave and come back to."""
        return self._lanes.device

    @property
    def host_bytes(self) -> int:
        """Host memory in use or free in the ring, or of the buffers before the drives."""
        return self._ring.nbytes + (0 if self._staging is None else self._staging.nbytes)

    @property
    def is_on_drives(self) -> bool:
        """Whether what leaves the device waits on drives."""
        return self._staging is not None

    @property
    def drive_bytes(self) -> tuple[int, int]:
        """Bytes read from the drives and written to them so far."""
        return self._moved if self._staging is None else self._staging.moved

    def use(self, scratch: ScratchFiles | None) -> None:
        """Let what leaves the device wait on drives; None: in RAM. Nothing is saved at the moment."""
        self.trim()
        self._moved = self.drive_bytes
        self._staging = None
        if scratch is not None:
            self._staging = Staging(self._lanes, scratch, self._limit, moved=self._moved)

    def begin_step(self) -> None:
        """Take note that a step begins: between steps there is time to page-lock what the last one made."""
        self._ring.begin_step()

    def name_visit(self, block: int, micro_batch: int) -> int:
        """Return a key for a new visit; the program's copies of this pair mean the newest one."""
        self._keys[block, micro_batch] = next(self._new_key)
        return self._keys[block, micro_batch]

    def key_of(self, block: int, micro_batch: int) -> int:
        """Return the key of the newest visit of a block and a micro-batch; -1: there is none."""
        return self._keys.get((block, micro_batch), -1)

    def save(self, tensor: Tensor, key: Hashable) -> Held:
        """Take note of a saved tensor; it stays on the device until `flush`.

        Tensors that outlive the visit anyway (slot views, attention masks, rotary tables) are the caller's to
        leave out: to copy them frees nothing. Parameters stay without being asked; so does what a part of a
        layer saves that is entered again after the layer's `flush`.
        """
        held = Held.of(tensor)
        if may_leave(tensor, self._lanes.device, self._min_bytes):
            visit = self._visits.get(key) or self._begin(key)
            if visit.where is Where.OPEN:
                held.visit = visit
                visit.saved.append(weakref.ref(held))
        return held

    def _begin(self, key: Hashable) -> SavedVisit:
        """Begin a visit, and drop those whose graph is gone: a forward that no backward followed."""
        for visit in [visit for visit in self._visits.values() if not visit.is_wanted]:
            self.drop(visit.key)
        self._visits[key] = SavedVisit(key)
        return self._visits[key]

    def flush(self, key: Hashable) -> None:
        """Start to copy what a visit has saved to the host; its forward is over.

        Compute waits for the copy of the visit before, and that visit's tensors are dropped.
        """
        visit = self._visits.get(key)
        if visit is None:
            return
        if visit.is_late:
            self.leave_now(key)
            self.settle(key)
            return
        assert visit.where is Where.OPEN, f"{key} is flushed twice"
        self._begin_to_leave(visit)
        while len(self._leaving) > self._num_leaving:
            self._settle(self._leaving.popleft())

    def come_late(self, key: Hashable) -> None:
        """Let what a visit saves leave at once, and come back tensor by tensor when it is asked for."""
        if key in self._visits:
            self._visits[key].is_late = True

    def leave_now(self, key: Hashable) -> None:
        """Start to copy what a late visit has saved so far: no more of it leaves the device."""
        visit = self._visits.get(key)
        if visit is not None and visit.is_late and visit.where is Where.OPEN:
            self._begin_to_leave(visit)

    def settle(self, key: Hashable) -> None:
        """Drop the tensors of a late visit on the device, once compute waits for their copies."""
        visit = self._visits.get(key)
        if visit is not None and visit.is_late and visit in self._leaving:
            self._leaving.remove(visit)
            self._settle(visit)

    def _begin_to_leave(self, visit: SavedVisit) -> None:
        visit.where = Where.LEAVING
        placed = self._place(visit)
        if visit.host is None:
            return
        for number, span in enumerate(placed):
            span.number = number
        visit.spans = [weakref.ref(span) for span in placed]
        visit.copied = list(placed.values())
        nbytes = sum(span.nbytes for span in placed)
        self._mark_compute(writes=visit.device_name("saved"))  # all that the visit has computed
        self._lanes.enqueue(
            Lane.SAVE,
            visit.copy(self._lanes, list(placed), home=True),
            reads=visit.device_name("saved"),
            writes=[visit.buffer_name],
            work=nbytes,
            label=f"save {visit.key}",
        )
        self.saved_bytes += nbytes
        self._leaving.append(visit)

    def stow(self, key: Hashable, what: str) -> None:
        """Start to write what a visit's `flush` copies on to the drives.

        Args:
            key: The key of the visit.
            what: Names it, for messages.
        """
        visit = self._visits.get(key)
        if visit is not None and isinstance(visit.host, Staged):
            visit.what = what
            self._drives.stow(visit.host, what)

    def recall(self, key: Hashable) -> None:
        """Start to read a visit back from the drives, if it has left the device; its `prefetch` is near."""
        visit = self._visits.get(key)
        if visit is not None and visit.where is Where.HOST and isinstance(visit.host, Staged):
            self._drives.recall(visit.host, visit.what)

    def prefetch(self, key: Hashable) -> None:
        """Start to copy a visit's tensors back to the device; its backward is next."""
        visit = self._visits.get(key)
        if visit is not None and not visit.is_late:
            self._return(visit)

    def load(self, held: Held) -> Tensor:
        """Return a saved tensor on the device, bit for bit; compute waits for its copy.

        Raises:
            ModelError: The model has changed it in place since it was saved, or its visit's backward is over.
        """
        if held.tensor is not None:
            if not held.is_intact:
                raise ModelError(
                    f"a tensor of shape {tuple(held.shape)} that the backward needs was changed in place "
                    "after the forward had saved it; the model would not train without offloading either"
                )
            return held.tensor
        visit = held.visit
        if visit is None or held.span is None:
            raise ModelError(
                "a second backward through the same forward, whose saved activations are gone; run the "
                "forward again"
            )
        if visit.is_late:
            coming = self._bring(visit, held.span)
            self._arrived(visit, held.span)
            return held.within(coming)
        self._return(visit)
        if visit.where is Where.ARRIVING:
            self._mark_compute(reads=visit.device_name("restored"))
            visit.where = Where.DEVICE
            visit.copied = []
        return held.restored()

    def rows(self, held: Held, tile: slice) -> Tensor:
        """Return some tokens of a saved tensor (rows, tokens, ...) on the device.

        Those of a late visit come alone, and the next tile of as many comes meanwhile.
        """
        visit, span = held.visit, held.span
        is_there = held.tensor is not None or not held.has_plain_rows
        if visit is None or span is None or is_there or not visit.is_late:
            return self.load(held)[:, tile]
        ahead, held.ahead = held.ahead, None
        coming = ahead[1] if ahead is not None and ahead[0] == tile else self._bring_rows(visit, held, tile)
        self._arrived(visit, span)
        following = slice(tile.stop, min(2 * tile.stop - tile.start, held.shape[1]))
        if following.start < held.shape[1]:
            held.ahead = following, self._bring_rows(visit, held, following)
        return coming

    def drop(self, key: Hashable) -> None:
        """Free all that a visit holds; its backward is over."""
        visit = self._visits.pop(key, None)
        if visit is None:
            return
        if visit.host is not None:
            # Device memory goes back to the allocator in compute's order: not before the copies are done.
            if visit.where in (Where.LEAVING, Where.STAYING):
                self._mark_compute(writes=visit.device_name("saved"))
                if visit.where is Where.LEAVING:
                    self._leaving.remove(visit)
            elif visit.where is Where.ARRIVING:
                self._mark_compute(reads=visit.device_name("restored"))
            self._mark_compute(reads=list(visit.coming))
            if isinstance(visit.host, HostBuffer):
                self._lanes.enqueue(
                    Lane.RESTORE,
                    functools.partial(self._lanes.freed, visit.host.flat),
                    writes=[visit.buffer_name],
                    label=f"drop {key}",
                )
            self._give_back(visit.host)
        visit.end()

    def leave(self, key: Hashable) -> None:
        """Free all that a visit holds, unless autograd still keeps some of it: then `sweep` does.

        A layer in fragments may compute before it enters the first of them, such as a norm without weights.
        """
        visit = self._visits.get(key)
        if visit is not None and not visit.is_wanted:
            self.drop(key)

    def sweep(self) -> None:
        """Drop the visits of which autograd keeps nothing: their backward is over, though no one was told."""
        for key, visit in list(self._visits.items()):
            if not visit.helds():
                self.drop(key)

    def clear(self) -> None:
        """Free everything, after an exception; nothing is waited for and nothing raises."""
        self.num_dropped += 1
        for visit in self._visits.values():
            lane = Lane.RESTORE if visit.where is Where.ARRIVING else Lane.SAVE
            for tensor in visit.copied:
                self._lanes.share(tensor, lane)  # the copy may not have run: the memory waits for it
            for tensor in visit.coming.values():
                self._lanes.share(tensor, Lane.RESTORE)
            if visit.host is not None:
                self._give_back(visit.host)
            visit.end()
        self._visits.clear()
        self._leaving.clear()

    def trim(self) -> None:
        """Drop everything, and give the host memory back, and room on drives; between two steps."""
        self.clear()
        self._ring.trim()
        if self._staging is not None:
            self._staging.trim()

    def _place(self, visit: SavedVisit) -> dict[ByteSpan, Tensor]:
        """Give a visit a host buffer; return the spans that fit, with their bytes on the device."""
        helds = [held for held in visit.helds() if held.is_intact]  # load will report the others
        spans = cover(helds)
        offsets: list[int | None] = []
        if spans:
            source = self._ring if self._staging is None else self._staging
            visit.host, offsets = source.take([span.nbytes for span in spans])
        placed, kept_bytes = {}, 0
        for (span, flat), offset in zip(spans.items(), offsets, strict=True):
            if offset is None:
                kept_bytes += span.nbytes
            else:
                span.offset = offset
                placed[span] = flat
        for held in helds:
            if held.span not in placed:
                held.span = None
        if kept_bytes and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the host limit of %.1f MiB for saved activations has no room for %.1f MiB of visit %s: they "
                "stay on the device, as all do that find no room from now on",
                (self._limit or 0) / (1 << 20),
                kept_bytes / (1 << 20),
                visit.key,
            )
        self.kept_bytes += kept_bytes
        return placed

    def _settle(self, visit: SavedVisit) -> None:
        """Drop a visit's tensors on the device, once compute waits for their copies."""
        self._mark_compute(writes=visit.device_name("saved"))
        visit.where = Where.HOST
        visit.copied = []
        for held in visit.helds():
            if held.span is not None and held.is_intact:  # load reports what compute has changed meanwhile
                held.tensor = None

    def _return(self, visit: SavedVisit) -> None:
        if visit.where is Where.LEAVING and visit.host is not None:
            self._leaving.remove(visit)
            visit.where = Where.STAYING
        elif visit.where is Where.HOST:
            self._restore(visit)

    def _restore(self, visit: SavedVisit) -> None:
        assert visit.host is not None
        spans = [span for reference in visit.spans if (span := reference()) is not None]
        visit.where = Where.DEVICE
        if not spans:  # autograd has dropped them all
            return
        if isinstance(visit.host, Staged):
            self._drives.recall(visit.host, visit.what, waits=True)
        device = self._lanes.device
        for span in spans:
            span.restored = torch.empty(span.nbytes, dtype=torch.uint8, device=device)
        visit.copied = [span.restored for span in spans if span.restored is not None]
        # compute is done with what the memory was used for before
        self._mark_compute(writes=visit.device_name("restored"))
        nbytes = sum(span.nbytes for span in spans)
        self._lanes.enqueue(
            Lane.RESTORE,
            visit.copy(self._lanes, spans, home=False),
            reads=[visit.buffer_name],
            writes=visit.device_name("restored"),
            work=nbytes,
            label=f"restore {visit.key}",
        )
        if isinstance(visit.host, Staged):
            self._drives.release(visit.host)
        self.restored_bytes += nbytes
        visit.where = Where.ARRIVING

    def _bring(self, visit: SavedVisit, span: ByteSpan) -> Tensor:
        """Start to copy a span of a late visit to the device; return its bytes there."""
        coming = torch.empty(span.nbytes, dtype=torch.uint8, device=self._lanes.device)
        self._enqueue(visit, span, coming, lambda flat: [(coming, flat)])
        return coming

    def _bring_rows(self, visit: SavedVisit, held: Held, tile: slice) -> Tensor:
        """Start to copy some tokens of a tensor of a late visit to the device; return where they come to."""
        assert held.span is not None
        shape = (held.shape[0], tile.stop - tile.start, *held.shape[2:])
        coming = torch.empty(shape, dtype=held.dtype, device=self._lanes.device)

        def pairs(flat: Tensor) -> list[tuple[Tensor, Tensor]]:
            there = held.within(flat)[:, tile]
            return [(row.view(-1), source.view(-1)) for row, source in zip(coming, there, strict=True)]

        self._enqueue(visit, held.span, coming, pairs)
        return coming

    def _enqueue(
        self,
        visit: SavedVisit,
        span: ByteSpan,
        coming: Tensor,
        pairs: Callable[[Tensor], list[tuple[Tensor, Tensor]]],
    ) -> None:
        """Enqueue copies of a span's bytes, of which `pairs` makes targets and sources."""
        if isinstance(visit.host, Staged):
            self._drives.recall(visit.host, visit.what, waits=True)
        name = visit.name_of(span)
        copies = pairs(visit.buffer.flat[span.offset : span.offset + span.nbytes])

        def copy() -> None:
            for target, source in copies:
                self._lanes.copy(target, source)

        self._mark_compute(writes=[name])  # it is done with what the memory was used for before
        visit.coming[name] = coming
        self._lanes.enqueue(
            Lane.RESTORE,
            copy,
            reads=[visit.buffer_name],
            writes=[name],
            work=coming.nbytes,
            label=f"restore {visit.key}",
        )
        self.restored_bytes += coming.nbytes

    def _arrived(self, visit: SavedVisit, span: ByteSpan) -> None:
        """Let compute wait for what comes of a span of a late visit."""
        name = visit.name_of(span)
        self._mark_compute(reads=[name])
        visit.coming.pop(name, None)

    @property
    def _drives(self) -> Staging:
        assert self._staging is not None
        return self._staging

    def _give_back(self, host: HostBuffer | Staged) -> None:
        if isinstance(host, Staged):
            self._drives.give_back(host)
        else:
            self._ring.give_back(host)

    def _mark_compute(self, *, reads: Iterable[Buffer] = (), writes: Iterable[Buffer] = ()) -> None:
        """Make compute wait for the buffers, and others for what compute has been given to do so far."""
        with self._lanes.using(Lane.COMPUTE, reads=reads, writes=writes):
            pass
