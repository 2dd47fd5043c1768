"""The cost of a model for one micro-batch, per decoder layer and per fragment: the planner's view of a model.

It is counted from the modules themselves on fake tensors by `model.profile.count`; no rule of thumb is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatrain.config.choice import Choice
from megatrain.config.policies import KEEP, OFFLOAD, POLICIES, Policy
from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.expert_chunks import chunk_ranges
from megatrain.model.profile.cost import Cost

IDS_BYTES = 16
"""The bytes of a token's id and label on the device."""
POSITION_BYTES = 8
"""The bytes of a token's position, which rows that are packed or shared out bring with them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """A unit of streaming and updates: a part of a decoder layer, or of the model outside all layers."""

    name: str
    """The name of the module: `model.layers.0.self_attn`, `lm_head`."""
    kind: str
    """`attention`, `mlp`, `experts`, `layer` (one that does not come apart), `embedding`, `head`, `other`."""
    num_params: int
    sizes: BlockBytes
    largest_run: int = 0
    """State elements that AdamW updates in one go, at most: neighbours that all decay, or all do not."""
    forward: Cost = field(default_factory=Cost)
    may_stream: bool = False
    """Whether its module's own forward alone looks the parameters of this outer block up."""
    is_behind: bool = False
    """Whether it is behind the layers, as `Block.is_behind` says."""


@dataclass(frozen=True, slots=True)
class CompiledKeep:
    """What stays of a layer under `keep`, or leaves under `offload`, where it is compiled as a whole."""

    budget: float
    """The budget within which it is compiled (`megatrain.config.budgets`)."""
    holds_input: bool
    saved_bytes: int
    """Bytes on the device from forward to backward, the input included if it is held."""
    offloaded_bytes: int
    """Bytes that `offload` takes to the host, as laid out there."""
    offload_copied_bytes: int
    """The same bytes without what aligns them."""
    offload_left_bytes: int
    """Bytes that it leaves on the device."""
    again: Cost
    """Matrix products and attention that its backward computes again, beyond those of the whole budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LateBytes:
    """The memory of a layer in tiles whose input waits elsewhere and comes back late, tile by tile."""

    left_bytes: int
    """Bytes that stay on the device from forward to backward."""
    forward_peak_bytes: int
    """The most bytes on the device at a time in the forward, input and output included."""
    backward_peak_bytes: int
    """The most bytes on the device at a time in the backward, with gradients of all weights."""
    fragment_peak_bytes: int
    """The same where fragments stream by themselves."""
    collect_bytes: tuple[int, ...]
    """As `Layer.collect_bytes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsPart:
    """The experts of a layer that may come apart into chunks."""

    number: int
    """Experts."""
    least_chunk: int
    """The number of experts of which a chunk has a multiple."""
    first: BlockBytes
    """The sizes of so many experts' part of the first matrix."""
    second: BlockBytes
    first_params: int
    """The elements of these."""
    second_params: int
    rows: int
    """Tokens of a micro-batch, each as often as it has experts."""
    widths: tuple[int, int, int]
    """What flows into the first product, out of it, and into the second one, in elements of a row."""
    main: Fragment
    """What is beside them."""
    behind: Fragment | None
    """What runs behind them."""
    saves_output: bool
    """Whether a recomputation of the layer needs what they return."""
    beside_bytes: int
    """Bytes of small weights beside the matrices, such as biases."""
    beside: Layer
    """The layer with experts that return something of the right size, and save what those in chunks do."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights of all experts."""
        parts = self.first.working_bytes + self.second.working_bytes
        return parts * self.number // self.least_chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One decoder layer, and what a micro-batch leaves and takes there."""

    fragments: tuple[Fragment, ...]
    """The parts in forward order, as `memory.fragments=true` makes them; one if it does not come apart."""
    forward: Cost
    backward: Cost
    """The work of the backward, without recomputation."""
    largest_run: int
    """State elements of the layer as one block that AdamW updates in one go, at most."""
    boundary_bytes: int
    """The bytes of its input, which is what `recompute` keeps."""
    saved_bytes: Mapping[str, int]
    """Bytes on the device from forward to backward, by policy, the input included if the graph holds it (see
    `holds_input`); of `offload`: what goes to the host and back, as laid out there."""
    forward_peak_bytes: Mapping[str, int]
    """The most bytes on the device at a time in the forward, by policy, input and output included, beyond
    what is saved of it where it runs as `Policy.counted_as` says."""
    backward_peak_bytes: Mapping[str, int]
    """The most bytes on the device at a time in the backward, by policy, beyond the same, with gradients of
    activations and weights, and without the ring of gradient buffers."""
    holds_input: Mapping[str, bool] = field(default_factory=dict)
    """Whether `saved_bytes` counts the input, by policy."""
    fragment_peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """`backward_peak_bytes` where fragments stream by themselves: gradients of weights end with them."""
    collect_bytes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Bytes on the device when gradients of weights are complete, by policy, the boundary and what is saved
    included: for each fragment by itself, then for the layer as a whole."""
    offload_copied_bytes: int = 0
    """Bytes that `offload` copies to the host and back; `saved_bytes` says what room they take."""
    offload_left_bytes: int = 0
    """Bytes that `offload` leaves on the device: small tensors, masks and indices."""
    made_bytes: tuple[int, int] = (0, 0)
    """Most bytes at a time that a backward makes where nothing saved is freed in its course: while copies to
    the host go on. As a whole layer, and in fragments."""
    route_bytes: int = 0
    """Bytes of what its routers choose, which stay where it may run again; `saved_bytes` counts them under
    policies that rerun."""
    rerun_peak_bytes: int = 0
    """Most bytes at a time of a forward of which nothing stays: what makes a dropped boundary again."""
    compiled: tuple[CompiledKeep, ...] = ()
    """What stays of it where it is compiled, by budget; empty: that is not counted, or not known."""
    again: Cost = field(default_factory=Cost)
    """What its compiled backward computes again of the forward, whatever the policy."""
    experts: ExpertsPart | None = None
    """Its experts, if they may come apart; of a layer in which they have, None."""
    num_chunks: int = 0
    """The number of chunks into which they have come apart."""
    kept_sizes: tuple[int, ...] = ()
    """The bytes of each tensor, of those in `saved_bytes`, that flows into experts which came apart: it waits
    where the layer's input does. Indices are not among them, which stay on the device."""
    results_room_bytes: Mapping[str, int] = field(default_factory=dict)
    """The part of `saved_bytes`, by policy, that is results of operations which wait where the layer's input
    does (`Policy.moves_results`): the room that they take there."""
    results_copied_bytes: Mapping[str, int] = field(default_factory=dict)
    """The bytes of these that are copied."""
    reruns: Mapping[str, Cost] = field(default_factory=dict)
    """What runs again of its forward, by policy that reruns, where that was counted: of a layer in tiles."""
    late: Mapping[str, LateBytes] = field(default_factory=dict)
    """Its memory where its input waits elsewhere, by policy that reruns; empty: it does not pass in tiles."""
    beside_bytes: int = 0
    """The bytes of small weights beside such experts, copies of which all micro-batches share."""
    waiting_forward_bytes: int = 0
    """What a micro-batch has on the device in the forward while another one is in a chunk of its experts."""
    waiting_backward_bytes: int = 0
    """The same in the backward."""

    @property
    def num_params(self) -> int:
        """Parameters of all fragments."""
        return sum(fragment.num_params for fragment in self.fragments)

    def rerun(self, policy: Policy) -> Cost:
        """Return what runs again of its forward under an activation policy."""
        known = self.reruns.get(policy.name)
        return self.forward.again(policy) if known is None else known

    def as_compiled(self, budget: float) -> Layer:
        """Return the layer as it is compiled as a whole within a budget; the same where that is not known.

        The moments of its own forward and backward are those of single operations: compiled kernels have them
        in registers, and which of them meet in memory is not known.
        """
        keep = next((keep for keep in self.compiled if keep.budget == budget), None)
        less = 0 if keep is None else self.saved_bytes[KEEP.name] - keep.saved_bytes
        if keep is None or less <= 0:  # what operations keep is a cut of the graph too, and the least counts
            return self

        def beyond(peaks: Mapping[str, int]) -> dict[str, int]:
            return {p: n + less * (POLICIES[p].counted_as == KEEP.name) for p, n in peaks.items()}

        saved = {KEEP.name: keep.saved_bytes, OFFLOAD.name: keep.offloaded_bytes}
        return replace(
            self,
            saved_bytes={**self.saved_bytes, **saved},
            holds_input={**self.holds_input, **dict.fromkeys(saved, keep.holds_input)},
            forward_peak_bytes=beyond(self.forward_peak_bytes),
            backward_peak_bytes=beyond(self.backward_peak_bytes),
            offload_copied_bytes=keep.offload_copied_bytes,
            offload_left_bytes=keep.offload_left_bytes,
            compiled=(),
            again=keep.again,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Anatomy:
    """A model for one shape of micro-batch."""

    model_type: str
    precision: str
    micro_batch_size: int
    """Rows."""
    seq_len: int
    """Tokens of a row, or of the part of it that one of several ranks has."""
    layers: tuple[Layer, ...]
    outer: tuple[Fragment, ...]
    """Embedding, final norm, head and small towers: in use during a whole pass."""
    num_params: int
    num_active_params: int
    """Parameters that a token passes: of the experts, the active ones."""
    num_trained: int
    model_flops_per_token: float
    """Forward and backward, nothing recomputed: `model.flops`."""
    head_forward: Cost
    head_backward: Cost
    """What makes the gradients of final norm, head and loss, with the loss or after it."""
    head_has_kernel: bool
    """Whether a kernel of ours joins operations of head and loss, where kernels run."""
    constant_bytes: int
    """Buffers on the device, what a pass keeps beside its layers (rotary tables, masks), and the counts of
    experts' tokens, each once."""
    checkpoint_bytes: int
    """Bytes of a full checkpoint: model and optimizer state."""
    pass_bytes: int = 0
    """The part of `constant_bytes` that each further micro-batch of a round has of its own in the forward."""
    graph_bytes: int = 0
    """The part of `pass_bytes` that is still there in the backward."""
    holds_embedding: bool = False
    """Whether the model's forward holds on to the first layer's input until its end."""
    lets_go_of_embeddings: bool = False
    """Whether the engine lets go of that input where it comes back late: nobody else reads it."""
    norm_forward_peak_bytes: int = 0
    """Most bytes at a time in a micro-batch's forward from the last layer to the end of the decoder, the last
    layer's output included: of the final norm, where it does not pass with the head's chunks."""
    head_forward_peak_bytes: int = 0
    """The same from there to the loss, when the decoder's forward has let go of the embedding."""
    head_backward_peak_bytes: int = 0
    """Most bytes at a time in their backward, all that is saved for it included."""
    head_saved_bytes: int = 0
    """Bytes of a micro-batch that stay from its forward of final norm, head and loss to their backward."""
    head_gradient_bytes: int = 0
    """Gradients of outer weights that autograd holds from the head's backward until the pass ends: of those
    that are used before the layers too, or registered there."""
    loss_reaches_layers: bool = False
    """Whether the loss depends on layers by another way than the last one's output: the backward of the head
    cannot run by itself."""
    embedding_peak_bytes: int = 0
    """Most bytes at a time when the backward ends in the embedding, beyond `head_gradient_bytes`."""
    head_dim: int = 0
    """The largest width of an attention head's queries; 0: no layer has softmax attention."""
    num_heads: int = 0
    """The largest number of heads of these queries; 0: as there."""
    experts_whole: str = ""
    """Why no experts come apart, as `why_whole` says; empty: some do."""
    warnings: tuple[str, ...] = ()
    """Sentences on what the count leaves out or takes for granted, which a reader must know."""
    budget: float | None = None
    """The budget within which layers are compiled; None: they are not."""
    expert_chunks: int = 1
    """The number of chunks into which experts have come apart, at most."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch_size * self.seq_len

    @cached_property
    def keeps_codes(self) -> bool:
        """Whether weights are kept in codes on the host."""
        fragments = (fragment for layer in self.layers for fragment in layer.fragments)
        return any(fragment.sizes.codes_bytes for fragment in (*fragments, *self.outer))

    def as_compiled(self, budget: float) -> Anatomy:
        """Return the model with layers that are compiled within a budget: the same one each time."""
        if self.budget == budget:
            return self
        if budget not in self._compiled:
            self._compiled[budget] = replace(self, budget=budget)
        return self._compiled[budget]

    def as_split(self, choice: Choice) -> Anatomy:
        """Return the model with experts that come apart as a choice says: the same one each time."""
        number = choice.expert_chunks
        if number == self.expert_chunks:
            return self
        if number not in self._in_chunks:
            layers = tuple(in_chunks(layer, number, _WIDTH[self.precision]) for layer in self.layers)
            self._in_chunks[number] = replace(self, layers=layers, expert_chunks=number)
        return self._in_chunks[number]

    @property
    def chunked_bytes(self) -> int:
        """Bytes of the weights of a layer's experts that may come apart, of the layer with most."""
        return max((layer.experts.nbytes for layer in self.layers if layer.experts is not None), default=0)

    @cached_property
    def _in_chunks(self) -> dict[int, Anatomy]:
        return {}

    @cached_property
    def _compiled(self) -> dict[float, Anatomy]:
        return {}

    def layers_of(self, choice: Choice) -> tuple[Layer, ...]:
        """Return the layers as they run under a choice: whole, or in parts, which are compiled one by one.

        What parts keep is not counted: it is taken to be what their operations keep.
        """
        return self.as_split(choice).layers if choice.comes_apart else self._whole_layers

    def again_of(self, number: int) -> Cost:
        """Return what a layer's compiled backward computes again, as a whole or in fragments."""
        return self._whole_layers[number].again

    @cached_property
    def _whole_layers(self) -> tuple[Layer, ...]:
        budget = self.budget
        return self.layers if budget is None else tuple(layer.as_compiled(budget) for layer in self.layers)


_WIDTH = {"fp32": 4, "bf16": 2}
"""Bytes of an element of activations."""

_UNEVEN = 1.5
"""Times the mean: the rows of a chunk for which there is room."""

_CHUNK_OPERATIONS = 12
"""Kernels that a chunk launches in its forward."""


def in_chunks(layer: Layer, number: int, width: int) -> Layer:
    """Return a layer whose experts come apart into so many chunks, if it has any; else as one block.

    What is between the products of a chunk is counted by hand: the rows that flow in, what is between the
    products, and their gradients.

    Args:
        layer: The layer as it was counted.
        number: The most chunks.
        width: The bytes of an element of activations.
    """
    experts = layer.experts
    chunks = [] if experts is None else chunk_ranges(experts.number, experts.least_chunk, number)
    if experts is None or len(chunks) < 2:
        return _as_one(layer)
    beside = experts.beside
    outer, between, inner = experts.widths
    largest = max(map(len, chunks))
    rows = math.ceil(_UNEVEN * experts.rows * largest / experts.number) * width
    tokens = beside.boundary_bytes
    weighted = experts.rows * outer * width
    waits = 2 * tokens + weighted + _ROUTE_BYTES * experts.rows
    forward_peak = waits + rows * (2 * outer + 2 * between + inner)
    gradients = experts.first_params * largest // experts.least_chunk * width
    again = rows * (4 * outer + 4 * between + 3 * inner) + gradients
    kept = (tokens, width * experts.rows) if experts.behind is None else ()
    kept_bytes = sum(kept) + (_INDEX_BYTES * experts.rows if kept else 0)
    left = {p: POLICIES[p].reruns * (tokens * experts.saves_output + kept_bytes) for p in POLICIES}
    # of the output, of what flows in, and where something runs behind the experts what comes back from it
    gradients_of_input = (2 if experts.behind is None else 6) * tokens + 4 * experts.rows
    # recomputed before the experts go back, where something is behind them
    recomputed = 0 if experts.behind is None else beside.saved_bytes[KEEP.name]
    back = {
        p: max(peak, recomputed * POLICIES[p].reruns + gradients_of_input + again)
        for p, peak in beside.fragment_peak_bytes.items()
    }
    work = layer.forward - beside.forward
    per_chunk = Cost(num_operations=_CHUNK_OPERATIONS, num_kernels=_CHUNK_OPERATIONS).scaled(
        float(len(chunks) - 1)
    )
    return replace(
        beside,
        fragments=_fragments(layer.fragments[0].name, experts, chunks, work),
        forward=beside.forward + _as_it_is(work + per_chunk),
        backward=beside.backward + _as_it_is(layer.backward - beside.backward + per_chunk.scaled(2.0)),
        largest_run=max(experts.main.largest_run, experts.first_params * largest // experts.least_chunk),
        saved_bytes={p: nbytes + left[p] for p, nbytes in beside.saved_bytes.items()},
        kept_sizes=kept,
        beside_bytes=experts.beside_bytes,
        forward_peak_bytes={p: max(peak, forward_peak) for p, peak in beside.forward_peak_bytes.items()},
        backward_peak_bytes=back,
        fragment_peak_bytes=back,
        collect_bytes={p: (0,) * (len(chunks) * 2 + 3) for p in beside.collect_bytes},
        made_bytes=(max(beside.made_bytes) + again,) * 2,
        compiled=(),
        experts=None,
        late={},
        reruns={},
        num_chunks=len(chunks),
        waiting_forward_bytes=waits,
        waiting_backward_bytes=recomputed + kept_bytes + tokens + gradients_of_input,
    )


def _as_it_is(cost: Cost) -> Cost:
    """Return the work of what is not compiled, where other layers are."""
    return replace(cost, fused_bytes=cost.moved_bytes, num_kernels=cost.num_operations)


_INDEX_BYTES = 8
"""Bytes of a choice of a token that are kept: the number of its expert, and its place."""

_ROUTE_BYTES = 24
"""Bytes of a choice of a token: its expert, its place and its weight."""


def _fragments(name: str, experts: ExpertsPart, chunks: Sequence[range], work: Cost) -> tuple[Fragment, ...]:
    """List the blocks of a layer whose experts come apart, in the order of its state."""
    total = experts.first_params + experts.second_params
    parts = []
    for leaf, sizes, params in (
        ("first", experts.first, experts.first_params),
        ("second", experts.second, experts.second_params),
    ):
        for chunk in chunks:
            share = len(chunk) / experts.number
            numel = params * len(chunk) // experts.least_chunk
            parts.append(
                Fragment(
                    name=f"{name}.{leaf}[{chunk.start}:{chunk.stop}]",
                    kind="experts",
                    num_params=numel,
                    sizes=sizes.scaled(len(chunk), experts.least_chunk),
                    largest_run=numel if sizes.num_state else 0,
                    forward=work.scaled(share * params / total),
                )
            )
    ends = [replace(experts.main, name=name)]
    if experts.behind is not None:
        ends.append(replace(experts.behind, name=f"{name}.behind"))
    return (*ends[:1], *parts, *ends[1:])


def _as_one(layer: Layer) -> Layer:
    """Return a layer that streams as a whole where others come apart."""
    first = layer.fragments[0]
    whole = Fragment(
        name=first.name,
        kind="layer",
        num_params=layer.num_params,
        sizes=sum((part.sizes for part in layer.fragments), BlockBytes()),
        largest_run=layer.largest_run,
        forward=layer.forward,
    )
    return replace(
        layer,
        fragments=(whole,),
        fragment_peak_bytes=layer.backward_peak_bytes,
        collect_bytes={policy: (sizes[-1],) * 2 for policy, sizes in layer.collect_bytes.items()},
        late={policy: _late_as_one(late) for policy, late in layer.late.items()},
        experts=None,
    )


def _late_as_one(late: LateBytes) -> LateBytes:
    return replace(
        late, fragment_peak_bytes=late.backward_peak_bytes, collect_bytes=(late.collect_bytes[-1],) * 2
    )
