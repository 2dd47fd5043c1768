"""Runs a whole model on fake tensors with its layers left out: what is outside of them, and what they get."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from transformers.utils import ModelOutput

from megatrain.config.policies import KEEP
from megatrain.model.documents.begins import Packed, documents, documents_known, is_ours, told_of_equal
from megatrain.model.head.decoded import Decoded
from megatrain.model.head.decoder import decoder_of
from megatrain.model.head.head import Head
from megatrain.model.head.linear import LinearHead
from megatrain.model.profile.cost import Cost
from megatrain.model.profile.metering import Meter
from megatrain.model.profile.rows import most
from megatrain.model.profile.tracing import FakeBlock, LayerCall, Trace
from megatrain.model.shares import Share

if TYPE_CHECKING:
    from collections.abc import Hashable

    from transformers import PreTrainedModel

Traces: TypeAlias = Mapping[str, Trace]
"""A layer's traces by policy."""

NOT_COUNTED = ("calls", "others")
"""Fields of a pass and of a trace that hold no numbers."""

CHUNKS = 3
"""Chunks of the head that are run: one more changes nothing but the number of losses."""

_INDEX_NAMES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "block_index"})


@dataclass(slots=True)
class WholePass:
    """The memory of one micro-batch outside the layers, in bytes alive at a time, weights left out."""

    kinds: list[int] = field(default_factory=list)
    """Number of each layer's kind, in forward order; those that rows of text do not pass are left out."""
    calls: list[LayerCall] = field(default_factory=list)
    """One call per kind."""
    traces: list[Traces] = field(default_factory=list)
    """The traces that each call gave."""
    forward_bytes: Any = 0
    """Bytes that the model's forward holds while layers run: rotary tables, masks."""
    graph_bytes: int = 0
    """The part of these that layers are given, which the graph holds until the backward ends."""
    holds_embedding: bool = False
    head_forward: Cost = field(default_factory=Cost)
    head_backward: Cost = field(default_factory=Cost)
    """All that makes gradients of head and loss, wherever it runs."""
    norm_forward_peak_bytes: int = 0
    head_forward_peak_bytes: int = 0
    head_backward_peak_bytes: int = 0
    head_saved_bytes: int = 0
    head_gradient_bytes: int = 0
    embedding_peak_bytes: int = 0
    head_has_kernel: bool = False
    head_dim: int = 0
    num_heads: int = 0


class _Stub(torch.autograd.Function):
    """Stands for a layer: new hidden states out, a new gradient back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, begin: Any, end: Any) -> Tensor:
        ctx.begin, ctx.end = begin, end
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.begin is not None:
            ctx.begin(grad)
        found = torch.empty_like(grad)
        if ctx.end is not None:
            ctx.end()
        return found, None, None


class _ChunkWeights:
    """The outer blocks' weights, for a head in chunks."""

    def __init__(
        self,
        outer: Sequence[FakeBlock],
        tensors: Sequence[Tensor],
        note: Callable[[], Callable[[], None]],
        meter: Meter,
        *,
        is_followed: bool,
        is_plain: bool,
    ) -> None:
        self._outer = outer
        self._meter, self._is_plain = meter, is_plain
        self.tensors = tensors
        self._note = note
        self.is_followed = is_followed

    def begin_backward(self) -> None:
        """The weights are there all the time."""

    @contextmanager
    def sums(self) -> Iterator[Sequence[Tensor | None]]:
        """Return sums that are a part of what the step holds anyway."""
        found: list[Tensor | None] = []
        for block in self._outer:
            shapes = [weight.shape for weight in block.weights if weight.requires_grad]
            with self._meter.pausing():
                found += [
                    torch.zeros(shape) if self._is_plain and block.is_head else None for shape in shapes
                ]
        yield found

    @contextmanager
    def leaves(self) -> Iterator[Sequence[Tensor]]:
        """Let the modules find new leaves."""
        end = self._note()
        found = []
        for block in self._outer:
            weights = block.weights
            block.put(weights)
            found += [weight for weight in weights if weight.requires_grad]
        yield found
        end()


class _MeteredHead(LinearHead):
    """A linear head that takes note of what its forwards cost, and what its kernel would spare."""

    def __init__(self, head: LinearHead, meter: Meter) -> None:
        super().__init__(head.linear, head.form)
        self._meter = meter
        self._since = self._forwards = self._spared = Cost()

    def take(self) -> tuple[Cost, Cost]:
        """Return both since the last call."""
        found = self._forwards, self._spared
        self._forwards = self._spared = Cost()
        return found

    def loss(self, *args: Any) -> Tensor:
        """Compute the loss of a chunk, all of which is a forward."""
        self._since = self._meter.cost
        return super().loss(*args)

    def gradients(self, *args: Any) -> tuple[Tensor, Tensor]:
        """Compute loss and gradients of a chunk, a forward until the logits are gradients."""
        self._since = self._meter.cost
        return super().gradients(*args)

    def enter_gradients(self, logits: Tensor, targets: Tensor, factor: Tensor) -> Tensor:
        """Write the gradients; the kernel reads each logit twice, and writes each gradient."""
        meter = self._meter
        before = meter.cost
        losses = super().enter_gradients(logits, targets, factor)
        kernel = Cost(moved_bytes=3.0 * meter.rows.of(logits.nbytes), num_operations=1)
        self._spared += (meter.cost - before) - kernel
        self._forwards += meter.cost - self._since
        return losses


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadPass:
    """The way in which the head computes the loss of a pass."""

    is_followed: bool
    """The backward of the head follows its forward; see `megatrain.model.head.chunks`."""
    is_plain: bool
    """The loss counts as it is."""
    is_fused: bool
    """Chunks go through `LinearHead` where they can."""


class _FewChunks(Head):
    """A head that passes no more chunks than it takes to know the cost of one."""

    def _chunked(self, call: Decoded, targets: Tensor) -> ModelOutput:
        """Pass the first tokens; a loss that is computed whole passes all of them."""
        return super()._chunked(call, targets.reshape(1, -1)[:, : self.most_tokens])

    @property
    def most_tokens(self) -> int:
        """Return how many tokens pass at most."""
        return CHUNKS * self.chunk_tokens


class WholePassTracer:
    """Runs the model's own forward and backward once."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[nn.Module],
        outer: Sequence[FakeBlock],
        meter: Meter,
        head_chunk_tokens: int | None,
        trace: Callable[[LayerCall], Traces],
        head: HeadPass,
    ) -> None:
        """Prepare a pass.

        Args:
            model: The CausalLM.
            layers: Its decoder layers that rows of text pass.
            outer: The blocks in no layer.
            meter: The meter, under which all runs.
            head_chunk_tokens: The number of tokens in a chunk of the head, as in `attach`.
            trace: The function that is called once for every kind of layer, in the middle of the forward.
            head: The way in which the head computes the loss.
        """
        self._model = model
        self._layers = layers
        self._outer = outer
        self._meter = meter
        self._chunk_tokens = head_chunk_tokens
        self._trace = trace
        self._kinds: dict[Hashable, int] = {}
        self._embedded: StorageWeakRef | None = None
        self._embedded_bytes: Any = 0
        self._streamed: dict[int, list[Tensor]] = {}
        """The weights of each block that want a gradient."""
        self._head_pass = head
        self._linear: _MeteredHead | None = None
        self._chunks, self._chunk_forwards = Cost(), Cost()
        """What all chunks have cost so far, and their forwards alone."""
        self._head_start = Cost()
        self._head_back = Cost(), Cost(), Cost(), Cost()
        self._is_behind_decoder = False
        self.result = WholePass()

    def run(
        self,
        micro_batch_size: int,
        seq_len: int,
        *,
        is_packed: bool = False,
        document_len: int | None = None,
        shares: bool = False,
    ) -> WholePass:
        """Pass a micro-batch of full rows, of one document each or packed; `shares`: of parts of rows."""
        meter, result = self._meter, self.result
        head = _FewChunks(
            self._model, self._chunk_tokens, self._chunk_weights, is_fused=self._head_pass.is_fused
        )
        if head.linear is not None:
            head.linear = self._linear = _MeteredHead(head.linear, meter)
        head._adds_up = True
        num_tokens = micro_batch_size * seq_len
        num_labels = min(num_tokens, head.most_tokens)
        with meter.pausing():
            ids = torch.zeros((micro_batch_size, seq_len), dtype=torch.int64)
            batch = {"input_ids": ids, "labels": ids, "return_dict": True}
            if is_packed or shares:
                # no mask is made of them beside a cache, so `ModelForward` gives none
                batch |= {"position_ids": torch.zeros_like(ids), "use_cache": False}
            if is_packed and is_ours(self._model.config):
                batch |= told_of_equal(num_tokens, document_len or seq_len)
        positions = None
        if is_packed and document_len is not None and not shares:
            positions = np.tile(np.arange(seq_len) % document_len, (micro_batch_size, 1))
        meter.settle()
        self._stream_block()
        with (
            documents_known(),
            documents(Packed(is_packed=is_packed, positions=positions)),  # fake positions say nothing
            self._stubs(),
            self._end_of_decoder(),
            head.over(share := Share(num_tokens, num_tokens)),
        ):
            inner = type(self._model).forward.__get__(self._model)
            chunked = head.in_chunks((), batch)
            output = inner(**batch) if chunked is None else head.call(partial(self._inner, inner), chunked)
            loss = share.scaled(output.loss)
        result.head_has_kernel = head.chunked_tokens > 0 and head.linear is not None
        self._note_forward_peak()
        share_of_chunks = meter.rows.of(num_tokens) / num_labels
        whole, chunks, forwards, spared = self._take_head_cost()
        result.head_forward = self._joined(
            whole - chunks + forwards.scaled(share_of_chunks), spared.scaled(share_of_chunks)
        )
        made = (chunks - forwards).scaled(share_of_chunks)
        head.remove()
        del output
        result.graph_bytes = self._graph_bytes()
        result.head_saved_bytes = meter.settle() - result.graph_bytes
        self._head_start = meter.cost
        loss.backward()
        whole, chunks, _, spared = self._head_back
        result.head_backward = self._joined(
            made + (whole - chunks) + chunks.scaled(share_of_chunks), spared.scaled(share_of_chunks)
        )
        held = result.graph_bytes + result.head_gradient_bytes
        result.embedding_peak_bytes = most(0, meter.peak_bytes - held)
        result.head_dim, result.num_heads = meter.head_dim, meter.num_heads
        return result

    def _stream_block(self, *, is_behind: bool = False) -> None:
        """Let the modules outside all layers, or those behind them, find new weights, as a pass does."""
        for block in self._outer:
            if block.is_behind or not is_behind:
                brought = block.stream_weights(lambda _: None)
                self._streamed[id(block)] = [tensor for tensor in brought if tensor.requires_grad]

    def _chunk_weights(self) -> _ChunkWeights:
        tensors = [tensor for block in self._outer for tensor in self._streamed[id(block)]]
        return _ChunkWeights(
            self._outer,
            tensors,
            self._note_chunks,
            self._meter,
            is_followed=self._head_pass.is_followed,
            is_plain=self._head_pass.is_plain,
        )

    def _note_chunks(self) -> Callable[[], None]:
        """Take note that chunks run; return what takes note of their end."""
        before = self._meter.cost

        def end() -> None:
            self._chunks += self._meter.cost - before

        return end

    def _inner(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward on a chunk of the head, or until it has run the decoder."""
        before = self._meter.cost
        output = inner(*args, **kwargs)
        self._chunk_forwards += self._meter.cost - before
        return output

    def _take_head_cost(self) -> tuple[Cost, Cost, Cost, Cost]:
        """Return what the head has cost since its start.

        Returns:
            The cost of all; of all chunks; of their forwards; and what of it a kernel would spare.
        """
        forwards, spared = self._chunk_forwards, Cost()
        if self._linear is not None:
            forwards, spared = self._linear.take()
        found = self._meter.cost - self._head_start, self._chunks, forwards, spared
        self._chunks = self._chunk_forwards = Cost()
        return found

    def _joined(self, cost: Cost, spared: Cost) -> Cost:
        """Return the cost of head and loss, of which the kernel of a linear head alone joins operations."""
        if not self.result.head_has_kernel:
            return cost
        return replace(
            cost,
            fused_bytes=cost.moved_bytes - spared.moved_bytes,
            num_kernels=cost.num_operations - spared.num_operations,
        )

    @contextmanager
    def _stubs(self) -> Iterator[None]:
        with ExitStack() as stack:
            for number, layer in enumerate(self._layers):
                stack.enter_context(mock.patch.object(layer, "forward", partial(self._pass, number, layer)))
            yield

    @contextmanager
    def _end_of_decoder(self) -> Iterator[None]:
        """Take note of when the decoder's forward ends: what it held alone is gone then."""
        model = self._model
        decoder = decoder_of(model.get_base_model() if hasattr(model, "get_base_model") else model)
        if decoder is None:
            yield
            return
        forward = decoder.forward

        def noted(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            self._note_forward_peak()
            self._meter.settle()
            self._is_behind_decoder = True
            return output

        with mock.patch.object(decoder, "forward", noted):
            yield

    def _note_forward_peak(self) -> None:
        """Note the most that was there since the last layer, or since the end of the decoder."""
        result, peak = self.result, self._meter.peak_bytes
        if self._is_behind_decoder:
            result.head_forward_peak_bytes = peak - self._graph_bytes()
        else:
            held = result.forward_bytes + self._embedded_bytes * result.holds_embedding
            result.norm_forward_peak_bytes = most(0, peak - held)

    def _graph_bytes(self) -> Any:
        """Return the bytes of what layers were given beside hidden states."""
        return self._meter.bytes_of(
            leaf
            for call in self.result.calls
            for leaf in tree_leaves((call.args, call.kwargs))
            if isinstance(leaf, Tensor)
        )

    def _pass(self, number: int, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = LayerCall(layer, args, kwargs)
        hidden = call.hidden
        # nothing is trained so far: a first layer that is sends no gradient further, but later ones send one
        wants = hidden.requires_grad or not any(p.requires_grad for p in call.module.parameters())
        if not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()
        self._note_what_is_held(number, hidden)
        key = (_kind_of(call), wants)
        if key not in self._kinds:
            self._kinds[key] = len(self._kinds)
            with self._meter.pausing():
                copied = torch.empty_like(hidden).requires_grad_(wants)
            again = call.by_itself(copied)
            self.result.calls.append(again)
            self.result.traces.append(self._trace(again))
        self.result.kinds.append(self._kinds[key])
        is_last = number == len(self._layers) - 1
        begin, end = self._begin_layers if is_last else None, None if number else self._end_layers
        output = _Stub.apply(hidden, begin, end)
        if is_last:
            del hidden, call
            self._head_start = self._meter.cost
            self._stream_block(is_behind=True)
            self._meter.settle()
            self._meter.peak_bytes = 0  # the next operation finds it: the layer's input goes before
        return self.result.traces[self._kinds[key]][KEEP.name].result(output)

    def _note_what_is_held(self, number: int, hidden: Tensor) -> None:
        live = self._meter.settle() - self._meter.storage_bytes(hidden)
        if number == 0:
            self._embedded = StorageWeakRef(hidden.untyped_storage())
            self._embedded_bytes = self._meter.storage_bytes(hidden)
            self.result.forward_bytes = live
        elif number == 1:
            assert self._embedded is not None
            self.result.holds_embedding = not self._embedded.expired()
            self.result.forward_bytes = live - self._embedded_bytes * self.result.holds_embedding

    def _begin_layers(self, grad: Tensor) -> None:
        """The backward has come to the last layer's output."""
        meter, result = self._meter, self.result
        self._head_back = self._take_head_cost()
        result.head_backward_peak_bytes = meter.peak_bytes - result.graph_bytes
        left = meter.settle() - result.graph_bytes - meter.storage_bytes(grad)
        result.head_gradient_bytes = left

    def _end_layers(self) -> None:
        """The backward leaves the first layer, whose output's gradient goes."""
        self._meter.settle()
        self._meter.peak_bytes = 0  # the next operation finds it


def _kind_of(call: LayerCall) -> Hashable:
    """Describe what a layer's cost depends on: its modules, their settings and tensors, and its arguments."""
    modules = tuple(
        (
            type(module),
            tuple((name, value) for name, value in vars(module).items() if _is_setting(name, value)),
            tuple(
                (name, tensor.shape, tensor.dtype, tensor.requires_grad)
                for name, tensor in module.named_parameters(recurse=False)
            ),
        )
        for module in call.module.modules()
    )
    given = tuple(
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in tree_leaves((call.args, dict(call.kwargs)))
    )
    return modules, given


def _is_setting(name: str, value: Any) -> bool:
    return isinstance(value, (bool, int, float, str)) and name not in _INDEX_NAMES
