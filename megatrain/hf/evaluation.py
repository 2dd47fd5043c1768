"""Predictions of an evaluation, shared out among ranks: every rank gets all of them, as if it were alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import safetensors.torch
from accelerate.utils import send_to_device
from torch import Tensor

from megatrain.checkpoint.rng import encode_rng, restore_rng
from megatrain.hf.ranks import ReadBatches
from megatrain.hf.traces import Traces

if TYPE_CHECKING:
    from megatrain.distributed.ranks import Ranks


def shared_predictions(
    trainer: Any, ranks: Ranks, batches: Iterable[Any], loss_only: bool, ignore_keys: Sequence[str] | None
) -> Iterator[Any]:
    """Predict every batch once, by one rank each; return what `prediction_step` of each returned.

    The metrics that TRL keeps have what all calls have left there.

    Args:
        trainer: Whose step predicts.
        ranks: That call this together.
        batches: Of the whole evaluation; they are read once more by the trainer's loop.
        loss_only: As in `prediction_step`.
        ignore_keys: Likewise.

    Raises:
        ConfigError: Ranks have read different batches.
    """
    trainer.model.eval()
    traces, read, random = Traces(trainer, "eval"), ReadBatches(ranks), encode_rng()
    mine: list[Any] = []
    for number, batch in enumerate(batches):
        read.add(batch)
        if number % ranks.size == ranks.rank:
            found = trainer.prediction_step(trainer.model, batch, loss_only, ignore_keys=ignore_keys)
            traces.note(number)
            mine.append((number, send_to_device(found, "cpu"), *traces.left[number]))
    restore_rng(random)  # the loop reads the batches as if nobody had
    read.require_same(trainer.state.global_step, 0)
    tensors: dict[str, Tensor] = {}
    told = ranks.gather_values([_apart(one, tensors) for one in mine], "orders")
    files = ranks.gather_bytes(safetensors.torch.save(tensors), "orders")
    everything: dict[int, Any] = {}
    for values, file in zip(told, files, strict=True):
        found = safetensors.torch.load(file)
        for number, predicted, *left in (_together(value, found) for value in values):
            everything[number] = predicted
            traces.left[number] = tuple(left)
    traces.put(traces.left)
    return (send_to_device(everything[number], trainer.args.device) for number in sorted(everything))


def _apart(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return nested values as plain JSON, of which the tensors are put beside it."""
    if isinstance(value, Tensor):
        tensors[str(len(tensors))] = value.contiguous().clone()
        return {"tensor": str(len(tensors) - 1)}
    if isinstance(value, Mapping):
        return {"mapping": {name: _apart(each, tensors) for name, each in value.items()}}
    if isinstance(value, (list, tuple)):
        return [_apart(each, tensors) for each in value]
    return value


def _together(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `_apart`; what was a list is a tuple."""
    if isinstance(value, list):
        return tuple(_together(each, tensors) for each in value)
    if isinstance(value, dict) and "tensor" in value:
        return tensors[value["tensor"]]
    if isinstance(value, dict):
        return {name: _together(each, tensors) for name, each in value["mapping"].items()}
    return value
