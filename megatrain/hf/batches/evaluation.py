"""Predictions of an evaluation by groups of batches; ranks share them out, and each rank gets all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import safetensors.torch
from accelerate.utils import send_to_device
from torch import Tensor

from megatrain.checkpoint.rng import encode_rng, restore_rng
from megatrain.hf.batches.ahead import Ahead, cut_nothing, num_tokens
from megatrain.hf.batches.metric_traces import Traces
from megatrain.hf.ranks import ReadBatches

if TYPE_CHECKING:
    from megatrain.distributed.alone import Alone
    from megatrain.distributed.ranks import Ranks


class Predictions:
    """Predicts batches together with the trainer's own step, and moves the results to the host."""

    def __init__(self, trainer: Any, loss_only: bool, ignore_keys: Sequence[str] | None) -> None:
        """Store the present step of `trainer`; the other values are arguments of `prediction_step`."""
        self._trainer, self._step = trainer, trainer.prediction_step
        self.loss_only, self._ignore_keys = loss_only, ignore_keys

    def of(self, numbers: Sequence[int], batches: Sequence[Any], traces: Traces) -> list[Any]:
        """Return the step's result for each batch; `traces` notes them by these numbers."""

        def call(place: int, inputs: Any) -> Any:
            found = self._step(self._trainer.model, inputs, self.loss_only, ignore_keys=self._ignore_keys)
            traces.note(numbers[place])
            return send_to_device(found, "cpu")

        found: list[Any] = self._trainer.run_together(batches, call, traces)
        return found

    def ahead(self, loader: Any) -> Ahead:
        """Return a loader whose batches are predicted a group ahead of the trainer's loop."""
        trainer = self._trainer

        def find(batches: Sequence[Any]) -> list[Any]:
            traces = Traces(trainer, "eval")
            found = self.of(range(len(batches)), batches, traces)
            traces.put(traces.left)
            return [send_to_device(each, trainer.args.device) for each in found]

        return Ahead(trainer.engine, loader, find, with_logits=not self.loss_only)

    def shared(self, ranks: Ranks | Alone, batches: Iterable[Any]) -> Iterator[Any]:
        """Predict every batch once, by one rank each; return the results of `prediction_step`.

        The metrics that TRL keeps then hold the values of all calls.

        Args:
            ranks: The ranks that call this together.
            batches: The batches of the whole evaluation, which the trainer's loop reads once more.

        Raises:
            ConfigError: The ranks have read different batches.
        """
        trainer = self._trainer
        trainer.model.eval()
        traces, read, random = Traces(trainer, "eval"), ReadBatches(ranks), encode_rng()
        mine: list[Any] = []

        def own() -> Iterator[tuple[int, Any]]:
            for number, batch in enumerate(batches):
                read.add(batch)
                if number % ranks.size == ranks.rank:
                    yield number, batch

        for group in trainer.engine.together.groups(own(), lambda each: num_tokens(each[1])):
            numbers, own_batches = zip(*group, strict=True)
            cut_nothing(batches)
            for number, found in zip(numbers, self.of(numbers, own_batches, traces), strict=True):
                mine.append((number, found, *traces.left[number]))
        restore_rng(random)  # the loop then reads the batches as if for the first time
        read.require_same(trainer.state.global_step, 0)
        tensors: dict[str, Tensor] = {}
        told = ranks.gather_values([_apart(one, tensors) for one in mine], "orders")
        files = ranks.gather_bytes(safetensors.torch.save(tensors), "orders")
        everything: dict[int, Any] = {}
        for values, file in zip(told, files, strict=True):
            found = safetensors.torch.load(file)
            for number, prediction, *left in (_together(value, found) for value in values):
                everything[number] = prediction
                traces.left[number] = tuple(left)
        traces.put(traces.left)
        return (send_to_device(everything[number], trainer.args.device) for number in sorted(everything))


def _apart(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return nested values as plain JSON, with their tensors put into `tensors`."""
    if isinstance(value, Tensor):
        tensors[str(len(tensors))] = value.contiguous().clone()
        return {"tensor": str(len(tensors) - 1)}
    if isinstance(value, Mapping):
        return {"mapping": {name: _apart(each, tensors) for name, each in value.items()}}
    if isinstance(value, (list, tuple)):
        return [_apart(each, tensors) for each in value]
    return value


def _together(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `_apart`; lists become tuples."""
    if isinstance(value, list):
        return tuple(_together(each, tensors) for each in value)
    if isinstance(value, dict) and "tensor" in value:
        return tensors[value["tensor"]]
    if isinstance(value, dict):
        return {name: _together(each, tensors) for name, each in value["mapping"].items()}
    return value
