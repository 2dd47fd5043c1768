"""A model without weights, cut into blocks and run on fake tensors: whole, and one layer of every kind."""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from unittest import mock

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from transformers.utils import import_utils

from megatrain.config.adaptation import Adaptation
from megatrain.config.policies import COUNTED, KEEP, POLICIES, RECOMPUTE, Policy
from megatrain.errors import ConfigError, ModelError, first_line, warn_once
from megatrain.model.adapters.adapt import adapt
from megatrain.model.adapters.adapted_parameters import ATTRIBUTE, adapters_of_parameters
from megatrain.model.adapters.left_out import left_out
from megatrain.model.blocks import find_blocks, group_layers
from megatrain.model.causal import refuse_encoder
from megatrain.model.documents.able import counted_as
from megatrain.model.documents.begins import is_ours, tells_windows
from megatrain.model.expert_numbers import require_possible
from megatrain.model.head.form import form_of
from megatrain.model.head.head import chunk_tokens_of
from megatrain.model.kernels import accelerator_attention
from megatrain.model.layouts import lay_out_blocks
from megatrain.model.masks import LongAttentionError, is_long, long_masks_refused, refused, without_mask
from megatrain.model.profile.anatomy import Fragment, LateBytes, Layer
from megatrain.model.profile.compiled import MOST_OPERATIONS, count_compiled
from megatrain.model.profile.cost import Cost
from megatrain.model.profile.experts import experts_apart, experts_left_out
from megatrain.model.profile.fragments import fragment, kind_of_fragment, largest_run
from megatrain.model.profile.metering import Meter
from megatrain.model.profile.pairs import TokenPairs
from megatrain.model.profile.rows import Rows, least, prime_beside
from megatrain.model.profile.tracing import FakeBlock, LayerCall, Trace, trace_layer
from megatrain.model.profile.whole_pass import HeadPass, Traces, WholePass, WholePassTracer
from megatrain.model.sequence.attention import rows_shared
from megatrain.model.sequence.check import refuse_config
from megatrain.model.sequence.shards import Counted
from megatrain.model.shares import adds_router_loss
from megatrain.model.tiles.calls import few_tiles
from megatrain.model.tiles.first_input import is_done_with_embeddings
from megatrain.model.tiles.position_wise import tile
from megatrain.model.weights.kept_by_config import keep_as_planned
from megatrain.model.weights.skeleton import build_skeleton

LossKind: TypeAlias = Literal["plain", "given", "rows"]

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from typing_extensions import Required, TypedDict, Unpack

    class ModelShape(TypedDict, total=False):
        """The arguments of `Counter.of` for one size of micro-batch or several."""

        seq_len: Required[int]
        """The number of tokens of a row."""
        precision: Required[Literal["fp32", "bf16"]]
        """The precision in which weights are kept, as in `attach`."""
        attn_implementation: str | None
        """The attention implementation, by its name in transformers; None takes the default."""
        adaptation: Adaptation | None
        """The part of the model that is trained, adapters among it; None: all of it."""
        base: str
        """The place of the checkpoint as which frozen weights are kept; none: they are kept as values."""
        is_packed: bool
        """Whether rows are of several documents, which positions keep apart: `sdpa` gets a mask then."""
        document_len: int | None
        """The number of tokens of the document that a token of a packed row is in, on average; None: all of
        the row. Attention without a mask computes no more."""
        sequence: int
        """The number of ranks that share out the tokens of every row; what one computes is counted."""
        tile: int
        """The tokens of a tile in which position-wise modules pass rows; 0: they pass whole."""
        compiles: bool
        """Whether to count what compiled layers keep, too."""
        loss: LossKind
        """`plain`: the engine's own, of all tokens; `given`: one that somebody makes of the model's; `rows`:
        one of a sum for each row, as that of preferences is."""


_log = logging.getLogger(__name__)


def _leave_out_router_loss(model: PreTrainedModel) -> tuple[str, ...]:
    """Switch off the auxiliary loss of routers; return what to say of it."""
    if not adds_router_loss(model.config):
        return ()
    model.config.get_text_config().output_router_logits = False
    warning = (
        f"the {model.config.model_type} model is counted without its router loss, whose memory grows with "
        "layers, tokens and experts"
    )
    warn_once(_log, warning)
    return (warning,)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let no garbage collection run: it finds nothing here, and takes a fifth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_TORCH, _TRANSFORMERS = (Path(str(package.__file__)).parent for package in (torch, transformers))


class Counter:
    """A model without weights, cut into blocks, whose parts are run in one fake mode."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        micro_batch_size: int,
        seq_len: int,
        precision: Literal["fp32", "bf16"],
    ) -> None:
        """Cut a model into blocks; see `count_anatomy` for what is raised."""
        if micro_batch_size < 1 or seq_len < 1:
            raise ConfigError(
                f"a micro-batch has {micro_batch_size} rows of {seq_len} tokens; both must be 1 or more"
            )
        self.model = model.train()
        self.model_type, self.precision = str(model.config.model_type), precision
        self.has_router_loss = adds_router_loss(self.model.config)
        self.warnings = _leave_out_router_loss(self.model)
        form_of(self.model.config)  # while tensors are real
        self.shape = micro_batch_size, seq_len
        self.rows = Rows(micro_batch_size)
        self.is_packed = False
        self.document_len: int | None = None
        self.sequence = 1
        self.compiles = False
        """What compiled layers keep is counted too."""
        self._is_tiled = False
        """Parts of layers run in tiles, so that no layer is compiled as a whole."""
        self._in_tiles: set[nn.Module] = set()
        """The modules that pass rows in tiles."""
        self.lets_go_of_embeddings = False
        """Nobody but the first layer reads its input, which is let go where it waits elsewhere."""
        self.loss: LossKind = "plain"
        self.blocks = find_blocks(self.model, fragments=True)
        self.layouts = lay_out_blocks(self.model, self.blocks, splits=precision == "bf16")
        self.groups = group_layers(self.blocks)
        """The blocks of each layer."""
        whole = lay_out_blocks(self.model, find_blocks(self.model), splits=precision == "bf16")
        self._apart, self.experts_whole = experts_apart(self.model, precision)
        """The blocks of each layer whose experts may come apart, by its module: as small as they may be."""
        self.largest_runs = [largest_run(layout) for layout in whole[: len(self.groups)]]
        """The `largest_run` of each layer that streams as one block."""
        self.layers = [
            block.module
            for block in (self.blocks[group[0]] for group in self.groups)
            if block.module is not None and not block.is_beside
        ]
        """The layers that rows of text pass, which come first."""

    @classmethod
    def of(
        cls,
        config: PretrainedConfig,
        *,
        micro_batch_size: int,
        **model: Unpack[ModelShape],
    ) -> Counter:
        """Build a model.

        Args:
            config: The configuration of a causal language model, or of a larger model with one inside.
            micro_batch_size: The number of rows.
            **model: The values of `ModelShape`.

        Raises:
            ModelError: The model cannot be built or streamed, or does not compute the same where rows are
                shared out.
            ConfigError: A shape or a precision that there is not, or heads that cannot be shared out.
        """
        precision, sequence = model["precision"], model.get("sequence", 1)
        if precision not in ("fp32", "bf16"):
            raise ConfigError(f"precision is {precision!r}; use fp32 or bf16")
        if sequence > 1:
            refuse_config(config, sequence)
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        require_possible(config)
        refuse_encoder(config)
        attention = counted_as(config, model.get("attn_implementation"), dtype)
        built = build_skeleton(config, dtype=dtype, attn_implementation=attention)
        if is_ours(built.config):
            tells_windows(built.config)  # while tensors are real
        adaptation = model.get("adaptation")
        if "base" in model:
            keep_as_planned(built, model["base"])
        if adaptation is not None:
            adapt(built, adaptation)
        said = left_out(built) if adaptation is not None and adaptation.adapts_all else ""
        if said:
            warn_once(_log, said)
        counter = cls(built, micro_batch_size=micro_batch_size, seq_len=model["seq_len"], precision=precision)
        counter.model_type, counter.sequence = config.model_type, sequence
        counter.is_packed = model.get("is_packed", False)
        counter.document_len = model.get("document_len")
        counter.compiles, counter.loss = model.get("compiles", False), model.get("loss", "plain")
        counter.warnings += (said,) if said else ()
        counter.tile(model.get("tile", 0))
        return counter

    def tile(self, tokens: int) -> None:
        """Let position-wise modules pass rows in tiles of so many tokens; 0: they pass whole."""
        if tokens:
            before = {module for module in self.model.modules() if "forward" in vars(module)}
            tile(self.model, self.layers, tokens)
            after = {module for module in self.model.modules() if "forward" in vars(module)}
            self._in_tiles = after - before
            self._is_tiled = True
            self.lets_go_of_embeddings = is_done_with_embeddings(self.model.config)

    def let_run(self, sizes: Sequence[int], head_chunk_tokens: int | None) -> int:
        """Let a prime number of rows run, of which all tensors are that are made of rows, and no others.

        Args:
            sizes: The sizes for which the count is wanted, a group of `alike`.
            head_chunk_tokens: The number of tokens in a chunk of the head, as in `attach`.

        Returns:
            The number of tokens in a chunk of the head, with which these rows run as those of all sizes do.
        """
        seq_len = self.shape[1]
        own_len = -(-seq_len // self.sequence)
        chunk = head_chunk_tokens or chunk_tokens_of(self.model.config)
        self.rows = Rows(prime_beside({seq_len, own_len, chunk} | self._sizes()), sizes)
        self.shape = self.rows.counted, seq_len
        is_whole = max(sizes) * own_len <= chunk
        return self.rows.counted * own_len if is_whole else chunk

    def _sizes(self) -> set[int]:
        """Return all dimensions of the model's tensors, and the numbers among its settings."""
        settings = self.model.config.get_text_config().to_dict().values()
        sizes = {value for value in settings if isinstance(value, int)}
        return sizes.union(*(each.shape for each in (*self.model.parameters(), *self.model.buffers())))

    def run(
        self, head_chunk_tokens: int | None, *, device_type: str, policies: Sequence[str] = COUNTED
    ) -> WholePass:
        """Run the whole model, with one layer of every kind under some policies; `KEEP` is one of them."""
        kernels = nullcontext() if device_type == "cpu" else accelerator_attention()
        try:
            with kernels, _no_collection(), long_masks_refused(self.model):
                return self._run(head_chunk_tokens, policies, device_type)
        except LongAttentionError as error:
            cause = "its attention makes them on this device"
            raise refused(self.model, error.queries, error.keys, cause, *without_mask(self.model)) from error
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise ModelError(
                f"the {self.model.config.model_type} model decides by the values of its activations what it "
                f"computes ({error.func}), so its cost cannot be counted before a run"
            ) from error
        except Exception as error:  # a class refuses in a way of its own what it does not take
            if not _is_of_model(error):
                raise
            raise ModelError(
                f"{type(self.model).__name__} of transformers {transformers.__version__} does not run on "
                f"rows of text alone, which are what is trained here: {first_line(error)}"
            ) from error

    def group_of(self, module: nn.Module) -> Sequence[int]:
        """Return the blocks of a layer."""
        return self.groups[[id(layer) for layer in self.layers].index(id(module))]

    def _refuse_pairs(self, device_type: str) -> None:
        """Run a row of as many tokens as those that are counted, and refuse pairs of tokens.

        Where their number is a size of the model too, whose tensors would look like pairs, a few tokens are
        left out.
        """
        (_, seq_len), sizes = self.shape, self._sizes()
        num_tokens = next(n for n in count(seq_len, -1) if not sizes & {n, -(-n // self.sequence)})
        pairs = TokenPairs((num_tokens, -(-num_tokens // self.sequence)), sizes)
        held = self.rows, self.shape
        self.rows, self.shape = Rows(1), (1, num_tokens)
        try:
            self._trace(None, [KEEP.name], device_type, pairs)
        except LongAttentionError as error:
            many, few = (round(number * seq_len / num_tokens) for number in (error.queries, error.keys))
            raise refused(self.model, many, few, "its own code makes them") from error
        finally:
            self.rows, self.shape = held

    def _run(self, head_chunk_tokens: int | None, policies: Sequence[str], device_type: str) -> WholePass:
        # transformers would take another way for fake tensors than for real ones: whole masks
        as_real = mock.patch.object(import_utils, "is_fake_tensor", return_value=False)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, as_real, torch.enable_grad():
            for module in self.model.modules():
                for leaf, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[leaf] = mode.from_tensor(buffer)
            for module, activate in adapters_of_parameters(self.model):
                module.__dict__[ATTRIBUTE] = activate
            found = self._trace(head_chunk_tokens, policies, device_type)
            if is_long(self.shape[1], self.shape[1]):
                self._refuse_pairs(device_type)
            if self.compiles and self.sequence == 1 and not self._is_tiled:
                self._count_compiled(found)
        return found

    def _trace(
        self,
        head_chunk_tokens: int | None,
        policies: Sequence[str],
        device_type: str,
        pairs: TokenPairs | None = None,
    ) -> WholePass:
        outer = [self._fake(n) for n, block in enumerate(self.blocks) if block.module is None]
        with Meter(self.rows, pairs) as meter:

            def trace(call: LayerCall) -> dict[str, Trace]:
                with meter.pausing():
                    fakes = [self._fake(number) for number in self.group_of(call.module)]
                found = {name: trace_layer(call, fakes, POLICIES[name], meter) for name in policies}
                if not self._in_tiles.isdisjoint(call.module.modules()):
                    for name, each in found.items():
                        if POLICIES[name].reruns:
                            each.late = trace_layer(call, fakes, POLICIES[name], meter, is_late=True)
                if call.module in self._apart:
                    with experts_left_out(self._apart[call.module].experts):
                        for name, each in found.items():
                            each.beside = trace_layer(call, fakes, POLICIES[name], meter)
                return found

            tracer = WholePassTracer(
                self.model,
                self.layers,
                outer,
                meter,
                head_chunk_tokens,
                trace,
                HeadPass(
                    is_followed=not self.has_router_loss and self.loss != "rows",
                    is_plain=self.loss == "plain",
                    is_fused=device_type != "cpu",
                ),
            )
            rows, seq_len = self.shape
            with self.rows_shared(meter.swapped), few_tiles(meter.repeated):
                own_len = -(-seq_len // self.sequence)
                return tracer.run(
                    rows,
                    own_len,
                    is_packed=self.is_packed,
                    document_len=self.document_len,
                    shares=self.sequence > 1,
                )

    def _count_compiled(self, found: WholePass) -> None:
        """Count what a compiled layer of each kind keeps; what cannot be told is said."""
        for call, traces in zip(found.calls, found.traces, strict=True):
            keep = traces[KEEP.name]
            if sum(cost.num_operations for cost in keep.forward) > MOST_OPERATIONS:
                continue  # such a layer is not compiled
            fakes = [self._fake(number) for number in self.group_of(call.module)]
            try:
                keep.compiled = count_compiled(call, fakes, self.rows)
            except Exception as error:  # torch's compiler may raise anything
                self.warnings += (
                    f"what compiled layers of {type(call.module).__name__} keep is not known "
                    f"({first_line(error)[:80]}): they are planned as uncompiled ones",
                )
                return

    @contextmanager
    def rows_shared(self, note: Callable[[int], object] = lambda _: None) -> Iterator[None]:
        """Let the model compute what one of the ranks that share out its rows does, if any do."""
        if self.sequence == 1:
            yield
            return
        with rows_shared(self.model, Counted(self.sequence), note) as rows, rows.active():
            yield

    def _fake(self, number: int) -> FakeBlock:
        return FakeBlock(self.blocks[number], self.layouts[number])

    def describe(self, whole: WholePass) -> tuple[Layer, ...]:
        """Describe every layer by the trace of its kind; those that are not passed, by their size alone."""
        traces = [whole.traces[kind] for kind in whole.kinds]
        traces += [_no_traces(len(group)) for group in self.groups[len(self.layers) :]]
        return tuple(self._layer(number, each) for number, each in enumerate(traces))

    def _layer(self, number: int, traces: Traces) -> Layer:
        group = self.groups[number]
        costs = traces[KEEP.name].forward
        fragments = tuple(
            fragment(self.blocks[n], self.layouts[n], kind_of_fragment(self.blocks[n]), cost)
            for n, cost in zip(group, costs, strict=True)
        )
        layer = _layer(fragments, traces, self.largest_runs[number])
        beside = {name: trace.beside for name, trace in traces.items() if trace.beside is not None}
        if not beside:
            return layer
        module = self.blocks[group[0]].module
        assert module is not None
        return replace(layer, experts=self._apart[module].described(_layer((), beside, 0)))


def _layer(fragments: tuple[Fragment, ...], traces: Traces, run: int) -> Layer:
    keep = traces[KEEP.name]
    every = {name: traces[policy.counted_as] for name, policy in POLICIES.items()}
    return Layer(
        fragments=fragments,
        forward=_unfused(sum(keep.forward, Cost())),
        backward=_unfused(keep.backward),
        boundary_bytes=keep.input_bytes,
        saved_bytes={name: _saved_bytes(POLICIES[name], trace) for name, trace in every.items()},
        forward_peak_bytes={p: t.forward_peak_bytes - t.saved_bytes for p, t in every.items()},
        backward_peak_bytes={p: t.backward_peak_bytes - t.saved_bytes for p, t in every.items()},
        holds_input={policy: trace.holds_input for policy, trace in every.items()},
        fragment_peak_bytes={p: t.fragment_peak_bytes - t.saved_bytes for p, t in every.items()},
        collect_bytes={p: (*t.collect_bytes, t.whole_collect_bytes) for p, t in every.items()},
        largest_run=run,
        offload_copied_bytes=keep.offload_copied_bytes,
        offload_left_bytes=keep.offload_left_bytes,
        made_bytes=(keep.backward_made_bytes, keep.fragment_made_bytes),
        route_bytes=traces[RECOMPUTE.name].route_bytes,
        rerun_peak_bytes=traces[RECOMPUTE.name].forward_peak_bytes - traces[RECOMPUTE.name].saved_bytes,
        compiled=keep.compiled,
        results_room_bytes={p: t.results_room_bytes for p, t in every.items()},
        results_copied_bytes={p: t.results_copied_bytes for p, t in every.items()},
        reruns={p: _unfused(t.backward - keep.backward) for p, t in every.items() if t.late is not None},
        late={p: _late(t.late) for p, t in every.items() if t.late is not None},
    )


def _unfused(cost: Cost) -> Cost:
    """Return a cost in tiles, of which no more bytes are moved by compiled kernels than by others.

    A buffer that is read tile by tile counts as a whole each time among what compiled kernels read.
    """
    return replace(cost, fused_bytes=least(cost.fused_bytes, cost.moved_bytes))


def _late(trace: Trace) -> LateBytes:
    return LateBytes(
        left_bytes=trace.saved_bytes,
        forward_peak_bytes=trace.forward_peak_bytes,
        backward_peak_bytes=trace.backward_peak_bytes,
        fragment_peak_bytes=trace.fragment_peak_bytes,
        collect_bytes=(*trace.collect_bytes, trace.whole_collect_bytes),
    )


def _no_traces(num_fragments: int) -> Traces:
    """Return the traces of a layer that rows of text do not pass."""
    nothing = Trace(forward=[Cost()] * num_fragments, collect_bytes=(0,) * num_fragments)
    return dict.fromkeys(COUNTED, nothing)


def _saved_bytes(policy: Policy, trace: Trace) -> Any:
    """Return what a layer leaves until its backward: on the device, or on its way to where it waits."""
    if policy.is_offloaded:
        return trace.offloaded_bytes
    return trace.saved_bytes if policy.keeps_boundary else trace.route_bytes


def _is_of_model(error: Exception) -> bool:
    """Whether an error comes from code of transformers, or from an operation of torch that it calls."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    return [file for file in files if _TORCH not in file.parents][-1].is_relative_to(_TRANSFORMERS)
