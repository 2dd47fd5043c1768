"""What an engine really does in a step: seen at the lanes and in the tensors, never read back from a program.

Every block's planes, every slot and every buffer is found by its address. An event says in which lane
something ran, which of these places it read and wrote, and how many bytes it copied.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatrain.optim import adamw as kernels
from megatrain.plan.program.buffers import Buffer
from megatrain.plan.program.kinds import Lane
from megatrain.store.drives.scratch import Place, ScratchFiles
from megatrain.store.drives.striped import StripedStore
from megatrain.store.on_drives import BlocksOnDrives
from megatrain.stream.engine import Engine
from megatrain.stream.execute import gradients
from megatrain.stream.lanes import InlineLanes


@dataclass
class Event:
    """Something that ran in a lane."""

    lane: Lane
    reads: set[Buffer] = field(default_factory=set)
    writes: set[Buffer] = field(default_factory=set)
    nbytes: int = 0
    """Copied, or read and written by an update."""
    what: str = ""
    """`update`, `norm` or `commit`, where a function of that name was called."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Addresses of source and target."""


class Recorder(TorchDispatchMode):
    """Sees what operations read and write, for the event that is going on."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._open: list[Event] = []
        self._starts: list[int] = []
        self._places: list[tuple[int, int, Buffer]] = []
        self._scratch = range(0)

    # -- where things are -----------------------------------------------------------------------------------

    def survey(self, engine: Engine) -> None:
        """Find out where everything is, from what was allocated."""
        found: list[tuple[Buffer, Tensor | None]] = []
        for number, state in enumerate(engine.host.blocks):
            planes = state._planes or {}
            found.append((("working", number), state.working))
            found += [(("moments", number), plane) for plane in planes.values()]
            found += [(("gradient", number), plane) for plane in (state.gradient, state.accumulator)]
        slots, buffers = engine.arrangement.slots, engine.arrangement.gradients.buffers
        found += [(("slot", n), tensor) for n, tensor in enumerate(slots._slots)]
        found += [(("resident", n), tensor) for n, tensor in slots._resident.items()]
        found += [(("gradient_buffer", n), tensor) for n, tensor in enumerate(buffers._ring)]
        found += [(("resident_gradient", n), tensor) for n, tensor in buffers._resident.items()]
        found += [(("staging", n), tensor) for n, tensor in enumerate(buffers._staging)]
        found += [(("waiting", n), buffers.waiting(n)) for n in buffers._starts if buffers.waits]
        for number, planes_there in engine.executor.states._planes.items():
            found += [(("device_moments", number), plane) for plane in planes_there.values()]
        staging = engine.arrangement.offloaded._staging
        if staging is not None:
            found += [(("activation_staging", buffer.index), buffer.flat) for buffer in staging._free]
        drives = engine.executor.drives
        found += [(("drive_staging", n), tensor) for n, tensor in enumerate(drives._staging)]
        found += [(("page", n), tensor) for n, tensor in enumerate(drives._pages)]
        self._places = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
            for name, tensor in found
            if tensor is not None and tensor.numel()
        )
        self._starts = [start for start, _, _ in self._places]
        rounded = engine.arrangement.shared._low
        self._scratch = range(rounded.data_ptr(), rounded.data_ptr() + rounded.nbytes)

    def at(self, tensor: Tensor) -> Buffer | None:
        """Name the place in which a tensor lies; None: a new one, of autograd's say."""
        number = bisect_right(self._starts, tensor.data_ptr()) - 1
        if number < 0 or tensor.data_ptr() >= self._places[number][1]:
            return None
        return self._places[number][2]

    # -- what happens ---------------------------------------------------------------------------------------

    def begin(self, lane: Lane) -> None:
        self._open.append(Event(lane))

    def end(self) -> None:
        if self._open:
            self.events.append(self._open.pop())

    def touch(self, *, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = (), nbytes: int = 0) -> None:
        """Note that the event that is going on reads and writes these."""
        if self._open:
            event = self._open[-1]
            event.reads |= {place for tensor in reads if (place := self.at(tensor)) is not None}
            event.writes |= {place for tensor in writes if (place := self.at(tensor)) is not None}
            event.nbytes += nbytes

    def call(self, what: str) -> None:
        if self._open:
            self._open[-1].what = what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._open or func.is_view:
            return result
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in ("copy_", "_foreach_copy_"):
            pairs = [(args[0], args[1])] if name == "copy_" else list(zip(args[0], args[1], strict=True))
            for target, source in pairs:
                # what is rounded on its way is sent from there: it crosses once
                nbytes = 0 if target.data_ptr() in self._scratch else target.nbytes
                self.touch(reads=[source], writes=[target], nbytes=nbytes)
                self._open[-1].copies.append((source.data_ptr(), target.data_ptr()))
        elif name in ("set_", "detach_"):
            pass  # a new view
        elif name.endswith("_") and not name.endswith("__"):
            self.touch(reads=tensors, writes=tensors[:1])
        else:
            self.touch(reads=tensors)
        return result

    @contextmanager
    def watching(self, engine: Engine) -> Any:
        """See everything of a step, kernels and drives too."""
        self.survey(engine)
        self.events = []
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(kernels, "update_many", self._update_many))
            stack.enter_context(_wrapped(gradients, self._add, "add"))
            stack.enter_context(_wrapped(gradients, self._add_last, "add_last"))
            stack.enter_context(_wrapped("megatrain.stream.optimizer.global_norm", self._norm))
            stack.enter_context(_wrapped(BlocksOnDrives, self._read, "read"))
            stack.enter_context(_wrapped(BlocksOnDrives, self._write, "write"))
            stack.enter_context(_wrapped(StripedStore, self._write_extent, "write"))
            stack.enter_context(_wrapped(ScratchFiles, self._stow, "write"))
            stack.enter_context(_wrapped(ScratchFiles, self._recall, "read"))
            stack.enter_context(_wrapped(StripedStore, self._commit, "commit"))
            stack.enter_context(_wrapped(BlocksOnDrives, self._fill, "fill"))
            stack.enter_context(self)
            yield

    _update = staticmethod(kernels.update_many)

    def _update_many(self, pool: Any, views: Any, *apart: Any) -> None:
        views = list(views)
        for _, planes in views:
            changed = [planes.working, planes.remainder, planes.exp_avg, planes.exp_avg_sq]
            changed = [plane for plane in changed if plane is not None]
            nbytes = 2 * sum(plane.nbytes for plane in changed) + planes.gradient.nbytes
            self.touch(reads=[planes.gradient], writes=changed, nbytes=nbytes)
        self.call("update")
        self._update(pool, views)

    def _add(self, real: Callable[..., Any], pool: Any, gradient: Tensor, sums: Tensor) -> None:
        self.call("add")
        self.touch(reads=[gradient], writes=[sums], nbytes=gradient.nbytes + 2 * sums.nbytes)
        real(pool, gradient, sums)

    def _add_last(
        self, real: Callable[..., Any], pool: Any, gradient: Tensor, sums: Tensor, out: Tensor
    ) -> Any:
        self.call("add")
        self.touch(reads=[gradient, sums], writes=[out], nbytes=gradient.nbytes + sums.nbytes + out.nbytes)
        return real(pool, gradient, sums, out)

    def _norm(self, real: Callable[..., Any], sums: Any) -> Any:
        self.call("norm")
        self.touch(nbytes=len(sums))
        return real(sums)

    def _read(self, real: Callable[..., Any], store: Any, block: int, buffer: Tensor, **parts: Any) -> Any:
        nbytes = real(store, block, buffer, **parts)
        self.touch(writes=[buffer], nbytes=nbytes)
        self._open[-1].reads.add(("drive", block))
        return nbytes

    def _write(self, real: Callable[..., Any], store: Any, block: int, buffer: Tensor, **parts: Any) -> Any:
        nbytes = real(store, block, buffer, **parts)
        self.touch(reads=[buffer], nbytes=nbytes)
        self._open[-1].writes.add(("drive", block))
        return nbytes

    def _write_extent(
        self, real: Callable[..., Any], store: Any, extent: int, buffer: Tensor, **parts: Any
    ) -> Any:
        self.touch(reads=[buffer], nbytes=buffer.numel())
        return real(store, extent, buffer, **parts)

    def _stow(self, real: Callable[..., Any], files: Any, place: Place, buffer: Tensor) -> Any:
        self.touch(reads=[buffer], nbytes=buffer.numel())
        self._open[-1].writes |= {("scratch", chunk) for chunk in place.chunks}
        return real(files, place, buffer)

    def _recall(self, real: Callable[..., Any], files: Any, place: Place, buffer: Tensor, *what: Any) -> Any:
        self.touch(writes=[buffer], nbytes=buffer.numel())
        self._open[-1].reads |= {("scratch", chunk) for chunk in place.chunks}
        return real(files, place, buffer, *what)

    def _fill(
        self, real: Callable[..., Any], store: Any, piece: Any, block: int, planes: Any, buffer: Tensor
    ) -> Any:
        event = self._open[-1]
        before = event.nbytes
        real(store, piece, block, planes, buffer)
        event.nbytes = before + buffer.numel()  # padding too

    def _commit(self, real: Callable[..., Any], *arguments: Any) -> Any:
        self.call("commit")
        return real(*arguments)


@contextmanager
def _wrapped(target: Any, around: Callable[..., Any], name: str = "") -> Any:
    """Let a function be called through `around`, which gets it as its first argument."""
    if isinstance(target, str):
        module, _, name = target.rpartition(".")
        target = __import__(module, fromlist=[name])
    real = getattr(target, name)
    with mock.patch.object(target, name, lambda *args, **kwargs: around(real, *args, **kwargs)):
        yield


class RecordingLanes(InlineLanes):
    """Lanes that run things at once, and tell the recorder where each begins and ends."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._seen = recorder

    def enqueue(self, lane: Lane, function: Callable[[], object], **keywords: Any) -> None:
        def run() -> None:
            self._seen.begin(lane)
            try:
                function()
            finally:
                self._seen.end()

        super().enqueue(lane, run, **keywords)

    def begin(self, lane: Lane, **keywords: Any) -> None:
        super().begin(lane, **keywords)
        self._seen.begin(lane)

    def end(self, lane: Lane, **keywords: Any) -> None:
        self._seen.end()
        super().end(lane, **keywords)
