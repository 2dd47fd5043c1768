"""Checkpoints that several nodes write together, each its own files into one directory that all have.

The first rank of each node writes. Between two steps all ranks tell each other how far they are; when all
have written, the first one gets the entries of all files, and commits. A failure of any node ends the save of
all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.checkpoint import save
from megatrain.checkpoint.background import ChunkWriter
from megatrain.checkpoint.format import MANIFEST_NAME, FileEntry
from megatrain.checkpoint.saver import OtherWriters
from megatrain.errors import MegatrainError, OutputError, os_errors
from megatrain.files import make_private_directory, remove_tree, write_bytes_durably
from megatrain.train.resume.state import STATE_DIRECTORY
from megatrain.train.saves.contents import Contents

if TYPE_CHECKING:
    from megatrain.distributed.alone import Alone
    from megatrain.distributed.ranks import Ranks

_log = logging.getLogger(__name__)


def is_shared(root: Path, ranks: Ranks | Alone) -> bool:
    """Return whether all nodes write and see the same files in a directory of checkpoints; all ranks call it.

    The first rank makes a directory there, which a later save would remove after a crash, and the first rank
    of each other node a file in it.
    """
    made: Path | None = None
    if ranks.rank == 0:
        with suppress(OutputError):
            made = save.begin(root, 0)
    name = ranks.tell(None if made is None else made.name)
    is_there = name is not None
    if is_there and ranks.rank > 0 and ranks.local_rank == 0:
        try:
            write_bytes_durably(root / name / f"node-{ranks.node}", b"")
        except OutputError:
            is_there = False
    are_there = all(ranks.gather_values(is_there, "orders"))
    if made is not None:
        with suppress(OutputError), os_errors("read the directory", made):
            are_there = are_there and len(os.listdir(made)) == ranks.num_nodes - 1
            remove_tree(made, first=MANIFEST_NAME)
    found = bool(ranks.tell(are_there))
    if not found and ranks.rank == 0:
        _log.info(
            "the nodes do not share %s, so they stop for each save, which the first one writes; on a file "
            "system of all nodes they would go on training",
            root,
        )
    return found


class NodeSaves:
    """What a rank says and is told of such checkpoints; every rank calls what is not said to be for one."""

    def __init__(self, ranks: Ranks | Alone, writer: ChunkWriter | None) -> None:
        """Take part.

        Args:
            ranks: The ranks of all nodes.
            writer: What writes the files of this node; None: this is not its first rank.
        """
        self._ranks, self._writer = ranks, writer
        self._others = OtherWriters()
        self._is_begun = False
        """This rank writes files that have not been settled."""
        self._is_settled = True
        """All know how the files of all nodes have come out."""
        self._files: dict[str, FileEntry] | None = None
        self._failed: str | None = None
        self._is_told = False
        self.waited_s = 0.0
        """The longest time for which changes have waited on a node; the first rank knows it."""

    def for_first(self) -> OtherWriters:
        """Begin a save; return what its thread is told. The first rank calls it, and `tell_place`."""
        self._others = OtherWriters()
        self._is_told = self._is_begun = self._is_settled = False
        return self._others

    def tell_place(self, made: Path | None) -> None:
        """Tell the others the directory that was made for the files, once; the first rank calls it."""
        if self._is_told:
            return
        if made is not None:
            make_private_directory(made / STATE_DIRECTORY)
        self._is_told, self._is_begun = True, made is not None
        self._ranks.tell(None if made is None else made.name)

    def begin(self, root: Path, contents: Contents | None, order: Sequence[int]) -> OutputError | None:
        """Begin to write the files of this node; return what has kept it from that. The others call it.

        Args:
            root: The directory of checkpoints.
            contents: The contents that this node writes; None: this is not its first rank.
            order: The blocks in the order in which they will change.
        """
        if contents is not None:
            contents.take()
        name = self._ranks.tell()
        self._is_begun = self._is_settled = False
        self._files, self._failed = None, None
        if name is None or contents is None or self._writer is None:
            return None
        try:
            self._writer.begin(root / name, contents.files, order, contents.away, contents.lend)
        except OutputError as error:
            return error
        finally:
            contents.let_go()
        self._is_begun = True
        return None

    def are_settled(self) -> bool:
        """Return whether all nodes have written their files, or one has failed, and nobody writes now."""
        if not self._is_settled:
            states = self._ranks.gather_values(self._state(), "orders")
            reason = next((state for state in states if isinstance(state, str)), None)
            if reason is not None or all(states):
                self.settle(reason)
        return self._is_settled

    def wait(self) -> None:
        """Wait until it is so."""
        if self._is_settled:
            return
        if self._is_begun and self._ranks.rank == 0:
            futures.wait([self._others.own])
        elif self._is_begun:
            self._end()
        settled = self.are_settled()
        assert settled, "a node has said that it still writes"

    def settle(self, reason: str | None) -> None:
        """End what is being written.

        Args:
            reason: What has kept a node from writing; None: all files of all nodes are written.
        """
        entries: list[Any] = []
        waited_s = 0.0
        if self._is_begun and self._ranks.rank > 0 and self._writer is not None:
            if reason is not None:
                self._writer.fail(OutputError(reason))
                self._end()
            waited_s = self._writer.waited_s
            entries = [[each.name, each.num_bytes, each.digests] for each in (self._files or {}).values()]
        found = self._ranks.gather_values([waited_s, entries], "orders")
        self._is_settled = True
        if self._ranks.rank > 0 or not self._is_begun:
            self._is_begun = False
            return
        self.waited_s = max(seconds for seconds, _ in found)
        if reason is not None:
            self._stop(OutputError(reason))
        else:
            self._others.files.set_result(
                {
                    name: FileEntry(name=name, num_bytes=num_bytes, digests=tuple(digests))
                    for _, entries in found
                    for name, num_bytes, digests in entries
                }
            )
        self._is_begun = False  # only now: an error before has `give_up` end what waits for it

    def give_up(self, error: Exception) -> None:
        """End what is being written, if the others are not asked any more: this rank ends in an error."""
        if not self._is_begun:
            return
        self._is_begun, self._is_settled = False, True
        if self._ranks.rank == 0:
            self._stop(error)
        elif self._writer is not None:
            self._writer.fail(error)
            with suppress(Exception):  # that the run ends is known
                self._end()

    # -- inside ---------------------------------------------------------------------------------------------

    def _stop(self, error: Exception) -> None:
        """End the save of the first rank."""
        if not self._others.own.done() and self._writer is not None:
            self._writer.fail(error)
        self._others.files.set_exception(error)

    def _state(self) -> bool | str:
        """Return whether the files of this node are written, or why they are not."""
        if not self._is_begun:
            return True
        if self._ranks.rank == 0:
            own = self._others.own
            failed = own.exception() if own.done() else None
            return own.done() if failed is None else str(failed)
        assert self._writer is not None
        return (self._end() or True) if self._writer.is_at_rest else False

    def _end(self) -> str | None:
        """Wait until the files of this node are written; return why they are not."""
        assert self._writer is not None
        if self._files is None:
            try:
                self._files = self._writer.wait()
            except MegatrainError as error:
                self._files = {}
                self._failed = str(error)
        return self._failed
