"""The head and the loss: normalised over a whole step, and in chunks of tokens where logits would be large.

Chunks go through the model's own code. Its decoder is run once and its output kept; then the CausalLM's own
forward is called for each chunk with a stand-in for the decoder that returns a part of the hidden states.
Soft caps, logit scales, biases and auxiliary losses are therefore the model's. Before the first chunk it is
checked on a few tokens that the parts add up to the whole; where they do not, the loss is computed whole,
and said so. Where rows pass in tiles, the decoder's last norm hands long ones on, and chunks pass it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from megatrain.model.head.chunks import Chunks, HeadWeights
from megatrain.model.head.decoded import Decoded, handed_on
from megatrain.model.head.decoder import decoder_of, without_hooks
from megatrain.model.head.form import Form, form_of, linear_of
from megatrain.model.head.linear import LinearHead
from megatrain.model.head.others import Others, leads_to
from megatrain.model.shares import IGNORED, ByPosition, RowSums, Share, adds_router_loss
from megatrain.model.tiles.last_norm import Handing, LastNorm, NormOfChunks, last_norm
from megatrain.model.watched import is_watched

_log = logging.getLogger(__name__)

LOGITS_BYTES = 1 << 30
"""The automatic chunk holds at most this much of fp32 logits."""

_TILE_TOKENS = 256
"""Rows of a tile of a large matrix product on GPUs, where 1,046 tokens take as long as 1,280."""

_PROBE_TOKENS = 32
_PROBE_TOLERANCE = 1e-4
_ROUNDED_TOLERANCE = 2e-2


PutAway: TypeAlias = tuple[Share | RowSums | None, LastNorm | None, Handing | None]
"""What of a head belongs to a micro-batch that others run beside."""


class _Captured(BaseException):
    """Carries the decoder's output out of the CausalLM's forward, past everything that follows it."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


def chunk_tokens_of(config: PretrainedConfig) -> int:
    """Return the tokens of an automatic chunk, whole tiles of them: they follow from the vocabulary alone."""
    vocab_size = int(getattr(config.get_text_config(), "vocab_size", 0) or 1)
    tokens = LOGITS_BYTES // (4 * vocab_size)
    return tokens // _TILE_TOKENS * _TILE_TOKENS or max(1, tokens)


class Head:
    """Stands between the engine and the model's loss."""

    def __init__(
        self,
        model: PreTrainedModel,
        chunk_tokens: int | None,
        weights_of: Callable[[], HeadWeights],
        *,
        is_fused: bool,
    ) -> None:
        """Put a wrapper around the model's loss function.

        Args:
            model: The CausalLM.
            chunk_tokens: Tokens per chunk; None: `chunk_tokens_of`.
            weights_of: The function that returns the weights of the head for the running micro-batch.
            is_fused: Whether chunks of a head that is one linear layer go through `LinearHead` instead of the
                model's own code.
        """
        self._model = model
        self._weights_of = weights_of
        self.chunk_tokens = chunk_tokens or chunk_tokens_of(model.config)
        self._is_explicit = chunk_tokens is not None
        # An adapter's wrapper passes reads of loss_function on to the model inside, but keeps what is set.
        self._owner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._original: Callable[..., Tensor] = self._owner.loss_function
        self._was_set = "_loss_function" in self._owner.__dict__
        self.linear: LinearHead | None = None
        """What computes chunks; None: the model's own code does."""
        if is_fused:
            linear, form = linear_of(self._owner), form_of(model.config)
            if linear is not None and form is not None:
                self.linear = LinearHead(linear, form)
        weight = getattr(self._owner.get_output_embeddings(), "weight", None)
        self._dtype = weight.dtype if isinstance(weight, Tensor) else None
        """That in which the head computes; in a pass, to ask a weight for it would stream it."""
        self._takes_total = "num_items_in_batch" in inspect.signature(self._original).parameters
        self.share: Share | RowSums | None = None
        """The running micro-batch's; put away and back where micro-batches run in turns."""
        self._decoding: LastNorm | None = None
        """The norm that hands on what the running decoder of the micro-batch gives it."""
        self.only_loss = False
        """Whether the caller of the model takes nothing of its output but the loss."""
        self._adds_up: bool | None = None
        self.chunked_tokens = 0
        """Tokens that passed the head in chunks so far."""
        self.rerun_tokens = 0
        """Those of them that pass it again in the backward."""
        self.eager_tokens = 0
        """Those of them whose gradients were made in the forward."""
        self._signature = inspect.signature(type(model).forward)
        self._owner.loss_function = self._loss

    def remove(self) -> None:
        """Give the model its loss function back."""
        if self._was_set:
            self._owner.loss_function = self._original
        else:
            self._owner.__dict__.pop("_loss_function", None)

    def share_of(self, batch: Mapping[str, Any], count: int, *, total: int, num_micro_batches: int) -> Share:
        """Return the share of a micro-batch that has `count` of the `total` tokens of a step.

        What routers add (`output_router_logits`) is no sum over tokens. It is averaged over micro-batches, so
        its weight does not follow from how many there are.
        """
        adds = batch.get("output_router_logits")
        adds = adds_router_loss(self._model.config) if adds is None else adds
        return Share(total, count, num_micro_batches if adds else 1)

    @contextmanager
    def over(self, share: Share | RowSums | None) -> Iterator[None]:
        """Average over the tokens of the step, of which the coming micro-batch has its share."""
        self.share = share
        try:
            yield
        finally:
            self.share = None

    def is_own(self, forward: Callable[..., Any]) -> bool:
        """Whether a forward is the model's own, and so is that of the model inside, if an adapter wraps it.

        Others, such as the one that TRL puts on a model, have a loss of their own, and divide it themselves.
        """
        if getattr(forward, "__func__", None) is not type(self._model).forward:
            return False
        return self._owner is self._model or "forward" not in self._owner.__dict__

    def in_chunks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Return a call's arguments by name if its batch is to pass the head in chunks; None: as a whole."""
        named = self.named(args, kwargs)
        return named if named is not None and self._wants_chunks(named) else None

    def call(self, inner: Callable[..., Any], named: dict[str, Any]) -> Any:
        """Run the CausalLM's own forward with its head in chunks, on arguments from `in_chunks`."""
        norm = self._norm(named)
        output, is_whole = self._decode(inner, named, norm)
        if is_whole:
            self._adds_up = False
            _log.warning(
                "%s computes its loss whole: it does not call its decoder", type(self._model).__name__
            )
            return output
        labels = named["labels"]
        if named.get("shift_labels") is not None:
            targets = named["shift_labels"]
        else:
            targets = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        call = Decoded(inner, named, output, handed_on(norm, output))
        del output
        if self._adds_up is None:
            self._adds_up = self._probe(call)
        if not self._adds_up:
            output = call.normed_output()
            with self._standing_in(lambda *_, **__: output):
                return inner(**named)
        return self._chunked(call, targets)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments of the CausalLM's forward by name; None if they do not fit it."""
        try:
            bound = self._signature.bind(self._model, *args, **kwargs)
        except TypeError:  # the model's own forward says what is wrong with its arguments
            return None
        named = dict(list(bound.arguments.items())[1:])
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                named.update(named.pop(name, {}))
        return named

    def _wants_chunks(self, named: Mapping[str, Any]) -> bool:
        labels = named.get("labels")
        if labels is None or not self._takes_total or self._adds_up is False:
            return False
        if isinstance(self.share, RowSums):
            return self._decoder() is not None
        # a caller of model(...) may want the logits
        wants_loss = torch.is_grad_enabled() and (self.only_loss or self._is_explicit)
        if self.share is None and not wants_loss:
            return False
        is_by_position = self.share is not None and self.share.by_position is not None
        if labels.numel() <= self.chunk_tokens and not is_by_position:
            return False
        if self._decoder() is None:
            self._adds_up = False
            name = type(self._model).__name__
            _log.warning("%s computes its loss whole: it has no decoder that leaves it the loss", name)
            return False
        return True

    def _decoder(self) -> nn.Module | None:
        return decoder_of(self._owner)

    def _norm(self, named: Mapping[str, Any]) -> LastNorm | None:
        """Return the norm that chunks may pass in place of whole rows; None: there is none, or it is seen."""
        given = named.get("output_hidden_states")
        if getattr(self._model.config, "output_hidden_states", False) if given is None else given:
            return None
        decoder = self._decoder()
        norm = None if decoder is None else last_norm(decoder)
        return None if norm is None or is_watched(norm.modules[0]) else norm

    def put_away(self) -> PutAway:
        """Take out what belongs to the micro-batch that is running: others run until `put_back`."""
        kept = self.share, self._decoding, None if self._decoding is None else self._decoding.put_away()
        self.share = self._decoding = None
        return kept

    def put_back(self, kept: PutAway) -> None:
        """Put in place what `put_away` returned."""
        self.share, self._decoding, state = kept
        if self._decoding is not None and state is not None:
            self._decoding.put_back(state)

    def _decode(
        self, inner: Callable[..., Any], named: dict[str, Any], norm: LastNorm | None
    ) -> tuple[Any, bool]:
        """Run the decoder as the CausalLM calls it, and nothing after it; `norm` hands long rows on.

        Returns:
            The decoder's result and False; or the CausalLM's own and True, if it has not called the decoder.
        """
        decoder = self._decoder()
        assert decoder is not None
        forward = decoder.forward

        def capture(*args: Any, **kwargs: Any) -> Any:
            stack.close()  # inside, another micro-batch may be let through to the same decoder
            with nullcontext() if norm is None else norm.handing_on(self._dtype):
                raise _Captured(forward(*args, **kwargs))

        self._decoding = norm
        try:
            with ExitStack() as stack:
                stack.enter_context(self._standing_in(capture))
                return inner(**named), True
        except _Captured as captured:
            return captured.output, False
        finally:
            self._decoding = None

    @contextmanager
    def _standing_in(self, forward: Callable[..., Any]) -> Iterator[None]:
        decoder = self._decoder()
        assert decoder is not None
        held = decoder.__dict__.get("forward")
        decoder.__dict__["forward"] = forward
        try:
            with without_hooks(decoder, inside=False):
                yield
        finally:
            if held is None:
                del decoder.__dict__["forward"]
            else:
                decoder.__dict__["forward"] = held

    def _chunked(self, call: Decoded, targets: Tensor) -> ModelOutput:
        norm, hidden = call.norm_of_chunks(), call.output.last_hidden_state
        if isinstance(self.share, RowSums):
            loss_of = partial(self._part, call.without_hidden(), 1)
            return ModelOutput(loss=self._sums(loss_of, hidden, targets, norm=norm))
        flat = targets.reshape(1, -1)
        total = call.named.get("num_items_in_batch")  # of a caller who divides by more than its own tokens
        if total is None:
            total = self.share.total if self.share is not None else int((flat != IGNORED).sum())
        others = Others(call.output) if self._adds_router_loss(call.named) else None
        loss_of = partial(self._part, call.without_hidden(), total, share=self.share, others=others)
        by_position = None if self.share is None else self.share.by_position
        (loss,) = self._sums(loss_of, hidden.flatten(0, -2)[None], flat, total, others, by_position, norm)
        if self.share is not None:
            self.share.was_used = True
        return ModelOutput(loss=loss)

    def _sums(
        self,
        loss_of: Callable[..., Tensor],
        hidden: Tensor,
        targets: Tensor,
        total: int | Tensor = 1,
        others: Others | None = None,
        by_position: ByPosition | None = None,
        norm: NormOfChunks | None = None,
    ) -> Tensor:
        """Add up the loss of each row, in chunks of tokens; auxiliary losses belong to the first one."""
        is_watched = self.linear is None or self.linear.is_watched
        chunks = Chunks(
            loss_of,
            self._weights_of(),
            hidden,
            targets,
            others=None if others is None else others.tensors,
            chunk_tokens=self.chunk_tokens,
            linear=None if is_watched or others is not None else self.linear,
            total=total,
            ends=() if by_position is None else by_position.ends,
            norm=norm,
        )
        losses = chunks.losses()
        if by_position is not None:
            by_position.take(chunks.parts)
        self.chunked_tokens += targets.numel()
        if losses.requires_grad and chunks.runs_again:
            self.rerun_tokens += targets.numel()
        elif losses.requires_grad:
            self.eager_tokens += targets.numel()
        return losses

    def _adds_router_loss(self, named: Mapping[str, Any]) -> bool:
        adds = named.get("output_router_logits")
        return adds_router_loss(self._model.config) if adds is None else bool(adds)

    def _part(
        self,
        call: Decoded,
        total: int | Tensor,
        hidden: Tensor,
        targets: Tensor,
        given: Sequence[Tensor] | None = None,
        *,
        share: Share | None = None,
        others: Others | None = None,
    ) -> Tensor:
        """Compute the loss of one chunk; that of the first one with what a model adds, as the share says.

        Args:
            call: The forward of the CausalLM that computes it.
            total: The number by which sums over tokens are divided.
            hidden: (1, T, H), the hidden states of the chunk.
            targets: (1, T), its labels.
            given: The tensors in place of `others`, in the first chunk; None: in all that come later.
            share: The share of the micro-batch.
            others: The tensors beside hidden states that lead to the loss.
        """
        fields: dict[str, Any] = {} if given is None or others is None else others.fields(given)
        part = replace(call.output, **fields, last_hidden_state=hidden)
        named = {
            **call.named,
            "labels": targets,
            "shift_labels": targets,
            "num_items_in_batch": _scalar(total, hidden),
        }
        if given is None:
            share = None
            if "output_router_logits" in self._signature.parameters:
                named["output_router_logits"] = False
        held, self.share = self.share, share
        try:
            with self._standing_in(lambda *_, **__: part):
                loss: Tensor = call.inner(**named).loss
        finally:
            self.share = held
        return loss if share is None else share.joined(loss)

    @torch.no_grad()
    def _probe(self, call: Decoded) -> bool:
        """Check on a few tokens that chunks add up to the model's own loss; no hook of a user sees it."""
        name = type(self._model).__name__
        inner, named, output = call.inner, call.named, call.output
        try:
            adds_router = self._adds_router_loss(named)
            if adds_router and "output_router_logits" not in self._signature.parameters:
                raise ValueError("its auxiliary loss cannot be left out of a chunk")
            hidden = output.last_hidden_state[:1, :_PROBE_TOKENS].detach()
            hidden = hidden if call.norm is None else call.norm.part(hidden)
            generator = torch.Generator().manual_seed(0)
            labels = torch.randint(0, 2, hidden.shape[:2], generator=generator).to(hidden.device)
            targets = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
            count = int((targets != IGNORED).sum())
            whole_named = {**named, "labels": labels}
            for key in ("shift_labels", "num_items_in_batch"):
                whole_named.pop(key, None)
            if "output_router_logits" in self._signature.parameters:
                whole_named["output_router_logits"] = False
            part = replace(output, last_hidden_state=hidden)
            loss_of = partial(self._part, Decoded(inner, named, output), count)
            linear = self.linear
            half = hidden.shape[1] // 2
            with mock.patch.object(self, "share", None), without_hooks(self._owner):
                with self._standing_in(lambda *_, **__: part):
                    whole = float(inner(**whole_named).loss)
                halves = sum(
                    float(loss_of(hidden[:, span], targets[:, span]))
                    for span in (slice(0, half), slice(half, None))
                )
                others = Others(output)
                leaves = [tensor.detach().requires_grad_() for tensor in others.tensors]
                beside = replace(output, **others.fields(leaves))
                loss_of = partial(self._part, Decoded(inner, named, beside), count, hidden, targets)
                if not adds_router and leads_to(leaves, loss_of):
                    raise ValueError("it depends on more than the last hidden states of its decoder")
                if linear is not None:
                    with self._weights_of().leaves():
                        fused = float(linear.loss(hidden[0], targets[0], count))
        except Exception as error:  # any model's forward may refuse what it has not foreseen
            _log.warning("%s computes its loss whole: %s", name, error)
            return False
        if linear is not None and not _is_close(fused, whole, _tolerance(hidden, linear.form)):
            _log.warning(
                "%s computes its loss by its own code: that of a linear head is %g instead of %g",
                name,
                fused,
                whole,
            )
            self.linear = None
        if _is_close(halves, whole, _PROBE_TOLERANCE):
            return True
        _log.warning("%s computes its loss whole: in chunks it is %g instead of %g", name, halves, whole)
        return False

    def _loss(self, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(self.share, Share) and self._takes_total:
            logits = kwargs["logits"] if "logits" in kwargs else args[0]
            kwargs.setdefault("num_items_in_batch", _scalar(self.share.total, logits))
            self.share.was_used = True
            return self.share.parted(self._original(*args, **kwargs))
        return self._original(*args, **kwargs)


def _tolerance(hidden: Tensor, form: Form) -> float:
    """Return how far a loss may be from the model's own, which rounds logits that it scales or caps."""
    is_rounded = form != Form() and hidden.dtype != torch.float32
    return _ROUNDED_TOLERANCE if is_rounded else _PROBE_TOLERANCE


def _is_close(found: float, expected: float, tolerance: float) -> bool:
    return abs(found - expected) <= tolerance * max(1.0, abs(expected))


def _scalar(value: int | Tensor, like: Tensor) -> Tensor:
    """Make a 0-dim int64 tensor beside `like` by a fill: a copy from the host would wait for the device."""
    if isinstance(value, Tensor):
        return value
    return torch.full((), value, dtype=torch.int64, device=like.device)
