"""Reads what a trainer has saved of its model back into host memory, in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils import is_peft_available

from megatrain.errors import CheckpointError
from megatrain.model.weights.convert import Region
from megatrain.model.weights.files import load_weights
from megatrain.store.state import HostState


def read_weights(model: Any, directory: str, host: HostState, *, reads: bool) -> None:
    """Read the weights of a model, tensor by tensor, or those of the adapter that is trained.

    Args:
        model: Of the trainer.
        directory: A checkpoint.
        host: Of the model; masters are what the weights are then.
        reads: Another rank does not put them there; buffers are each rank's own.

    Raises:
        CheckpointError: There is no adapter in safetensors.
        ModelError: As `load_weights`.
    """
    if not _is_adapter(model):
        load_weights(model, directory, host if reads else _Nowhere())
    elif reads:
        _read_adapter(model, directory, host)


class _Nowhere:
    """Takes parameters that another rank puts into the state of all."""

    def put(self, name: str, value: Tensor, region: Region = ()) -> None:
        """Leave it."""


def _read_adapter(model: Any, directory: str, host: HostState) -> None:
    """Load the active adapter of a `PeftModel` in place; masters are what the weights are then.

    Raises:
        CheckpointError: There is no adapter in safetensors.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    if not (Path(directory) / "adapter_model.safetensors").exists():
        raise CheckpointError(f"{directory} has no adapter_model.safetensors; resume from another checkpoint")
    set_peft_model_state_dict(
        model, load_peft_weights(directory, device="cpu"), adapter_name=model.active_adapters[0]
    )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            host.put(name, parameter.detach().clone())


def _is_adapter(model: Any) -> bool:
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)
