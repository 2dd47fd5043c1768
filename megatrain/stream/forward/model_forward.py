"""Where calls of the model come into the engine: overridden forwards, and what surrounds a pass of the model.

Each decoder layer's `forward` is overridden on the instance by one that runs the same forward on the weights
that the engine streams; those of the model and of its decoder by one that puts the outer weights in place.
Several micro-batches pass in lockstep, each as an ordinary call of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megatrain.errors import ConfigError, ModelError
from megatrain.model.adapters.adapted_parameters import ATTRIBUTE, adapters_of_parameters
from megatrain.model.documents.begins import documents, read_documents
from megatrain.model.experts.apart import part_to_compile
from megatrain.model.head.head import Head, PutAway
from megatrain.model.masks import refuse_given_masks
from megatrain.model.sequence.attention import SharedRows
from megatrain.model.shares import count_targets
from megatrain.model.tiles.first_input import is_done_with_embeddings
from megatrain.model.tiles.position_wise import stand_ins
from megatrain.model.watched import is_watched
from megatrain.model.weights.kept import refuse_to_save
from megatrain.stream.forward.arrangement import Arrangement
from megatrain.stream.forward.attached import AttachedBlock, AttachedLayer
from megatrain.stream.forward.compiled import Compiler
from megatrain.stream.forward.layer_visit import LayerVisit
from megatrain.stream.forward.micro_batches import MicroBatchSize, join_outputs, split_batch
from megatrain.stream.forward.outer_visits import let_reads_stream, refuse_calls_beside
from megatrain.stream.forward.overrides import Overrides
from megatrain.stream.forward.passes import ChunkWeights, Pass, move_buffers, to_device
from megatrain.stream.forward.shared_state import SharedState
from megatrain.stream.forward.turns import Turn, Turns

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_WARNS = "warn_if_padding_and_no_attention_mask"
"""A method of transformers' models, which some of them call in their forward."""


class PassWatcher(Protocol):
    """Is told of every pass of the model before it begins."""

    def forward(self, named: Mapping[str, Any], batch: MicroBatchSize | None) -> None:
        """Take note of a micro-batch to train on, given by name; None: its size is not known."""

    def pause(self) -> None:
        """Take note of a pass without gradients."""


class ModelForward:
    """Overrides a model's forwards, and runs its passes."""

    def __init__(
        self,
        model: PreTrainedModel,
        arrangement: Arrangement,
        watcher: PassWatcher,
        rows: SharedRows | None = None,
        *,
        head_chunk_tokens: int | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        """Override nothing yet.

        Args:
            model: The model whose passes these are.
            arrangement: The parts that stream its blocks.
            watcher: The watcher, which measures the steps.
            rows: The rows of a step that ranks share out; None: each has whole ones.
            head_chunk_tokens: The number of tokens in a chunk of the head and the loss.
            micro_batch_size: The number of rows of the micro-batches into which a larger batch of
                `model(**batch)` is split; None: none is.
        """
        self._model = model
        inside = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._decoder = inside.base_model
        modules = (model, model.base_model, inside, self._decoder)
        self._entries = list({id(module): module for module in modules}.values())
        """Whose forwards begin a pass: of a PeftModel also those inside, which `generate` calls."""
        self._device = arrangement.lanes.device
        self._arrangement = arrangement
        self._watcher = watcher
        self._rows = rows
        self._micro_batch_size = micro_batch_size
        self._pass: Pass | None = None
        self._is_in_chunk = False
        """A chunk of the head runs, and finds weights in place of the modules' own."""
        self._tiles: dict[nn.Module, Callable[..., Any]] = {}
        """What stands for modules that rows pass in tiles."""
        self._is_done_with_embeddings = False
        """Whether nothing but the first layer reads what the embedding returns."""
        self._near_embeddings: list[nn.Module] = []
        """The modules whose hooks may see the embeddings: those of the first layer, and outside of layers."""
        self._is_removed = False
        self._shared_state = SharedState(model)
        is_fused = self._device.type != "cpu"
        self.head = Head(model, head_chunk_tokens, self._chunk_weights, is_fused=is_fused)
        self.turns = Turns(self, arrangement, model)
        self._overrides = Overrides(model)

    @property
    def is_open(self) -> bool:
        """Whether the model's forward is going on."""
        return self._pass is not None

    # -- overrides ------------------------------------------------------------------------------------------

    def override(
        self, compiler: Compiler | None, sync: Callable[[], None], optimizer: type[Optimizer]
    ) -> None:
        """Let calls of the model, its decoder and its layers come in here.

        Args:
            compiler: The compiler that runs the layers; None: they run as they are.
            sync: The function that is called before anybody reads the model's state.
            optimizer: The kind of optimizer with which the engine trains; others are refused.
        """
        move_buffers(self._model, self._device)
        batch = self._arrangement.binding.job.batch
        if batch is not None and batch.tile:
            self._tiles = stand_ins(
                self._model,
                self._arrangement.layer_modules,
                batch.tile,
                compiled=None if compiler is None else compiler.runner,
                are_apart=self._are_apart,
            )
            self._is_done_with_embeddings = is_done_with_embeddings(self._model.config)
            later = {part for layer in self._arrangement.layer_modules[1:] for part in layer.modules()}
            self._near_embeddings = [
                part for part in self._model.modules() if part not in later and part not in self._entries
            ]
        for module, stand_in in self._tiles.items():
            self._overrides.replace(module, stand_in)
        for number, layer in enumerate(self._arrangement.layers):
            self._override_layer(layer, number, compiler)
        for module in self._entries:
            if self._device.type != "cpu" and hasattr(module, _WARNS):
                # it reads tokens from the device in every pass, to warn once of padding without a mask
                self._overrides.put(module, _WARNS, lambda *_, **__: None)
            self._overrides.replace(module, partial(self._enter, module.forward, module))
            # `save_pretrained` and Trainer read the weights this way, with updates still running
            self._overrides.before_state_dict(module, sync)
        if any(layout.encoded for layout in self._arrangement.host.layouts):
            self._overrides.put(self._model, "save_pretrained", refuse_to_save)
        for block in self._arrangement.outer:
            refuse_calls_beside(block, self._overrides, self._arrangement.host, self._runs)
            if block.block.caller is not None:
                self._override_outer(block, block.block.caller)
                if block.block.is_head:
                    self._overrides.on_removal(let_reads_stream(block, self._read_head))
        layers = self._arrangement.layers
        apart = {layer.experts.module: layer.adapters for layer in layers if layer.experts is not None}
        for module, activate in adapters_of_parameters(self._model, apart):
            self._overrides.put(module, ATTRIBUTE, activate)
        self._overrides.refuse_moves(self._device)
        blocks = self._arrangement.binding.blocks
        parameters = {name: tensor for block in blocks for name, tensor in block.parameters.items()}
        self._overrides.refuse_optimizers(parameters, optimizer)

    def _are_apart(self, norm: nn.Module, module: nn.Module) -> bool:
        """Whether two modules of a layer are in two fragments of it."""
        blocks = [block.block for layer in self._arrangement.layers for block in layer.blocks]
        return any((norm in block.entries) != (module in block.entries) for block in blocks)

    def adopt_forward(self) -> None:
        """Let calls come in through the forward that the model has now, put on it after `override`.

        Raises:
            ConfigError: Large batches are to be split, and nobody knows how its results are joined.
        """
        if self._overrides.is_own_forward():
            return
        if self._micro_batch_size is not None:
            raise ConfigError(
                f"micro_batch_size is {self._micro_batch_size}, but the model's forward was replaced by one "
                "whose results cannot be joined; attach without it, and pass smaller batches"
            )
        self._overrides.replace(self._model, partial(self._enter, self._model.forward, self._model))

    def _runs(self) -> bool:
        """Whether outer blocks find their weights, in a pass or in chunks of its head that run again."""
        return self._pass is not None or self._is_in_chunk

    def _read_head(self, block: AttachedBlock) -> Mapping[str, Tensor] | None:
        """Stream the head's weights for somebody who reads them; None: they are there."""
        if self._pass is None or block in self._arrangement.resident_outer:
            return None
        return self._pass.visit_outer(block).read()

    def _override_outer(self, block: AttachedBlock, module: nn.Module) -> None:
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._pass is None or self._is_in_chunk or block in self._arrangement.resident_outer:
                return inner(*args, **kwargs)
            return self._pass.visit_outer(block).run(inner, args, kwargs)

        self._overrides.replace(module, forward)

    def remove(self) -> None:
        """Give the model its own forwards back, and its buffers."""
        self._is_removed = True  # who replaced the model's forward goes on calling the one that was there
        self._overrides.remove()
        self.turns.frequencies.remove()
        move_buffers(self._model, torch.device("cpu"))
        self.head.remove()

    def _override_layer(self, layer: AttachedLayer, number: int, compiler: Compiler | None) -> None:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._pass is None:
                raise ModelError(f"block {layer.name} was called outside the model's forward; call the model")
            self.turns.lockstep.give_way(number)
            if getattr(layer.module, "gradient_checkpointing", False):
                layer.module.gradient_checkpointing = False  # type: ignore[assignment]  # ours replaces it
            result = LayerVisit(layer, self._pass).call(args, kwargs)
            return self._enter_head(result) if number == last else result

        last = len(self._arrangement.layers) - 1
        apart = [module for module in layer.module.modules() if module in self._tiles]
        batch = self._arrangement.binding.job.batch
        layer.tile = batch.tile if batch is not None and apart else 0
        layer.is_first = number == 0
        if layer.experts is not None:
            layer.give_way = lambda place: self.turns.lockstep.give_way(number + place)
            self._overrides.replace(layer.experts.module, partial(AttachedLayer.run_experts, layer))
            apart.append(layer.experts.module)
        if apart:
            part = part_to_compile(layer.module, apart)
            if compiler is not None and part is not None and not layer.has_fragments:
                self._overrides.replace(part, compiler.runner(part, part.forward))
        elif compiler is not None and not layer.has_fragments:
            layer.inner = compiler.runner(layer.module, layer.inner)
            layer.leave_routers(layer.module)
        self._overrides.replace(layer.module, forward)
        for block in layer.blocks:
            for module in block.block.entries:
                self._override_part(layer, block, module, compiler)

    def _override_part(
        self, layer: AttachedLayer, block: AttachedBlock, module: nn.Module, compiler: Compiler | None
    ) -> None:
        inner = module.forward
        is_first = module is block.block.entries[0]  # norms beside it are not worth it
        if compiler is not None and is_first and module not in self._tiles:
            inner = compiler.runner(module, inner)
            layer.leave_routers(module)

        def forward(*args: Any, **kwargs: Any) -> Any:
            layer.enter(block)
            return inner(*args, **kwargs)

        self._overrides.replace(module, forward)

    # -- turns ----------------------------------------------------------------------------------------------

    def put_away(self) -> tuple[Pass | None, PutAway, Turn | None, object]:
        """Take out what belongs to the running micro-batch: others run until `put_back`."""
        kept = self._pass, self.head.put_away(), self.turns.current, self._shared_state.now()
        if self._pass is not None:
            self._pass.restore()
        self._pass = self.turns.current = None
        return kept

    def put_back(self, kept: object) -> None:
        """Put in place what `put_away` returned; raises SharedStateError as `SharedState.require`."""
        assert isinstance(kept, tuple)
        self._shared_state.require(kept[-1])
        self._pass, of_head, self.turns.current, _ = kept
        self.head.put_back(of_head)
        if self._pass is not None:
            self._pass.put()

    # -- a pass ---------------------------------------------------------------------------------------------

    def _enter_head(self, output: Any) -> Any:
        """Return the last layer's output for the head, once it is the running micro-batch's turn."""
        self.turns.give_way_to_head()
        assert self._pass is not None
        if not torch.is_grad_enabled():
            return output
        turn = self.turns.current
        return self._pass.enter_head(output, None if turn is None else turn.cuts)

    def _enter(self, inner: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run a forward of the model, or of its decoder alone, with its resident weights in place."""
        if self._is_removed:
            return inner(*args, **kwargs)
        is_causal_lm = module is self._model
        if self._pass is not None:
            if is_causal_lm:  # of a forward that has taken its place, and in which the pass has begun
                return self._call(inner, args, kwargs)()
            output = inner(*args, **kwargs)
            if module is self._decoder and not self._pass.is_in_head:  # its last layer was skipped
                self.turns.give_way_to_head()
            return output
        arrangement, rounds = self._arrangement, self._arrangement.rounds
        self.turns.give_way_to_pass()
        refuse_given_masks(self._model, (args, kwargs))
        rounds.recover()
        if torch.is_grad_enabled() and self._is_whole:
            arrangement.binding.check()
            rows = self._micro_batch_size if is_causal_lm else None
            pieces = None if rows is None else split_batch(self.head.named(args, kwargs), rows)
            if pieces is not None:
                return self._enter_pieces(inner, pieces)
        part = self._rows.index if self._rows is not None and self._rows.is_active else None
        packed, told = read_documents(self._model.config, args, kwargs, part)
        args, kwargs = to_device(args, self._device), to_device({**told, **kwargs}, self._device)
        named = {"input_ids": args[0], **kwargs} if args else kwargs
        self._announce(named, is_causal_lm=is_causal_lm)
        work, place = arrangement.work, rounds.micro_batch
        arrangement.executor.begin_pass()
        self._pass = current = Pass(arrangement)
        current.lets_go_of_embeddings = self._lets_go_of_embeddings(named)
        try:
            with documents(packed), current:
                output = self._call(inner, args, kwargs)() if is_causal_lm else inner(*args, **kwargs)
            if is_causal_lm:
                head = self.head
                arrangement.counts.chunked_tokens = head.chunked_tokens
                arrangement.counts.rerun_tokens = head.rerun_tokens
                work.head_forward(place, rerun_tokens=head.rerun_tokens, eager_tokens=head.eager_tokens)
            self._watch_backward(output, partial(work.head_backward, place))
            return output
        finally:
            self._pass = None
            arrangement.executor.end_pass()

    def _announce(self, named: Mapping[str, Any], *, is_causal_lm: bool) -> None:
        """Tell everybody of the pass that begins, with these arguments."""
        arrangement, rounds, turn = self._arrangement, self._arrangement.rounds, self.turns.current
        batch = MicroBatchSize.of(named, 1 if self._rows is None else self._rows.parts)
        if torch.is_grad_enabled():
            if turn is not None:
                turn.require_gradients()
            if not is_causal_lm:
                self._overrides.require_own_forward()
            self._watcher.forward(named, batch)
            rounds.begin_pass()
        elif turn is None:
            self._watcher.pause()
            rounds.foresee_evaluation()
        if turn is not None:
            rounds.micro_batch = turn.number(rounds.num_together)
        if batch is not None:
            arrangement.work.begin_pass(rounds.micro_batch, batch.row_tokens, batch.positions)

    def _call(
        self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any]:
        """Return the call of a CausalLM's forward, with its head in chunks if that is wanted, and its own."""
        chunked = self.head.in_chunks(args, kwargs) if self.head.is_own(inner) else None
        return partial(inner, *args, **kwargs) if chunked is None else partial(self.head.call, inner, chunked)

    def _lets_go_of_embeddings(self, named: Mapping[str, Any]) -> bool:
        """Whether the embeddings of a pass are the model's own, and nobody has asked for them."""
        wants = named.get("output_hidden_states")
        if wants is None:
            wants = self._model.config.get_text_config().output_hidden_states
        return self._is_done_with_embeddings and not (
            wants or named.get("inputs_embeds") is not None or any(map(is_watched, self._near_embeddings))
        )

    @property
    def _is_whole(self) -> bool:
        """Whether a batch that comes in now is no micro-batch of the engine's own."""
        return self.turns.current is None and not self.turns.lockstep.is_running

    def _watch_backward(self, output: Any, passes_head: Callable[[], object]) -> None:
        """Let the time that the head's backward takes count as compute's: no visit ends before it."""
        loss = getattr(output, "loss", None)
        if isinstance(loss, Tensor) and loss.requires_grad:

            def begin(_: Tensor) -> None:
                passes_head()
                self._arrangement.executor.begin_between()

            loss.register_hook(begin)

    def _enter_pieces(self, inner: Callable[..., Any], pieces: Sequence[dict[str, Any]]) -> Any:
        """Run one large batch as micro-batches in lockstep, and return what the whole would."""
        together = self._arrangement.rounds.foresee_round(len(pieces))
        as_tuple = pieces[0].get("return_dict") is False
        # Each piece draws on from the same state, so equal rows would get equal masks.
        seeds = torch.randint(2**62, (len(pieces),)).tolist()
        counts = [count_targets(piece) for piece in pieces]

        def call(place: int) -> Any:
            torch.manual_seed(seeds[place])
            self._arrangement.rounds.micro_batch = place
            named = {**pieces[place], "return_dict": True}
            share = self.head.share_of(named, counts[place], total=sum(counts), num_micro_batches=len(pieces))
            with self.head.over(share):
                output = self._enter(inner, self._model, **named)
            output["loss"] = share.scaled(output["loss"])
            return output

        calls = [partial(call, number) for number in range(len(pieces))]
        run = self.turns.lockstep.run
        output = join_outputs(run(calls, heads_in_turn=False, in_succession=not together))
        return output.to_tuple() if as_tuple else output

    def _chunk_weights(self) -> ChunkWeights:
        """Return the weights of the running pass's head, for chunks of it."""
        assert self._pass is not None
        turns = self.turns
        return self._pass.chunk_weights(
            is_followed=turns.is_head_followed, is_plain=turns.has_plain_loss, around=self._in_chunk
        )

    @contextmanager
    def _in_chunk(self) -> Iterator[None]:
        held, self._is_in_chunk = self._is_in_chunk, True
        try:
            yield
        finally:
            self._is_in_chunk = held
