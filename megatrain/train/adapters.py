"""Runs that train adapters: the contents of their checkpoints, and the check of the base on resume.

A checkpoint has PEFT's two files, `adapter_config.json` and `adapter_model.safetensors`, in place of a
model's. The base is not copied: its name and its fingerprint are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.checkpoint.tensor_files import TensorSource, write_safetensors
from megatrain.config import Config
from megatrain.config.rope import described
from megatrain.errors import CheckpointError, os_errors
from megatrain.files import write_bytes_durably
from megatrain.model.adapters.adapt import adapter_config, adapter_tensors
from megatrain.model.adapters.files import CONFIG_NAME, WEIGHTS_NAME
from megatrain.model.weights.files import model_directory
from megatrain.model.weights.fingerprint import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatrain.stream.engine import Engine


def base_of(config: Config) -> str:
    """Return the place of the base of a run's adapters: an absolute path, or a hub id."""
    path = Path(config.model.path)
    return str(path.absolute()) if path.is_dir() else config.model.path


def scaling_notes(config: Config) -> list[str]:
    """Say that the files of adapters do not hold the scaling of their base, where it is scaled."""
    if config.lora.r is None or config.model.rope_scaling is None:
        return []
    return [
        "the adapters are trained beside a base with scaled positions "
        f"({described(config.model.rope_scaling)}), which their files do not say: give the base the same "
        "rope_parameters wherever they are used, or merge them (megatrain export RUN OUT --merge)"
    ]


def check_base(config: Config, meta: Mapping[str, Any] | None) -> str | None:
    """Return the fingerprint of the base of a run's adapters, or None if the run has none.

    Args:
        config: The settings of the run.
        meta: The manifest of the checkpoint or commit that the run resumes from, if any.

    Raises:
        CheckpointError: One of the two has adapters and the other has none, or their bases differ.
    """
    was = None if meta is None else meta.get("base")
    if config.lora.r is None:
        if was is not None:
            raise CheckpointError(
                "the checkpoint holds adapters, but lora.r is null; use the lora settings of the run, or "
                "train what `megatrain export RUN OUT --merge` writes, in a new run"
            )
        return None
    if meta is not None and was is None:
        raise CheckpointError(
            "the checkpoint holds a whole model and lora.r is given; for adapters beside it, begin a new "
            "run with model.path set to the checkpoint"
        )
    found = fingerprint(model_directory(config.model.path))
    if was not in (None, found):
        raise CheckpointError(
            f"the adapters of the checkpoint were trained beside another model than the one that is now in "
            f"{config.model.path}; set model.path to that one"
        )
    return found


def write_adapter(engine: Engine, tokenizer: PreTrainedTokenizerBase, out: Path, *, base: str) -> None:
    """Write the working weights of the adapters as PEFT saves them, with the tokenizer.

    Raises:
        OutputError: The directory cannot be written.
    """
    engine.settle()
    host = engine.host

    sources = []
    for key, name in sorted(adapter_tensors(engine.model).items()):
        ((_, entry),) = host.places(name)
        sources.append(
            TensorSource(
                name=key,
                dtype=entry.dtype,
                shape=entry.shape,
                get=lambda name=name: host.value(name).clone(),  # type: ignore[misc]
            )
        )
    write_safetensors(out / WEIGHTS_NAME, sources)
    write_bytes_durably(out / CONFIG_NAME, adapter_config(engine.model, base))
    with os_errors("write the tokenizer to", out):
        tokenizer.save_pretrained(out)
