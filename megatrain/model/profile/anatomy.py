"""The cost of a model for one micro-batch, per decoder layer and per fragment: the planner's view of a model.

It is counted from the modules themselves on fake tensors by `model.profile.count`; no rule of thumb is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from megatrain.config.policies import KEEP, OFFLOAD, POLICIES, Policy
from megatrain.layout.block_bytes import BlockBytes

IDS_BYTES = 16
"""The bytes of a token's id and label on the device."""
POSITION_BYTES = 8
"""The bytes of a token's position, which rows that are packed or shared out bring with them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Work of one pass of one micro-batch."""

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    """Causal attention at half."""
    moved_bytes: float = 0.0
    """Device memory that all other operations read and write, each by itself."""
    num_operations: int = 0
    """Kernels launched, each operation by itself."""
    fused_bytes: float = 0.0
    """`moved_bytes` where a compiler joins them: `model.profile.fusion`."""
    num_kernels: int = 0
    """`num_operations` there."""
    swapped_bytes: float = 0.0
    """Bytes given to the ranks that share out the same rows; as many are received from them."""

    def __add__(self, other: Cost) -> Cost:
        """Return the work of both."""
        return Cost(**{name: getattr(self, name) + getattr(other, name) for name in _NUMBERS})

    def again(self, policy: Policy) -> Cost:
        """Return what of this work, a layer's forward, runs again under an activation policy."""
        if not policy.reruns:
            return Cost()
        return replace(
            self,
            matmul_flops=0.0 if policy.keeps_products else self.matmul_flops,
            attention_flops=0.0 if policy.keeps_attention else self.attention_flops,
        )

    def __sub__(self, other: Cost) -> Cost:
        """Return the work of this one that the other, a part of it, does not hold."""
        return Cost(**{name: getattr(self, name) - getattr(other, name) for name in _NUMBERS})

    def scaled(self, factor: Any) -> Cost:
        """Return this work that many times; a number for each of several sizes gives as many."""
        scaled = {name: getattr(self, name) * factor for name in _NUMBERS}
        return Cost(**scaled | {name: _whole(scaled[name]) for name in ("num_operations", "num_kernels")})


_NUMBERS = tuple(field.name for field in fields(Cost))


def _whole(number: Any) -> Any:
    return round(number) if isinstance(number, float) else number.round()


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
    forward: Cost = Cost()
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
    rerun_peak_bytes: int = 0
    """Most bytes at a time of a forward of which nothing stays: what makes a dropped boundary again."""
    compiled: tuple[CompiledKeep, ...] = ()
    """What stays of it where it is compiled, by budget; empty: that is not counted, or not known."""
    again: Cost = Cost()
    """What its compiled backward computes again of the forward, whatever the policy."""

    @property
    def num_params(self) -> int:
        """Parameters of all fragments."""
        return sum(fragment.num_params for fragment in self.fragments)

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
    """Buffers on the device, and what a pass keeps beside its layers (rotary tables, masks), each once."""
    checkpoint_bytes: int
    """Bytes of a full checkpoint: model and optimizer state."""
    pass_bytes: int = 0
    """The part of `constant_bytes` that each further micro-batch of a round has of its own in the forward."""
    graph_bytes: int = 0
    """The part of `pass_bytes` that is still there in the backward."""
    holds_embedding: bool = False
    """Whether the model's forward holds on to the first layer's input until its end."""
    head_forward_peak_bytes: int = 0
    """Most bytes at a time in a micro-batch's forward of final norm, head and loss, beyond their input."""
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
    warnings: tuple[str, ...] = ()
    """Sentences on what the count leaves out or takes for granted, which a reader must know."""
    budget: float | None = None
    """The budget within which layers are compiled; None: they are not."""

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

    @cached_property
    def _compiled(self) -> dict[float, Anatomy]:
        return {}

    def layers_of(self, *, fragments: bool) -> tuple[Layer, ...]:
        """Return the layers as they run as a whole or in fragments, which are compiled one by one.

        What these keep is not counted: it is taken to be what their operations keep.
        """
        return self.layers if fragments else self._whole_layers

    def again_of(self, number: int) -> Cost:
        """Return what a layer's compiled backward computes again, as a whole or in fragments."""
        return self._whole_layers[number].again

    @cached_property
    def _whole_layers(self) -> tuple[Layer, ...]:
        budget = self.budget
        return self.layers if budget is None else tuple(layer.as_compiled(budget) for layer in self.layers)
