"""The engine: attach to a Hugging Face model, run steps, detach.

The model keeps its own forward. Its parameters become views of the host's working plane; each decoder layer's
`forward` is shadowed on the instance by one that fetches the layer's weights and runs the same forward on
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from megatrain.errors import ConfigError, DataError, ModelError
from megatrain.model.head import Head, count_targets
from megatrain.plan.program import BlockSize, Visit, round_visits
from megatrain.store.state import HostState, Precision
from megatrain.stream.activations import policies
from megatrain.stream.bind import Binding, require_accumulators
from megatrain.stream.executor import Executor
from megatrain.stream.gradients import Gradients
from megatrain.stream.lanes import Lanes
from megatrain.stream.passes import AttachedBlock, Pass, move_buffers, to_device
from megatrain.stream.slots import Slots

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from megatrain.stream.optimizer import StreamedAdamW


class Engine:
    """Streams the blocks of one model; made by `attach`."""

    def __init__(
        self,
        model: PreTrainedModel,
        binding: Binding,
        lanes: Lanes,
        *,
        num_slots: int,
        activations: str | Sequence[str],
        num_gradient_buffers: int,
        head_chunk_tokens: int | None,
        host_limit: int | None,
    ) -> None:
        """Allocate device memory and shadow the forwards; the host state is in `binding`."""
        self.model = model
        self.host: HostState = binding.host
        self.lanes = lanes
        self._binding = binding
        self._host_limit = host_limit
        blocks = binding.blocks
        streamed = [block.is_streamed for block in blocks]
        self._policies = policies(activations, sum(streamed))
        sizes = [
            BlockSize(
                is_streamed=flag,
                is_trained=layout.num_state > 0,
                fetch_bytes=layout.working_bytes,
                offload_bytes=layout.gradient_bytes,
                accumulator_bytes=4 * layout.num_state,
            )
            for flag, layout in zip(streamed, self.host.layouts, strict=True)
        ]
        lanes.lock(self.host.arena("working"))
        self._slots = Slots(lanes, self.host.layouts, streamed, num_slots)
        self.gradients = Gradients(lanes, self.host, streamed, num_gradient_buffers)
        self._executor = Executor(lanes, self.host, sizes, self._slots, self.gradients)
        owners = {
            entry.name: (index, number)
            for index, layout in enumerate(self.host.layouts)
            for number, entry in enumerate(layout.entries)
        }
        attached = [
            AttachedBlock(index, block, layout, executor=self._executor, slots=self._slots, owners=owners)
            for index, (block, layout) in enumerate(zip(blocks, self.host.layouts, strict=True))
        ]
        self._streamed = [block for block in attached if block.block.is_streamed]
        self._residents = [block for block in attached if not block.block.is_streamed]
        self._forward_order = [block.index for block in self._streamed]
        self._backward_order = self._guess_backward_order()
        self._names = [name for name, _ in model.named_parameters()]
        self._pass: Pass | None = None
        self._rounds_foreseen = 0
        self._passes_since_backward = 0
        self._in_backward = False
        self._head = Head(model, head_chunk_tokens, self._bring_again)
        self._optimizer: StreamedAdamW | None = None
        self._shadowed: list[nn.Module] = []
        self._shadow()

    # -- the step -------------------------------------------------------------------------------------------

    def forward_backward(
        self, micro_batches: Sequence[Mapping[str, Any]], *, seeds: Sequence[int] | None = None
    ) -> Tensor:
        """Run a step's micro-batches forward and backward, from zero gradients.

        Args:
            micro_batches: Keyword arguments of the model's forward, `labels` included; one after the other.
            seeds: One seed of torch's generators per micro-batch, set before it; None: the generators go on.

        Returns:
            0-dim detached tensor: the loss, averaged over all trained tokens of the step.

        Raises:
            DataError: No labels, or not one token to train on.
            ConfigError: No micro-batch, or not one seed per micro-batch.
        """
        self.require_attached()
        if isinstance(micro_batches, Mapping):
            raise ConfigError("forward_backward takes a list of micro-batches; put the one batch into a list")
        batches = list(micro_batches)
        if not batches:
            raise ConfigError("forward_backward got no micro-batch; pass a list of at least one")
        if seeds is not None and len(seeds) != len(batches):
            raise ConfigError(f"forward_backward got {len(seeds)} seeds for {len(batches)} micro-batches")
        counts = [count_targets(batch) for batch in batches]
        if sum(counts) == 0:
            raise DataError("the step has no token to train on: every label is -100; check the data's labels")
        self.zero_grad()
        try:
            self._prepare_gradients(accumulates=len(batches) > 1)
            self._foresee_rounds(len(batches))
            total = torch.zeros((), device=self.lanes.device)
            for number, (batch, count) in enumerate(zip(batches, counts, strict=True)):
                if seeds is not None:
                    torch.manual_seed(seeds[number])
                with torch.enable_grad(), self._head.over(sum(counts), count):
                    loss = self._head.scaled(self.model(**{**batch, "return_dict": True}).loss)
                loss.backward()
                total = loss.detach() if number == 0 else total + loss.detach()
            self._executor.take_gradients_home()
        except CheckpointError as error:
            self._recover()
            raise ModelError(
                f"{type(self.model).__name__} has a block that does not compute the same twice (it keeps "
                "state between calls), so its activations cannot be recomputed; use activations='keep'"
            ) from error
        except BaseException:
            self._recover()
            raise
        return total

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, gradient) lazily: fp32 host tensors, valid until `opt.step()`.

        Names are those of `model.named_parameters()`. A parameter without a gradient in this step is left
        out.
        """
        self._executor.take_gradients_home()
        return self.gradients.named(self._names)

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, master) lazily for every parameter, frozen ones too: new fp32 host tensors."""
        for name in self._names:
            block, entry = self.host.find(name)
            yield name, block.master(entry)

    def adamw(
        self,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        max_grad_norm: float | None = 1.0,
        no_decay: Iterable[str] | None = None,
    ) -> StreamedAdamW:
        """Make the optimizer of all trained parameters; its state is allocated here.

        Args:
            lr: Learning rate; schedulers write `param_groups[i]["lr"]`.
            betas: Decay of the two moments.
            eps: Added to the root of the second moment.
            weight_decay: Decoupled decay of all parameters but `no_decay`.
            max_grad_norm: Clip the global norm to this; None: no clipping.
            no_decay: Patterns (`fnmatch`) of parameter names without decay. None: biases and parameters of
                fewer than two dimensions, which is where norms are. An empty list: every parameter decays.

        Raises:
            ConfigError: A hyper-parameter out of range, or a second optimizer.
            ModelError: A parameter is trained but was not there, or was frozen, when the engine was attached.
        """
        from megatrain.stream.optimizer import StreamedAdamW

        if self._optimizer is not None:
            raise ConfigError("the engine has an optimizer already; one engine trains with one optimizer")
        self._optimizer = StreamedAdamW(
            self,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            no_decay=no_decay,
        )
        return self._optimizer

    def require_attached(self) -> None:
        """Raise ModelError after detach."""
        if self.model.__dict__.get("_megatrain_engine") is not self:
            raise ModelError("the engine was detached from its model; call megatrain.attach again")

    def zero_grad(self) -> None:
        """Drop the gradients gathered since the last step."""
        self.gradients.clear()

    def sync(self) -> None:
        """Make the host state whole, for a reader of weights.

        With the `serial` schedule it is whole when `opt.step()` has returned, so there is no wait. Callers
        call it all the same, for schedules that update in the background.
        """

    # -- numbers --------------------------------------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        """Bytes of all planes of state on the host."""
        return self.host.host_bytes

    @property
    def device_bytes_peak(self) -> int:
        """Most bytes on the device so far.

        On CUDA all that torch allocated; elsewhere slots, resident blocks and gradient buffers.
        """
        return self.lanes.peak_bytes

    @property
    def bytes_fetched(self) -> int:
        """Bytes copied to the device since attach."""
        return self._executor.fetched_bytes

    @property
    def bytes_offloaded(self) -> int:
        """Bytes of gradients copied home since attach."""
        return self._executor.offloaded_bytes

    @property
    def executor(self) -> Executor:
        """What moves the bytes."""
        return self._executor

    # -- attaching ------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Give the model back: its parameters keep their values, in the working dtype, in host memory."""
        if self.model.__dict__.get("_megatrain_engine") is not self:
            return
        for module in self._shadowed:
            del module.__dict__["forward"]
        self._shadowed.clear()
        self.model.__dict__.pop("_apply", None)
        self.model.__dict__.pop("__deepcopy__", None)
        move_buffers(self.model, torch.device("cpu"))
        self._head.remove()
        self.lanes.close()
        self.model._megatrain_engine = None

    def _shadow(self) -> None:
        move_buffers(self.model, self.lanes.device)
        for block, policy in zip(self._streamed, self._policies, strict=True):
            assert block.module is not None

            def forward(*args: Any, block: AttachedBlock = block, policy: Any = policy, **kwargs: Any) -> Any:
                if self._pass is None:
                    raise ModelError(
                        f"block {block.block.name} was called outside the model's forward; call the model"
                    )
                return block.forward(self._pass, policy, args, kwargs)

            self._replace_forward(block.module, forward)
        entries = {id(module): module for module in (self.model, self.model.base_model)}
        for module in entries.values():
            inner = module.forward

            is_causal_lm = module is self.model

            def enter(
                *args: Any,
                inner: Callable[..., Any] = inner,
                is_causal_lm: bool = is_causal_lm,
                **kwargs: Any,
            ) -> Any:
                return self._enter(inner, args, kwargs, is_causal_lm=is_causal_lm)

            self._replace_forward(module, enter)
        self.model.__dict__["_apply"] = self._refuse_apply
        self.model.__dict__["__deepcopy__"] = self._refuse_copy
        self.model.__dict__["_megatrain_engine"] = self

    def _replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        forward.__wrapped__ = module.forward  # type: ignore[attr-defined]  # inspect.signature sees the model's own
        module.__dict__["forward"] = forward
        self._shadowed.append(module)

    def _refuse_apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        probe = torch.zeros(1, dtype=next(self.model.parameters()).dtype)
        moved = function(probe)
        if moved.device != probe.device or moved.dtype != probe.dtype:
            raise ModelError(
                "the model is attached to an engine, which owns its device and dtype; "
                "call engine.detach() before .to(), .cuda() or .half()"
            )
        return self.model

    def _refuse_copy(self, _: dict[int, Any]) -> PreTrainedModel:
        raise ModelError(
            "the model is attached to an engine; copy it before megatrain.attach, or load it twice"
        )

    def _enter(
        self,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_causal_lm: bool,
    ) -> Any:
        """Run a forward of the model with its resident weights in place."""
        if self._pass is not None:
            return inner(*args, **kwargs)
        args, kwargs = to_device(args, self.lanes.device), to_device(kwargs, self.lanes.device)
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            self._drop_round()  # a backward of the caller's ended in an exception
        if torch.is_grad_enabled():
            self._binding.check()
            self._begin_round()
        else:
            self._executor.foresee(Visit(block) for block in self._forward_order)
        self._executor.begin_pass()
        self._pass = Pass(self._residents, self._executor, self._on_backward)
        try:
            with self._pass.swapped():
                if is_causal_lm:
                    return self._head.call(inner, args, kwargs)
                return inner(*args, **kwargs)
        finally:
            self._pass = None
            self._executor.end_pass()

    def _bring_again(self) -> AbstractContextManager[None]:
        """Bring the resident blocks once more, for a part of a pass whose gradients must add up in fp32."""
        return Pass(self._residents, self._executor, self._on_backward).swapped()

    def _begin_round(self) -> None:
        self._passes_since_backward += 1
        if self._rounds_foreseen:
            self._rounds_foreseen -= 1
            return
        has_gradients = bool(self.gradients.blocks)
        self._prepare_gradients(accumulates=has_gradients)
        self._executor.foresee(
            round_visits(
                self._forward_order,
                self._backward_order,
                loads=has_gradients,
                completes=not has_gradients or self.host.precision is Precision.FP32,
            )
        )

    def _prepare_gradients(self, *, accumulates: bool) -> None:
        require_accumulators(self.host, accumulates=accumulates, limit=self._host_limit)
        self._executor.prepare_gradients(accumulates=accumulates)

    def _foresee_rounds(self, num_rounds: int) -> None:
        visits: list[Visit] = []
        for number in range(num_rounds):
            visits += round_visits(
                self._forward_order,
                self._backward_order,
                loads=number > 0,
                completes=number == num_rounds - 1,
            )
        self._executor.foresee(visits)
        self._rounds_foreseen = num_rounds

    def _on_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False
        self._executor.end_backward()
        if self._passes_since_backward == 1:
            self._learn_orders()
        self._passes_since_backward = 0

    def _learn_orders(self) -> None:
        seen = self._executor.take_seen()
        self._forward_order = [visit.block for visit in seen if not visit.is_backward]
        self._backward_order = [visit.block for visit in seen if visit.is_backward]

    def _guess_backward_order(self) -> list[int]:
        """Backward passes every block that has, or comes after, something trained."""
        if any(block.layout.num_state for block in self._residents):
            return self._forward_order[::-1]
        first = next((n for n, block in enumerate(self._streamed) if block.layout.num_state), 0)
        return self._forward_order[first:][::-1]

    def _recover(self) -> None:
        """After an exception inside a step: drop the step."""
        self._drop_round()
        self.zero_grad()

    def _drop_round(self) -> None:
        self._in_backward = False
        self._rounds_foreseen = 0
        self._passes_since_backward = 0
        self._executor.abandon()
