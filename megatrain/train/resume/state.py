"""The contents of a run's checkpoint, written and read back bit for bit.

The directory is a Hugging Face model (working weights, config, tokenizer) with the rest of the state beside
it: `state/block-NNNNN.safetensors` holds remainders and moments (and their scales, where `optim.state` has
any) under `plane/parameter`, each in the type that it has in memory, and the manifest's meta holds the
counters, the schedule, the data position and the random generators. Where each of several nodes has written
what it keeps, the files of node N are `state/block-NNNNN-node-N.safetensors`, and a tensor that is cut among
them is in several, as `plane/parameter{first:stop}`: these elements of it, flat.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.checkpoint.reader import BUFFERS_BYTES, CheckpointReader, Piece
from megatrain.checkpoint.tensor_files import TensorSource, write_safetensors
from megatrain.config.optimizers.optimizer import SCALE_NUMEL
from megatrain.errors import CheckpointError, os_errors
from megatrain.files import make_private_directory, matching_names, remove_tree, write_bytes_durably
from megatrain.layout.blocks import span_name, split_part_name, split_span_name
from megatrain.layout.tensor_file import TensorPlace
from megatrain.model.weights.export import export_weights
from megatrain.model.weights.untouched import UNTOUCHED
from megatrain.store.block_state import BlockState, view_entry
from megatrain.store.state import HostState

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from megatrain.stream.engine import Engine

STATE_DIRECTORY = "state"
_STATE_FILES = "block-*.safetensors"


class WeightReader:
    """Reads working weights by name, those of the same block in a row with one read of that block."""

    def __init__(self, host: HostState) -> None:
        """Read from a state."""
        self._host = host
        self._last: tuple[int, Tensor] | None = None

    def read(self, name: str) -> Tensor:
        """Return a weight, which is to be used at once."""
        parts = []
        for number, entry in self._host.places(name):
            if self._last is None or self._last[0] != number:  # its weights may be on a drive
                self._last = number, self._host.weights.read(number)
            parts.append(view_entry(self._last[1], entry))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def block_groups(host: HostState) -> list[list[str]]:
    """List the names of parameters by block, each where its first rows are."""
    return [
        [entry.name for entry in layout.entries if entry.rows is None or entry.rows.start == 0]
        for layout in host.layouts
    ]


def write_model(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    *,
    processor: Mapping[str, bytes] | None = None,
) -> None:
    """Write the working weights as a Hugging Face model directory, block by block, with its tokenizer.

    Args:
        engine: The engine of the model.
        tokenizer: The tokenizer.
        out: A directory without a model.
        processor: The files that `read_processor` has read, which are written as they are.

    Raises:
        OutputError: The directory cannot be written.
    """
    engine.settle()
    model: PreTrainedModel = engine.model
    host = engine.host
    export_weights(
        model,
        out,
        groups=block_groups(host),
        read=WeightReader(host).read,
        untouched=model.__dict__.get(UNTOUCHED),
    )
    with os_errors("write the tokenizer to", out):
        tokenizer.save_pretrained(out)
    for name, content in (processor or {}).items():
        write_bytes_durably(out / name, content)


def write_state(engine: Engine, out: Path, read: set[int] | None = None) -> None:
    """Write remainders and moments, one file per block with trained parameters.

    Args:
        engine: The engine of the model.
        out: The directory of the checkpoint.
        read: Gets the number of each block that is read, or begun to be: others lend their part of these.

    Raises:
        OutputError: A file cannot be written.
    """
    engine.settle()
    make_private_directory(out / STATE_DIRECTORY)
    for number in trained_blocks(engine.host):
        if read is not None:
            read.add(number)
        with engine.host.borrow(number) as block:
            sources = [
                TensorSource(
                    name=name,
                    dtype=tensor.dtype,
                    shape=tuple(tensor.shape),
                    get=lambda tensor=tensor: tensor,  # type: ignore[misc]
                )
                for name, tensor in block.optimizer_tensors().items()
            ]
            if sources:
                write_safetensors(out / state_file(number), sources)


def lend_state(engine: Engine, but: Collection[int] = ()) -> None:
    """Lend the state of this rank and its node to the first rank of all, which calls `write_state`.

    That one calls this too if its write has failed, for the blocks `but` those that it has read.
    """
    engine.settle()
    for number in trained_blocks(engine.host):
        if number not in but:
            with engine.host.borrow(number):
                pass


def lend_away(engine: Engine, but: Collection[int] = (), only: int | None = None) -> None:
    """Lend the state that is on this rank's device alone to the first rank of its node, which reads it.

    All ranks do so, block by block. Those that read call this too, for what they do not read.

    Args:
        engine: The engine of the model.
        but: The blocks that this rank has read.
        only: The one block to lend; None: all others.
    """
    for number in trained_blocks(engine.host) if only is None else {only} & {*trained_blocks(engine.host)}:
        if engine.host.on_device.holds(number) and number not in but:
            with engine.host.borrow(number, own=True):
                pass


def own_tensors(
    host: HostState, number: int, block: BlockState, node: int | None = None
) -> dict[str, Tensor]:
    """View what a node keeps of `BlockState.optimizer_tensors` of a block, under the names in its file.

    Args:
        host: The state.
        number: The number of the block.
        block: The block.
        node: The number of the node; None: this one.

    Returns:
        The tensors, in their shape or flat where they are cut.
    """
    entries = {entry.key: entry for entry in block.layout.trained}
    kept = host.parts.elements(number, block, node)
    found = {}
    for key, tensor in block.optimizer_tensors().items():
        entry, own = entries[key.partition("/")[2]], kept[key]
        if len(own) == tensor.numel():
            found[key] = tensor
        elif own:
            first = _elements(tensor.numel(), entry.rows, math.prod(entry.shape[1:])).start
            elements = range(first + own.start, first + own.stop)
            name = span_name(key.removesuffix(entry.key) + entry.name, elements)
            found[name] = tensor.view(-1)[own.start : own.stop]
    return found


def trained_blocks(host: HostState) -> list[int]:
    """List the blocks with trained parameters."""
    return [number for number, layout in enumerate(host.layouts) if layout.num_state]


def has_state(source: Path) -> bool:
    """Return whether a directory holds what `write_state` writes."""
    return (source / STATE_DIRECTORY).is_dir()


def remove_state(source: Path) -> None:
    """Remove from a directory what `write_state` has written there, if anything."""
    if has_state(source):
        remove_tree(source / STATE_DIRECTORY, first="block-00000.safetensors")


def is_loaded(name: str) -> bool:
    """Return whether a file of a checkpoint is one of the large ones: state, and weights of a model."""
    return fnmatch.fnmatchcase(name, "model*.safetensors") or _is_state(name)


def _is_state(name: str) -> bool:
    """Return whether a file of a checkpoint is one of those that `read_state` reads."""
    return fnmatch.fnmatchcase(name, f"{STATE_DIRECTORY}/{_STATE_FILES}")


def read_state(
    host: HostState, source: Path, *, reads: bool = True, reader: CheckpointReader | None = None
) -> None:
    """Read remainders and moments back into their planes; all ranks call it.

    Args:
        host: The state.
        source: The directory of the checkpoint.
        reads: Whether this rank is the first of its node, which reads for all of them.
        reader: The reader of the checkpoint, which compares what it reads; None: it was compared before, or
            has nothing to compare it with.

    Raises:
        DamagedError: What is read is not what the manifest says; the state is not whole.
        CheckpointError: A tensor is missing, or is not of this model and precision.
    """
    if not reads:
        for number in trained_blocks(host):
            host.follow(number)
        return
    reader = CheckpointReader(source) if reader is None else reader
    where: dict[str, list[_Part]] = {}
    directory = source / STATE_DIRECTORY
    with os_errors("read", directory):
        names = matching_names(directory, [_STATE_FILES])
    for file in (f"{STATE_DIRECTORY}/{name}" for name in names):
        for key, place in reader.places(file).items():  # a run with other fragments has other files
            name, elements = split_span_name(key)
            name, rows = split_part_name(name) if elements is None else (name, None)
            where.setdefault(name, []).append(_Part(file, place, rows, elements))
    in_ram = [number for number in trained_blocks(host) if _is_in_ram(host, number)]
    others = ([number] for number in trained_blocks(host) if number not in in_ram)
    for numbers in (in_ram, *others):  # what is brought to be written takes memory, so that comes one by one
        with ExitStack() as lent:
            pieces: list[Piece] = []
            for number in numbers:
                block = lent.enter_context(host.borrow(number, writes=True))
                pieces += _pieces(block, host.parts.elements(number, block), source, where)
            reader.copy(pieces, room=min(BUFFERS_BYTES, host.bytes_left // 2))  # of what the plan leaves


def _is_in_ram(host: HostState, number: int) -> bool:
    """Return whether what this node keeps of a block's planes is lent where it is."""
    return not (host.on_drives.holds_state(number) or host.on_device.holds(number))


@dataclass(frozen=True, slots=True)
class _Part:
    """A saved tensor: what is kept in a plane of a parameter, or of some of its rows, or of its elements."""

    file: str
    place: TensorPlace
    rows: range | None
    elements: range | None


def _pieces(
    block: BlockState, kept: Mapping[str, range], source: Path, where: Mapping[str, Sequence[_Part]]
) -> Iterator[Piece]:
    """Yield what is read into the planes of a block, after the check that all of it is there.

    Of each tensor that are the elements that are `kept` on this node.
    """
    row_numel = {entry.key: math.prod(entry.shape[1:]) for entry in block.layout.trained}
    found: list[Piece] = []
    for key, tensor in block.optimizer_tensors().items():
        spans = []
        for part in where.get(split_part_name(key)[0], ()):
            span, piece = _piece(source, key, tensor, kept[key], part, row_numel[key.partition("/")[2]])
            if span:
                spans.append(span)
                found.append(piece)
        spans.sort(key=attrgetter("start"))
        is_one = all(first.stop == then.start for first, then in pairwise(spans))
        if not is_one or sum(map(len, spans)) != len(kept[key]):
            raise CheckpointError(
                f"{source} does not have each element of {key} once: it is of another model, train.precision "
                "or optim.state"
            )
    yield from found


def _piece(
    source: Path, key: str, tensor: Tensor, kept: range, part: _Part, row_numel: int
) -> tuple[range, Piece]:
    """Return which of the elements of a wanted tensor that are kept a saved one has, and where.

    A row of the parameter has `row_numel` elements.
    """
    _, rows = split_part_name(key)
    saved, dtype = part.place, getattr(torch, part.place.dtype)
    shape = tuple(tensor.shape)
    if part.elements is not None:
        is_like = saved.shape == (part.elements.stop - part.elements.start,)
    else:
        is_like = saved.shape == shape if part.rows == rows else saved.shape[1:] == shape[1:]
    if not is_like or dtype != tensor.dtype:
        raise CheckpointError(
            f"{source}: {key} is {saved.shape} {dtype}, but the model needs {shape} {tensor.dtype}"
        )
    there = part.elements or _elements(math.prod(saved.shape), part.rows, row_numel)
    here = _elements(tensor.numel(), rows, row_numel)
    start = max(there.start, here.start + kept.start)
    stop = max(start, min(there.stop, here.start + kept.stop))
    target: Any = tensor.view(-1)[start - here.start : stop - here.start].view(torch.uint8).numpy()
    return range(start, stop), Piece(part.file, saved.begin + (start - there.start) * dtype.itemsize, target)


def _elements(numel: int, rows: range | None, row_numel: int) -> range:
    """Return which elements of a whole plane a tensor has that is of some rows of the parameter."""
    if rows is None:
        return range(numel)
    per_element = 1 if numel == len(rows) * row_numel else SCALE_NUMEL
    start = rows.start * row_numel // per_element  # parts begin where scales do
    return range(start, start + numel)


def compact_counts(counts: Mapping[str, int]) -> int | dict[str, int]:
    """Return the updates per parameter as one number where, as nearly always, they agree."""
    values = set(counts.values())
    return values.pop() if len(values) == 1 else dict(counts)


def expand_counts(saved: int | Mapping[str, int], names: Mapping[str, Any]) -> dict[str, int]:
    """Undo `compact_counts`."""
    if isinstance(saved, int):
        return dict.fromkeys(names, saved)
    return {name: int(saved[name]) for name in names}


def state_file(number: int, node: int | None = None) -> str:
    """Return the name of the file of a block's state in a checkpoint, or of what one of several nodes has."""
    of = "" if node is None else f"-node-{node}"
    return f"{STATE_DIRECTORY}/block-{number:05d}{of}.safetensors"
