"""Where calls of the model come into the engine: overridden forwards, and what surrounds a pass of the model.

Each decoder layer's `forward` is overridden on the instance by one that runs the same forward on the weights
that the engine brings; those of the model and of its decoder by one that puts the outer weights in place.
Several micro-batches pass in lockstep, each as an ordinary call of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain.errors import ModelError
from megatrain.model.head import Head, Share, count_targets
from megatrain.stream.bind import Binding
from megatrain.stream.execute.compute_work import ComputeWork
from megatrain.stream.forward.attached import AttachedBlock, AttachedLayer
from megatrain.stream.forward.batch_size import MicroBatchSize
from megatrain.stream.forward.compiled import Compiler
from megatrain.stream.forward.layer_visit import LayerVisit
from megatrain.stream.forward.lockstep import Lockstep
from megatrain.stream.forward.overrides import Overrides
from megatrain.stream.forward.passes import Pass, move_buffers, to_device
from megatrain.stream.forward.split_batch import join_outputs, split_batch

if TYPE_CHECKING:
    from megatrain.stream.engine import Engine


class ModelForward:
    """Overrides a model's forwards, and runs its passes for an engine."""

    def __init__(
        self,
        engine: Engine,
        binding: Binding,
        layers: Sequence[AttachedLayer],
        outer: Sequence[AttachedBlock],
        head_chunk_tokens: int | None,
    ) -> None:
        """Override nothing yet.

        Args:
            engine: Whose passes these are.
            binding: Of its model.
            layers: In forward order.
            outer: The blocks in no layer.
            head_chunk_tokens: Of the head and the loss.
        """
        self._engine = engine
        self._model = engine.model
        self._device = engine.lanes.device
        self._binding = binding
        self._layers = layers
        self._outer = outer
        self._pass: Pass | None = None
        self._head = Head(engine.model, head_chunk_tokens, self._stream_again)
        self.lockstep = Lockstep(self, self._device)
        self._overrides = Overrides(engine.model)

    @property
    def is_open(self) -> bool:
        """Whether the model's forward is going on."""
        return self._pass is not None

    @property
    def chunked_tokens(self) -> int:
        """Tokens that have passed the head in chunks."""
        return self._head.chunked_tokens

    # -- shadows --------------------------------------------------------------------------------------------

    def override(self, compiler: Compiler | None) -> None:
        """Let calls of the model, its decoder and its layers come in here; `compiler` runs the layers."""
        move_buffers(self._model, self._device)
        for number, layer in enumerate(self._layers):
            self._override_layer(layer, number, compiler)
        for module in {id(module): module for module in (self._model, self._model.base_model)}.values():
            self._overrides.replace(module, partial(self._enter, module.forward, module is self._model))
            # `save_pretrained` and Trainer read the weights this way, with updates still running
            self._overrides.before_state_dict(module, self._engine.sync)
        self._overrides.refuse_moves()

    def remove(self) -> None:
        """Give the model its own forwards back, and its buffers."""
        self._overrides.remove()
        move_buffers(self._model, torch.device("cpu"))
        self._head.remove()

    def _override_layer(self, layer: AttachedLayer, number: int, compiler: Compiler | None) -> None:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._pass is None:
                raise ModelError(f"block {layer.name} was called outside the model's forward; call the model")
            self.lockstep.give_way(number)
            if getattr(layer.module, "gradient_checkpointing", False):
                layer.module.gradient_checkpointing = False  # type: ignore[assignment]  # ours replaces it
            return LayerVisit(layer, self._pass).call(args, kwargs)

        if compiler is not None and not layer.has_fragments:
            layer.inner = compiler.runner(layer.module, layer.inner)
        self._overrides.replace(layer.module, forward)
        for block in layer.blocks:
            for module in block.block.entries:
                self._override_part(layer, block, module, compiler)

    def _override_part(
        self, layer: AttachedLayer, block: AttachedBlock, module: nn.Module, compiler: Compiler | None
    ) -> None:
        inner = module.forward
        if compiler is not None and module is block.block.entries[0]:  # norms beside it are not worth it
            inner = compiler.runner(module, inner)

        def forward(*args: Any, **kwargs: Any) -> Any:
            layer.enter(block)
            return inner(*args, **kwargs)

        self._overrides.replace(module, forward)

    # -- a step ---------------------------------------------------------------------------------------------

    def run_step(
        self, batches: Sequence[Mapping[str, Any]], counts: Sequence[int], seeds: Sequence[int] | None
    ) -> Tensor:
        """Run a step's micro-batches forward and backward, round by round.

        Args:
            batches: Keyword arguments of the model's forward.
            counts: Tokens to train on in each.
            seeds: One of torch's generators for each; None: the generators go on.

        Returns:
            0-dim detached tensor: the loss, averaged over all trained tokens.
        """
        rounds, together = self._engine.rounds, self._engine.choice.lockstep
        numbers_of_rounds = [
            range(len(batches))[first : first + together] for first in range(0, len(batches), together)
        ]
        rounds.foresee_step([len(numbers) for numbers in numbers_of_rounds])
        total = torch.zeros((), device=self._device)
        for numbers in numbers_of_rounds:
            rounds.num_together = len(numbers)
            calls = [
                partial(
                    self._forward,
                    place,
                    batches[n],
                    Share(sum(counts), counts[n]),
                    seeds[n] if seeds is not None else None,
                )
                for place, n in enumerate(numbers)
            ]
            losses = [calls[0]()] if len(calls) == 1 else self.lockstep.run(calls)
            torch.autograd.backward(losses)
            for loss in losses:
                total = loss.detach() if numbers[0] == 0 and loss is losses[0] else total + loss.detach()
        return total

    def _forward(self, place: int, batch: Mapping[str, Any], share: Share, seed: int | None) -> Tensor:
        """Run one micro-batch, the `place`-th of its round, and return its part of the step's loss."""
        if seed is not None:
            torch.manual_seed(seed)
        self._engine.rounds.micro_batch = place
        with torch.enable_grad(), self._head.over(share):
            loss: Tensor = share.scaled(self._model(**{**batch, "return_dict": True}).loss)
        return loss

    def put_away(self) -> tuple[Pass | None, Share | None]:
        """Take out what belongs to the running micro-batch: others run until `put_back`."""
        kept = self._pass, self._head.share
        if self._pass is not None:
            self._pass.restore()
        self._pass = self._head.share = None
        return kept

    def put_back(self, kept: object) -> None:
        """Put in place what `put_away` returned."""
        assert isinstance(kept, tuple)
        self._pass, self._head.share = kept
        if self._pass is not None:
            self._pass.put()

    # -- a pass ---------------------------------------------------------------------------------------------

    def _enter(self, inner: Callable[..., Any], is_causal_lm: bool, /, *args: Any, **kwargs: Any) -> Any:
        """Run a forward of the model, or of its decoder alone, with its resident weights in place."""
        if self._pass is not None:
            return inner(*args, **kwargs)
        engine = self._engine
        args, kwargs = to_device(args, self._device), to_device(kwargs, self._device)
        if engine.rounds.is_broken:
            engine.rounds.drop()
        rows = engine.micro_batch_size
        if rows is not None and is_causal_lm and torch.is_grad_enabled() and self._is_whole:
            pieces = split_batch(self._head.named(args, kwargs), rows)
            if pieces is not None:
                return self._enter_pieces(inner, pieces)
        named = {"input_ids": args[0], **kwargs} if args else kwargs
        batch = MicroBatchSize.of(named)
        if torch.is_grad_enabled():
            self._binding.check()
            engine.meter.forward(named, batch)
            engine.rounds.begin_pass()
        else:
            engine.meter.pause()
            engine.rounds.foresee_evaluation()
        work, place = self._count_work(), engine.rounds.micro_batch
        if batch is not None:
            work.begin_pass(place, batch.row_tokens, batch.positions)
        engine.executor.begin_pass()
        chunked = self._head.in_chunks(args, kwargs) if is_causal_lm else None
        self._pass = current = self._make_pass()
        try:
            with current:
                output = inner(*args, **kwargs) if chunked is None else self._head.call(inner, chunked)
            if is_causal_lm:
                work.head_forward(place, self._head.chunked_tokens)
            self._watch_backward(output, partial(work.head_backward, place))
            return output
        finally:
            self._pass = None
            engine.executor.end_pass()

    @property
    def _is_whole(self) -> bool:
        """Whether a batch that comes in now is no micro-batch of the engine's own."""
        return self._head.share is None and not self.lockstep.is_running

    def _watch_backward(self, output: Any, passes_head: Callable[[], object]) -> None:
        """Let the time that the head's backward takes count as compute's: no visit ends before it."""
        loss = getattr(output, "loss", None)
        if isinstance(loss, Tensor) and loss.requires_grad:

            def begin(_: Tensor) -> None:
                passes_head()
                self._engine.executor.begin_between()

            loss.register_hook(begin)

    def _count_work(self) -> ComputeWork:
        """Return what says how much each visit computes."""
        engine = self._engine
        if engine.executor.work is None:
            layers = [
                [(block.index, sum(entry.numel for entry in block.layout.entries)) for block in layer.blocks]
                for layer in self._layers
            ]
            engine.executor.work = ComputeWork(engine.meter.flops, layers, engine.choice.policies)
        return engine.executor.work

    def _enter_pieces(self, inner: Callable[..., Any], pieces: Sequence[dict[str, Any]]) -> Any:
        """Run one large batch as micro-batches in lockstep, and return what the whole would."""
        self._engine.rounds.foresee_round(len(pieces))
        as_tuple = pieces[0].get("return_dict") is False
        # Each piece draws on from the same state, so equal rows would get equal masks.
        seeds = torch.randint(2**62, (len(pieces),)).tolist()
        counts = [count_targets(piece) for piece in pieces]
        given = pieces[0].get("num_items_in_batch") is not None

        def call(place: int) -> Any:
            torch.manual_seed(seeds[place])
            self._engine.rounds.micro_batch = place
            share = None if given else Share(sum(counts), counts[place])
            with self._head.over(share):
                named = {**pieces[place], "return_dict": True}
                output = self._enter(inner, True, **named)
            if share is not None:
                output["loss"] = share.scaled(output["loss"])
            return output

        output = join_outputs(self.lockstep.run([partial(call, n) for n in range(len(pieces))]))
        return output.to_tuple() if as_tuple else output

    def _make_pass(self) -> Pass:
        engine, rounds = self._engine, self._engine.rounds
        return Pass(
            self._outer,
            engine.executor,
            engine.slots,
            rounds.begin_backward,
            micro_batch=rounds.micro_batch,
            adds_up=rounds.adds_up,
        )

    def _stream_again(self) -> AbstractContextManager[Any]:
        """Bring the outer blocks once more, for a part of a pass whose gradients must add up in fp32."""
        return self._make_pass()
