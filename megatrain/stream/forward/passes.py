"""One pass of a micro-batch through the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.errors import ModelError
from megatrain.model.places import Place, exchange, swapped
from megatrain.model.torch_state import Autocast, RandomState
from megatrain.stream.activations.boundaries import LastCall
from megatrain.stream.forward.arrangement import Arrangement
from megatrain.stream.forward.attached import AttachedBlock, AttachedLayer
from megatrain.stream.forward.head_backward import Cut
from megatrain.stream.forward.outer_visits import OuterVisit
from megatrain.stream.forward.stream_weights import ANCHOR, HEAD_ANCHOR, stream_weights

_STAGED_BYTES = 16 << 20
"""Two million ids. Larger inputs, which are embeddings, would leave as much locked memory behind."""


class Pass:
    """One forward of the model, and its backward: holds the weights of outer blocks for it."""

    def __init__(self, arrangement: Arrangement) -> None:
        """Stream the outer blocks for the pass that comes next."""
        rounds = arrangement.rounds
        self.begin_backward = rounds.begin_backward
        self.micro_batch: int = rounds.micro_batch
        self.call = rounds.call
        """The call of a step to which its gradients belong, by its place in the round; 0: they are of a
        backward that the user has called."""
        self._adds_up = rounds.adds_up
        """The gradients of other micro-batches will be added to this one's."""
        self._passed: set[AttachedLayer] = set()
        self.last_call = LastCall()
        self._arrangement = arrangement
        self._outer = arrangement.resident_outer
        self.tensors = {block.index: self._stream_block(block, of_head=False) for block in self._outer}
        self._of_head: Mapping[int, Sequence[Tensor]] = self.tensors
        """What head and loss compute with, by block."""
        self._places: list[Place] = []
        self._own = self._fill(self.tensors)
        self._parameters: list[Any] | None = None
        self.is_in_head = False
        """The last layer is behind it."""
        self.lets_go_of_embeddings = False
        """Nobody but the first layer reads its input."""
        self._head_visit: OuterVisit | None = None
        self.until_end = ExitStack()
        """What lasts until the forward has ended."""

    def enter_head(self, output: Any, cuts: list[Cut] | None) -> Any:
        """Return the last layer's output for head and loss to go on with, which find weights of their own.

        What is registered behind the layers has all of its gradient when the head's backward has ended.

        Args:
            output: Hidden states, or a tuple that begins with them.
            cuts: The cuts of the step's call that makes the pass; None: somebody else does, and runs the
                backward.
        """
        self.is_in_head = True
        cut = Cut()
        behind = [block for block in self._outer if block.block.is_behind]
        found = dict(self.tensors)
        for block in behind:
            found[block.index] = self._stream_block(block, of_head=True)
        if cuts is not None:
            cuts.append(cut)
            hidden = output[0] if type(output) is tuple else output
            if isinstance(hidden, Tensor) and hidden.requires_grad:
                others = [block.index for block in self._outer if not block.block.is_behind]
                held = [tensor for index in others for tensor in found[index] if tensor.requires_grad]
                hidden, passed = cut.through(hidden, held)
                output = (hidden, *output[1:]) if type(output) is tuple else hidden
                handed = iter(passed)
                for index in others:
                    found[index] = [next(handed) if t.requires_grad else t for t in found[index]]
        self._of_head = found
        self._own = self._fill(found)
        if self._parameters is not None:
            exchange(self._places, self._own)
        return output

    def _fill(self, found: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
        """Return the tensors for all places of outer blocks, from those of each block."""
        own: list[Tensor] = []
        self._places = []
        for block in self._outer:
            places, tensors = block.fill(found[block.index], self.tensors)
            self._places += places
            own += tensors
        return own

    def visit_outer(self, block: AttachedBlock) -> OuterVisit:
        """Return the micro-batch's visit of an outer block that streams: one for all calls of a head."""
        if block.block.is_head and self._head_visit is not None:
            return self._head_visit
        arrangement = self._arrangement
        visit = OuterVisit(
            block,
            arrangement.executor,
            self.micro_batch,
            self.begin_backward,
            self.until_end,
            self.call,
        )
        self._head_visit = visit if block.block.is_head else None
        return visit

    def note(self, layer: AttachedLayer) -> None:
        """Take note that a layer runs, with gradients.

        Raises:
            ModelError: The layer runs again, and its gradients could not add up in a resident model's order.
        """
        if layer in self._passed and self._adds_up:
            raise ModelError(
                f"the model runs {layer.name} more than once in a forward: with several micro-batches in a "
                "step, its gradients would be rounded in another order than without streaming; use one "
                "micro-batch per step"
            )
        self._passed.add(layer)

    def put(self) -> None:
        """Let the model find the streamed tensors in place of its own parameters."""
        assert self._parameters is None
        self._parameters = exchange(self._places, self._own)

    def restore(self) -> None:
        """Give the model its parameters back, if they are not there."""
        if self._parameters is not None:
            exchange(self._places, self._parameters)
            self._parameters = None

    def __enter__(self) -> Pass:
        self.put()
        return self

    def __exit__(self, *_: object) -> None:
        self.until_end.close()
        self.restore()
        # what the head was given leads back here by ways that no garbage collector sees
        self._places, self._own, self._of_head = [], [], self.tensors

    def chunk_weights(
        self,
        *,
        is_followed: bool,
        is_plain: bool,
        around: Callable[[], AbstractContextManager[object]],
    ) -> ChunkWeights:
        """Return the weights for a head that runs in chunks; see `ChunkWeights`."""
        arrangement = self._arrangement
        heads = [b for b in arrangement.outer if b.block.is_head and b not in arrangement.resident_outer]
        visits = [(block, self.visit_outer(block)) for block in heads]
        connected = [(block, self._of_head[block.index]) for block in self._outer]
        connected += [(block, visit.connect()) for block, visit in visits]
        return ChunkWeights(
            arrangement,
            connected,
            {block.index: visit for block, visit in visits},
            self.micro_batch,
            is_followed=is_followed,
            is_plain=is_plain,
            around=around,
        )

    def _stream_block(self, block: AttachedBlock, *, of_head: bool) -> list[Tensor]:
        arrangement, micro_batch = self._arrangement, self.micro_batch
        trained, begin_backward, executor = block.trained_now(), self.begin_backward, arrangement.executor
        aliases = arrangement.slots.aliases(block.index, -1)

        def collect(grads: Sequence[Tensor | None]) -> None:
            begin_backward()
            if any(grad is not None for grad in grads):
                by_entry = block.line_up(grads, trained, self.call)
                executor.gradients.collect_resident(block.index, micro_batch, by_entry)

        return stream_weights(aliases, trained, collect, anchor=HEAD_ANCHOR if of_head else ANCHOR)


class ChunkWeights:
    """The weights of outer blocks for one micro-batch's head in chunks (`megatrain.model.head.chunks`)."""

    def __init__(
        self,
        arrangement: Arrangement,
        connected: Sequence[tuple[AttachedBlock, Sequence[Tensor]]],
        visits: Mapping[int, OuterVisit],
        micro_batch: int,
        *,
        is_followed: bool,
        is_plain: bool,
        around: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Take the weights of a pass that has come to its head.

        Args:
            arrangement: The parts that stream blocks.
            connected: The blocks, each with the tensors from which autograd goes on to its parameters.
            visits: The visits of those that stream, by block.
            micro_batch: The number of the micro-batch within the round.
            is_plain: A claim that the head's loss is that of the micro-batch, and counts as it is.
            is_followed: A claim that the backward of the head comes before anybody else's forward of it.
            around: The function that returns what to enter while chunks run.
        """
        self.is_followed = is_followed
        self.tensors = [tensor for _, held in connected for tensor in held if tensor.requires_grad]
        # not the tensors: what the graph leads to, its node must not hold
        self._blocks = [(block, [tensor.requires_grad for tensor in held]) for block, held in connected]
        self._takes_sums = {
            block.index for block, _ in connected if is_plain and block.block.is_head and block.is_plain_now
        }
        """The blocks whose gradients nobody but the head makes, and nobody wants to see by themselves."""
        self._slots = arrangement.slots
        self._rounds, self._gradients = arrangement.rounds, arrangement.gradients
        self._visits, self._micro_batch = visits, micro_batch
        self._around = around
        device = arrangement.lanes.device
        self._random, self._autocast = RandomState(device), Autocast(device)
        self._device = device

    def begin_backward(self) -> None:
        """Take note that autograd has come to the chunks: blocks that stream are there for it."""
        for visit in self._visits.values():
            visit.open_backward()

    @contextmanager
    def sums(self) -> Iterator[Sequence[Tensor | None]]:
        """Let gradients be added to sums of the step; see `HeadWeights.sums`."""
        found: list[Tensor | None] = []
        with ExitStack() as stack:
            for block, trained in self._blocks:
                if block.index not in self._takes_sums or True not in trained:
                    found += [None] * trained.count(True)
                    continue
                visit = self._visits.get(block.index)
                with self._rounds.in_head():
                    self._rounds.begin_backward()
                    adding = (
                        self._gradients.adding(block.index, self._micro_batch, None)
                        if visit is None
                        else visit.adding()
                    )
                    found += stack.enter_context(adding)
            yield found

    @contextmanager
    def leaves(self) -> Iterator[Sequence[Tensor]]:
        """Let the model find leaves in place of its weights; see `HeadWeights.leaves`."""
        found: dict[int, list[Tensor]] = {}
        for block, trained in self._blocks:
            visit = self._visits.get(block.index)
            aliases = self._slots.aliases(block.index, -1) if visit is None else visit.aliases()
            pairs = zip(aliases, trained, strict=True)
            found[block.index] = [alias.detach().requires_grad_(wants) for alias, wants in pairs]
        places: list[Place] = []
        tensors: list[Tensor] = []
        for block, _ in self._blocks:
            of_block = block.fill(found[block.index], found)
            places += of_block[0]
            tensors += of_block[1]
        with ExitStack() as stack:
            if torch._C._current_graph_task_id() != -1:
                stack.callback(RandomState(self._device).restore)
                self._random.restore()
                stack.enter_context(self._autocast.again())
            stack.enter_context(self._around())
            stack.enter_context(swapped(places, tensors))
            yield [leaf for held in found.values() for leaf in held if leaf.requires_grad]


def to_device(value: Any, device: torch.device) -> Any:
    """Move tensors in (nested) arguments to the device; for ids, labels and masks the host does not wait."""
    if isinstance(value, Tensor):
        is_there = device.type == "cpu" or value.device.type != "cpu"
        if not is_there and value.nbytes <= _STAGED_BYTES and not value.is_pinned():
            # A copy of other memory waits for all that was launched before it. Torch keeps this memory, and
            # uses it again once the copies of it are done.
            value = torch.empty_like(value, pin_memory=True).copy_(value)
        return value.to(device, non_blocking=True)
    if type(value) in (list, tuple):
        return type(value)(to_device(item, device) for item in value)
    if type(value) is dict:
        return {key: to_device(item, device) for key, item in value.items()}
    return value


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move every buffer of the model to the device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
