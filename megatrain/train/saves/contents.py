"""The contents of a run's checkpoints as files that are planned once, and read block by block at each save.

The files are those of `resume.state` and `train.adapters`, byte for byte. Of several nodes each has a share
of them: whole files of weights, which every node has, and of the state what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatrain.checkpoint.background import ChunkWriter
from megatrain.checkpoint.contents import Group, LargeFile, Place
from megatrain.checkpoint.tensor_files import planned_file
from megatrain.errors import os_errors
from megatrain.files import write_bytes_durably
from megatrain.model.adapters.adapt import adapter_config, adapter_tensors
from megatrain.model.adapters.files import CONFIG_NAME, WEIGHTS_NAME
from megatrain.model.weights.export import ExportPlan
from megatrain.model.weights.shards import num_bytes
from megatrain.model.weights.skeleton import persistent_buffers
from megatrain.model.weights.untouched import UNTOUCHED
from megatrain.train.resume.state import (
    WeightReader,
    block_groups,
    lend_away,
    own_tensors,
    state_file,
    trained_blocks,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatrain.stream.engine import Engine


class Contents:
    """What a run saves: large files of its engine's state, and small files beside them."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        base: str | None,
        processor: Mapping[str, bytes],
        num_nodes: int = 1,
        node: int = 0,
    ) -> None:
        """Plan the files; no value is read.

        Args:
            engine: The engine of the model.
            tokenizer: The tokenizer.
            base: The place of the base of the run's adapters, which alone are saved then; None: the model is.
            processor: The files of the model's processor, by name.
            num_nodes: The number of nodes that write it together.
            node: The number of this one among them.
        """
        self._engine, self._tokenizer, self._base = engine, tokenizer, base
        self._processor = processor
        self._num_nodes, self._node = num_nodes, node
        self._untouched = engine.model.__dict__.get(UNTOUCHED)
        self._buffers: dict[str, Tensor] = {}
        host = engine.host
        self.away = frozenset(
            number
            for number in range(len(host.layouts))
            if host.on_drives.holds_state(number)
            or host.on_drives.holds_working(number)
            or host.on_device.holds(number)
        )
        """The blocks of which something is not in RAM: one thread reads these, before the next step."""
        self.read: set[int] = set()
        """The blocks whose state was read, or begun to be, since `take`."""
        self._reader = WeightReader(host)
        self._plan = None
        if base is None:
            self._plan = ExportPlan(engine.model, block_groups(host), untouched=self._untouched)
        self.files = [*self._dealt_out(list(self._model_files())), *self._state_files(node)]
        """The large files that this node writes."""

    def take(self) -> Callable[[Path], None]:
        """Keep what changes outside of blocks as it is now; return what writes the small files."""
        model = self._engine.model
        self._reader = WeightReader(self._engine.host)
        self.read.clear()
        if self._plan is None:
            assert self._base is not None
            small = {CONFIG_NAME: adapter_config(model, self._base)}
        else:
            buffers = persistent_buffers(model)
            self._buffers = {name: buffer.detach().cpu().clone() for name, buffer in buffers.items()}
            texts = self._plan.texts()
            small = {name: text.encode() for name, text in texts.items()} | dict(self._processor)
        return partial(self._write_small, small)

    def let_go(self) -> None:
        """Let go of what was read of the blocks that are `away`, which have all been copied."""
        self._reader = WeightReader(self._engine.host)

    def lend(self, block: int) -> None:
        """Lend a block of which other ranks lend their part, if it has not been read: all take one order."""
        if block not in self.read:
            self.read.add(block)
            lend_away(self._engine, only=block)

    def write_tokenizer(self, out: Path) -> None:
        """Write the tokenizer as it is now: evaluations and callbacks change it.

        Raises:
            OutputError: The directory cannot be written.
        """
        with os_errors("write the tokenizer to", out):
            self._tokenizer.save_pretrained(out)

    def write(self, out: Path, writer: ChunkWriter) -> None:
        """Write all files, while nothing changes the state; no lane is waited for, nor used.

        Args:
            out: The directory of the checkpoint.
            writer: A writer of these files that is not at work.

        Raises:
            OutputError: A file cannot be written.
        """
        assert not self.away, self.away
        rest = self.take()
        writer.begin(out, self.files, ())
        try:
            self.write_tokenizer(out)
            rest(out)
        except BaseException as error:
            writer.fail(error)
        writer.wait()

    def _write_small(self, small: Mapping[str, bytes], out: Path) -> None:
        for name, content in small.items():
            write_bytes_durably(out / name, content)

    # -- files ----------------------------------------------------------------------------------------------

    def _model_files(self) -> Iterator[LargeFile]:
        host = self._engine.host
        if self._plan is None:
            names = sorted(adapter_tensors(self._engine.model).items())
            entries = {key: host.places(name)[0][1] for key, name in names}
            specs = {key: (entry.dtype, tuple(entry.shape)) for key, entry in entries.items()}
            groups = {key: self._group([name], partial(self._adapter, key, name)) for key, name in names}
            yield planned_file(WEIGHTS_NAME, specs, groups)
            return
        groups = {}
        for unit, keys in zip(self._plan.units, self._plan.keys, strict=True):
            groups |= dict.fromkeys(keys, self._group(unit, partial(self._unit, unit)))
        for shard in self._plan.shards:
            header, begins = shard.layout()
            places = [
                Place(
                    key=key,
                    begin=begins[key],
                    num_bytes=num_bytes(*spec),
                    group=groups.get(key) or Group(blocks=frozenset(), read=partial(self._other, key)),
                )
                for key, spec in shard.tensors.items()
            ]
            yield LargeFile(shard.name, header, places)

    def _dealt_out(self, files: Sequence[LargeFile]) -> list[LargeFile]:
        """Return which files of weights this node writes: each goes to the one that writes least so far.

        Those with buffers, of which every rank has its own, are written by the first node.
        """
        if self._num_nodes == 1:
            return list(files)
        written = [sum(file.num_bytes for file in self._state_files(node)) for node in range(self._num_nodes)]
        own = []
        for file in files:
            of_first = any(not place.group.blocks for place in file.places)
            to = 0 if of_first else written.index(min(written))
            written[to] += file.num_bytes
            if to == self._node:
                own.append(file)
        return own

    def _state_files(self, node: int) -> Iterator[LargeFile]:
        host = self._engine.host
        for number in trained_blocks(host):
            block = host.blocks[number]
            if host.on_drives.holds_state(number):
                nbytes = host.on_drives.images[number].whole.num_bytes
                block = host.view(number, torch.empty(nbytes, dtype=torch.uint8, device="meta"))
            tensors = own_tensors(host, number, block, node)
            specs = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
            group = Group(blocks=frozenset([number]), read=partial(self._state, number))
            if specs:
                name = state_file(number, None if self._num_nodes == 1 else node)
                yield planned_file(name, specs, dict.fromkeys(specs, group))

    # -- values ---------------------------------------------------------------------------------------------

    def _group(
        self, names: Iterable[str], read: Callable[[], AbstractContextManager[Mapping[str, Tensor]]]
    ) -> Group:
        host = self._engine.host
        blocks = frozenset(block for name in names if host.has(name) for block, _ in host.places(name))
        return Group(blocks=blocks, read=read)

    def _weight(self, name: str) -> Tensor:
        host = self._engine.host
        numbers = [number for number, _ in host.places(name)]
        if self.away.isdisjoint(numbers):
            return WeightReader(host).read(name)
        return self._reader.read(name)  # one thread reads all that is away, block by block

    @contextmanager
    def _unit(self, unit: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        assert self._plan is not None
        yield self._plan.make(unit, self._weight, self._buffers)

    @contextmanager
    def _adapter(self, key: str, name: str) -> Iterator[Mapping[str, Tensor]]:
        yield {key: self._weight(name)}

    @contextmanager
    def _other(self, key: str) -> Iterator[Mapping[str, Tensor]]:
        assert self._untouched is not None
        yield {key: self._untouched.value(key)}

    @contextmanager
    def _state(self, number: int) -> Iterator[Mapping[str, Tensor]]:
        self.read.add(number)
        host = self._engine.host
        with host.borrow(number, own=True) as block:
            yield own_tensors(host, number, block)
