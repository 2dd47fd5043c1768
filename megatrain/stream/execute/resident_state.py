"""Resident layers whose whole state is on the device: weights, remainder and moments, updated there.

Their planes on the host are the home: they are copied to the device when they have changed there, and back
when the host state is asked for. Between, nothing of these layers crosses the link.

Of blocks that `HostState.on_device` names, the device is the home from the moment at which there is an
optimizer. Their planes on the host have addresses and no memory, but for one block at a time while somebody
reads or writes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from megatrain.errors import CapacityError
from megatrain.hardware import GIB, host_memory
from megatrain.layout import pools
from megatrain.layout.ownership import Share
from megatrain.optim.updates import fuses_updates
from megatrain.plan.program.features.resident import Push, pull
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Operation, Work
from megatrain.store.block_state import part_of_plane
from megatrain.store.ranks import StateRanks, on_each
from megatrain.store.state import HostState
from megatrain.stream.execute.slots import Slots
from megatrain.stream.lanes import Lanes


class DeviceStates:
    """The device's copies of some blocks' planes."""

    def __init__(
        self,
        lanes: Lanes,
        host: HostState,
        slots: Slots,
        blocks: Iterable[int],
        shares: Sequence[Share],
        ranks: StateRanks,
    ) -> None:
        """Keep `blocks` on the device; their weights are in `slots`, the rest comes with `allocate`.

        Args:
            lanes: The lanes in which things run.
            host: The model's state.
            slots: The slots with the weights, which are whole.
            blocks: The numbers of the blocks that are resident.
            shares: The share of each block's state that this rank keeps, and updates.
            ranks: The ranks that keep shares.
        """
        self._lanes = lanes
        self._host = host
        self._slots = slots
        self._shares, self._ranks = shares, ranks
        self.blocks = frozenset(blocks)
        self._flat: dict[int, Tensor] = {}
        self._planes: dict[int, dict[str, Tensor]] = {}
        """By block, views of its flat memory."""
        self._stale = set(self.blocks)
        self._newer: set[int] = set()
        self._only_here: set[int] = set()
        """Blocks whose state is on the device and nowhere else, by now."""

    def allocate(self) -> None:
        """Make room for the optimizer's planes.

        Raises:
            CapacityError: The device does not hold them.
        """
        if self.blocks:
            fuses_updates(
                self._host.optimizer, self._lanes.device
            )  # tried while nothing runs; a lane would wait for compute
        failed: BaseException | None = None
        try:
            self._allocate()
        except BaseException as error:
            failed = error
        if self._host.on_device.blocks and any(on_each(self._ranks, failed is not None)):
            failed = failed or CapacityError("device memory: another rank's device does not hold its state")
        if failed is not None:
            raise failed
        for block in sorted(self.blocks & self._host.on_device.blocks - self._only_here):
            self._host.on_device.home = self
            self.take(block, self._names(block))
            self._stale.discard(block)
            self._only_here.add(block)
            self._ranks.meet()  # all have taken it
            if self._ranks.local_rank == 0:
                self._host.planes.give_back(block, self._names(block))
        if self._only_here:
            self._ranks.meet()  # nobody writes there before that

    def _allocate(self) -> None:
        for block in sorted(self.blocks - self._planes.keys()):
            layout, planes, start = self._host.layouts[block], {}, 0
            nbytes = pools.resident_state(layout.sizes, self._host.optimizer, self._ranks.size)
            self._flat[block] = self._lanes.allocate(nbytes)
            for name, parts in self._at_home(block).items():
                nbytes = sum(part.nbytes for part in parts)
                planes[name] = self._flat[block][start : start + nbytes].view(parts[0].dtype)
                start += nbytes
            self._planes[block] = planes
            self._stale.add(block)

    def bring_home(self, *, optimizer: bool = True) -> None:
        """Copy what is on the device alone to its place in RAM, which is the home again.

        All ranks call it, and each copies its share.

        Args:
            optimizer: Whether the optimizer's planes are wanted too.

        Raises:
            CapacityError: RAM does not hold it; nothing was changed.
        """
        asked = {"remainder", *(self._host.optimizer.planes if optimizer else ())}
        asked |= {"working"} if self._ranks.local_rank == 0 else set()
        wanted = {
            block: [name for name in self._names(block) if name in asked] for block in sorted(self._only_here)
        }
        if not wanted:
            return
        need, room = self._need_and_room(sum(self._nbytes(block, planes) for block, planes in wanted.items()))
        if need > room:
            raise CapacityError(
                f"host memory: the state of {len(wanted)} blocks is on the device alone, and takes "
                f"{need / GIB:.2f} GiB in RAM, of which {room / GIB:.2f} GiB are left; save a checkpoint, "
                "and start again from there"
            )
        for block, planes in wanted.items():
            self.bring(block, planes)
        self._ranks.meet()
        self._stale |= self._only_here
        self._only_here.clear()
        self._host.on_device.home = None

    def _need_and_room(self, nbytes: int) -> tuple[int, int]:
        """Return what the ranks of a node want of its RAM together, and what is left, where least is."""
        needs = torch.stack(self._ranks.gather(torch.tensor(nbytes))).view(-1, self._ranks.local_size).sum(1)
        available = torch.stack(self._ranks.gather(torch.tensor(host_memory().available_bytes)))
        rooms = available.view(-1, self._ranks.local_size).min(1).values
        worst = int((needs - rooms).argmax())
        return int(needs[worst]), int(rooms[worst])

    def release(self) -> None:
        """Give the device memory back; what is newer there must have been pushed."""
        assert not self._newer, f"blocks {sorted(self._newer)} are newer on the device"
        assert not self._only_here, f"blocks {sorted(self._only_here)} are on the device alone"
        self._lanes.free(self._flat.values())
        self._flat.clear()
        self._planes.clear()

    def planes(self, block: int) -> dict[str, Tensor]:
        """Return the working bytes and the optimizer's planes of a block, or of a share, on the device."""
        return {**self._planes[block], "working": self._slots.place(block, -1)}

    def forget(self) -> None:
        """Take note that the host's planes were written: they are the newer ones, where there are any."""
        self._stale = set(self.blocks) - self._only_here
        self._newer.clear()

    def doubt(self) -> None:
        """Take note that a copy to the device may have failed: what is not newer there is copied again."""
        self._stale = set(self.blocks) - self._newer - self._only_here

    def pulls(self) -> list[Operation]:
        """List the copies to the device of what the host has changed; they are to be run."""
        stale, self._stale = sorted(self._stale), set()
        return [
            pull(block, self._nbytes(block) + self._host.layouts[block].sizes.codes_bytes) for block in stale
        ]

    @property
    def has_newer(self) -> bool:
        """Whether the device has state that its home in RAM has not."""
        return bool(self._newer)

    def take_newer(self) -> list[int]:
        """Return the blocks that an update has changed on the device; they are to be copied home."""
        newer, self._newer = sorted(self._newer), set()
        return newer

    def settle_update(self, block: int) -> None:
        """Note that an update makes the device's planes the newer ones, where there are others."""
        if block not in self._only_here:
            self._newer.add(block)

    def holds(self, block: int) -> bool:
        """Whether a block's state is on the device, and nowhere else."""
        return block in self._only_here

    def bring(self, block: int, planes: Collection[str]) -> None:
        """Copy some planes of a block to their places in RAM, once its updates are done, and wait for it."""
        pairs = [(device, host) for host, device in self._pairs(block, planes=planes)]
        self._run(Push(block=block, nbytes=self._nbytes(block, planes), is_lent=True), pairs)

    def take(self, block: int, planes: Collection[str]) -> None:
        """Copy some planes of a block from their places in RAM, and wait for it."""
        nbytes, pairs = self._nbytes(block, planes), self._pairs(block, planes=planes)
        self._run(pull(block, nbytes, is_lent=True), pairs)

    def read_working(self, block: int) -> Tensor:
        """Return a copy of a block's working bytes, (working_bytes,), once its updates are done."""
        place = self._slots.place(block, -1)
        found = torch.empty_like(place, device="cpu")
        self._run(Push(block=block, nbytes=place.nbytes, is_lent=True), [(place, found)])
        return found

    def _run(self, operation: Operation, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        reads, writes = operation.touched()
        work, nbytes = partial(self._copy, pairs), operation.nbytes
        self._lanes.enqueue(operation.lane, work, reads=reads, writes=writes, work=nbytes, label=operation)
        with self._lanes.using(Lane.CALLER, reads=writes):
            pass

    def pull(self, block: int) -> Work:
        """Return the copy of a block's state to the device: its weights, of which every rank takes all."""
        return partial(self._pull, block, self._pairs(block))

    def _pull(self, block: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._copy(pairs)
        state = self._host.blocks[block]
        if state.layout.encoded:
            self._slots.codes.bring(block, self._slots.place(block, -1), state.codes)

    def push(self, block: int) -> Work:
        """Return the copy of a block's state home, of several ranks of this one's share."""
        return partial(self._copy, [(device, host) for host, device in self._pairs(block, of_share=True)])

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for source, target in pairs:
            self._lanes.copy(target, source)

    def _pairs(
        self, block: int, *, of_share: bool = False, planes: Collection[str] | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Pair the planes on the host with those on the device; only weights before there is an optimizer.

        Encoded weights are in none: they never change, and come as codes.

        Args:
            block: The number of the block.
            of_share: Whether weights are this rank's share alone.
            planes: The names of those that are wanted; None: all.
        """
        edge = self._host.layouts[block].plain_bytes
        working, place = self._host.blocks[block].working[:edge], self._slots.place(block, -1)[:edge]
        pairs = [(working, place)] if planes is None or "working" in planes else []
        if of_share and self._ranks.size > 1:
            layout = self._host.layouts[block]
            own = [layout.working_range(part) for part in self._shares[block].ranges]
            pairs = [(working[part], place[part]) for part in own]
        for name, plane in self._planes.get(block, {}).items():
            if planes is not None and name not in planes:
                continue
            parts = self._at_home(block)[name]
            pairs += zip(parts, plane.split([len(part) for part in parts]), strict=True)
        return [pair for pair in pairs if pair[0].numel()]

    def _at_home(self, block: int) -> dict[str, list[Tensor]]:
        """View what this rank keeps of a block's planes on the host, in parts."""
        state = self._host.blocks[block]
        return {
            name: part_of_plane(state.layout, name, plane, self._shares[block])
            for name, plane in state.planes.items()
        }

    def _names(self, block: int) -> list[str]:
        """Return the names of a block's planes of state."""
        return ["working", *self._host.blocks[block].planes]

    def _nbytes(self, block: int, planes: Collection[str] | None = None) -> int:
        return sum(host.nbytes for host, _ in self._pairs(block, planes=planes))
