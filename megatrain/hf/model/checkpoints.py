"""The engine's state that a trainer saves beside the plain checkpoint, and reads back in place."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.utils import is_peft_available

from megatrain.errors import CheckpointError
from megatrain.files import write_bytes_durably
from megatrain.model.weights.encoding import Region
from megatrain.model.weights.files import INDEX_NAME, WEIGHTS_NAME, load_weights
from megatrain.model.weights.reading import open_weights, require_finite
from megatrain.model.weights.shards import Shard, ShardWriter
from megatrain.model.weights.untouched import UNTOUCHED
from megatrain.store.state import HostState
from megatrain.stream.engine import Engine
from megatrain.train.resume.state import has_state, lend_state, read_state, remove_state, write_state

if TYPE_CHECKING:
    from megatrain.distributed.alone import Alone
    from megatrain.distributed.ranks import Ranks

_log = logging.getLogger(__name__)

_SUMS = "megatrain.json"
"""The file of a checkpoint that says into how many runs its steps were cut."""


_BESIDE = "model-untouched.safetensors"
"""The file of a saved model for weights that its class has no place for; the index names it."""


def save_untouched(model: Any, directory: Path) -> None:
    """Write the weights that a model was loaded with and has no place for, beside those that are saved.

    Args:
        model: The model of the trainer; one with adapters, which alone are saved, has no such weights.
        directory: The directory of its weights.

    Raises:
        OutputError: The file cannot be written.
        ModelError: The files that the model was loaded from cannot be read.
    """
    untouched = vars(model).get(UNTOUCHED)
    if untouched is None:
        return
    shard = Shard(name=_BESIDE)
    for key, (dtype, shape) in untouched.specs.items():
        shard.add(key, dtype, shape)
    with ShardWriter(directory / _BESIDE, shard, []) as writer:
        for key, value in untouched.values():
            writer.write(key, value)
    files = [file for file in sorted(directory.glob("model*.safetensors")) if file.name != _BESIDE]
    if (single := directory / WEIGHTS_NAME) in files:
        files = [single]  # others are of an earlier save
    weight_map = dict.fromkeys(shard.tensors, _BESIDE)
    total_bytes = shard.num_bytes
    for file in files:
        with open_weights(file) as weights:
            weight_map |= dict.fromkeys(weights.keys(), file.name)
            total_bytes += sum(weights.get_tensor(key).nbytes for key in weights.keys())  # noqa: SIM118
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_bytes_durably(directory / INDEX_NAME, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())


class Checkpoints:
    """Writes and reads the state of one engine."""

    def __init__(self, engine: Engine, ranks: Ranks | Alone, num_runs: int) -> None:
        """Keep the state of `engine`, which ranks share, with the number of runs of all their steps."""
        self._engine, self._ranks = engine, ranks
        batch = engine.arrangement.binding.job.batch
        self._sums = {"shards": num_runs, "tile_tokens": 0 if batch is None else batch.tile}
        """What decides how sums round, as arguments."""

    def write(self, directory: Path) -> None:
        """Write the state into a checkpoint; with several ranks, the first one does."""
        if self._ranks.rank == 0:
            remove_state(directory)  # left by an earlier run, whose directory Trainer overwrites
            write_state(self._engine, directory)
            (directory / _SUMS).write_text(json.dumps(self._sums))
        elif self._engine.host.is_read_by_all:
            lend_state(self._engine)

    def read_weights(self, model: Any, checkpoint: str) -> None:
        """Read weights into host memory, tensor by tensor, or those of the adapter that is trained.

        Raises:
            CheckpointError: There is no such directory, or no adapter in safetensors.
            ModelError: `load_weights` raises it.
        """
        if not Path(checkpoint).is_dir():
            raise CheckpointError(
                f"there is no checkpoint {checkpoint}; give resume_from_checkpoint a directory checkpoint-N, "
                "or True for the newest one of output_dir"
            )
        self._engine.sync()
        with self._in_turn() as reads:
            read_weights(model, checkpoint, self._engine.host, reads=reads)
            self._engine.weights_changed()

    def read(self, checkpoint: Path) -> None:
        """Read the state, if there is one.

        Raises:
            CheckpointError: A plain trainer has saved its optimizer there.
        """
        if not has_state(checkpoint):
            if (checkpoint / "optimizer.pt").exists():
                raise CheckpointError(
                    f"{checkpoint} was saved by a plain trainer, whose optimizer state is of another form; "
                    "begin a new run from its weights, or resume it with the plain trainer"
                )
            return
        self._warn_of_sums(checkpoint)
        self._engine.settle()
        with self._in_turn() as reads:
            read_state(self._engine.host, checkpoint, reads=reads)
            self._engine.weights_changed()

    def _warn_of_sums(self, checkpoint: Path) -> None:
        """Warn that a resumed run adds up in other sums than before."""
        place = checkpoint / _SUMS
        saved = {"shards": 1, "tile_tokens": 0} | (json.loads(place.read_text()) if place.exists() else {})
        for name, now in self._sums.items():
            if saved[name] != now:
                _log.warning(
                    "%s was trained with %s=%s, and goes on with %s: sums will round otherwise; "
                    "MegatrainArguments(%s=%s) goes on to the same bits",
                    checkpoint,
                    name,
                    saved[name],
                    now,
                    name,
                    saved[name],
                )

    @contextmanager
    def _in_turn(self) -> Iterator[bool]:
        """Yield whether this rank writes to the state of its node; the others continue when it has."""
        self._ranks.meet("orders")
        yield self._ranks.local_rank == 0
        self._ranks.meet("orders")


def read_weights(model: Any, directory: str, host: HostState, *, reads: bool) -> None:
    """Read the weights of a model, tensor by tensor, or those of the adapter that is trained.

    Args:
        model: The model of the trainer.
        directory: The checkpoint's directory.
        host: The host state of the model, whose masters are set to the weights.
        reads: Whether this rank fills the shared state; buffers are each rank's own in any case.

    Raises:
        CheckpointError: There is no adapter in safetensors.
        ModelError: `load_weights` raises it.
    """
    if _is_adapter(model):
        _read_adapter(model, directory, host, reads=reads)
    else:
        load_weights(model, directory, host if reads else _Follower(host))


class _Follower:
    """Takes part in what the first rank of the node puts into the shared state."""

    def __init__(self, host: HostState) -> None:
        self._host = host

    def put(self, name: str, value: Tensor, region: Region = ()) -> None:
        """Ignore the value, which that rank has too."""
        self._host.follow(self._host.number_of(name))


def _read_adapter(model: Any, directory: str, host: HostState, *, reads: bool) -> None:
    """Load the active adapter of a `PeftModel` in place; its masters are set to the weights.

    Args:
        model: The model of the trainer.
        directory: The checkpoint's directory.
        host: The host state of the model.
        reads: Whether this rank fills the shared state.

    Raises:
        CheckpointError: There is no adapter in safetensors.
        ModelError: The adapter has values that are not finite.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    file = Path(directory) / "adapter_model.safetensors"
    if not file.exists():
        raise CheckpointError(f"{directory} has no {file.name}; resume from another checkpoint")
    weights = load_peft_weights(directory, device="cpu") if reads else {}
    for key, value in weights.items():
        require_finite(value, file, key)
    if reads:
        set_peft_model_state_dict(model, weights, adapter_name=model.active_adapters[0])
    sink = host if reads else _Follower(host)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            sink.put(name, parameter.detach().clone())


def _is_adapter(model: Any) -> bool:
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)
