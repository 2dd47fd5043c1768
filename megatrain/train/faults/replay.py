"""A step whose loss jumps is run again, twice, before its update: the same bits blame the data.

Both replays have the step's micro-batches, seeds and buffers, and every operation in a form that gives the
same bits in every run on a device. So two that differ were computed wrong at least once. Two that are equal
and differ from the first run were computed right, and the first was not; where that one had other forms of
operations (on an accelerator, without train.deterministic), only a loss without a jump says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import xxhash

from megatrain.checkpoint.rng import encode_rng, restore_rng
from megatrain.errors import ConfigError, HardwareError, ModelError
from megatrain.hardware.determinism import why_not_deterministic
from megatrain.model.weights.skeleton import persistent_buffers
from megatrain.train.run import Run

_log = logging.getLogger(__name__)


class Verdict(Enum):
    """What a jump of the loss comes from."""

    DATA = "data"
    """The step gives these bits whenever it is run: its rows, or what was learned before."""
    HARDWARE = "hardware"
    """Two replays have different bits."""
    TRANSIENT = "transient"
    """Two replays have the same bits, and the first run of the step had others."""
    UNKNOWN = "unknown"
    """The step has no form that repeats its bits, so nothing can be told."""


class Replay:
    """Remembers the begin of a step, and runs it again."""

    def __init__(self, run: Run, micro_batches: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> None:
        """Keep the buffers that are saved with a model, which are few: the state stays until the update.

        Args:
            run: The run, before the step.
            micro_batches: Those of the step.
            seeds: Their seeds.
        """
        self._run, self._micro_batches, self._seeds = run, micro_batches, seeds
        self._buffers = _copies(run)

    def judge(self, loss: float, highest: float) -> Verdict:
        """Drop the step's gradients, run it twice, and drop these too; every rank calls it.

        Args:
            loss: The loss of the first run.
            highest: The highest loss that would have been no jump.
        """
        run, device = self._run, self._run.engine.arrangement.lanes.device
        first, buffers, rng = _fingerprint(run, loss), _copies(run), encode_rng()
        found: list[tuple[float, list[Any]]] = []
        try:
            with run.engine.repeating():
                for _ in range(2):
                    _restore(run, self._buffers)
                    again = float(run.forward_backward(self._micro_batches, self._seeds)[0])
                    found.append((again, _fingerprint(run, again)))
        except (ConfigError, ModelError, RuntimeError) as error:
            reason = _why_refused(error, device)
            if not reason:
                raise
            _log.warning("step %d cannot be run again to the same bits: %s", run.step + 1, reason)
            return Verdict.UNKNOWN
        finally:
            run.engine.zero_grad()
            run.experts.drop()
            _restore(run, buffers)
            restore_rng(rng)
        (again, one), (_, other) = found
        if one != other:
            return Verdict.HARDWARE
        repeats = run.config.train.deterministic or device.type == "cpu"
        is_same = one == first if repeats else again > highest
        return Verdict.DATA if is_same else Verdict.TRANSIENT


def require_data(verdict: Verdict, run: Run, loss: float, highest: float) -> None:
    """End a run whose machine computes wrong.

    Raises:
        HardwareError: The verdict says so.
    """
    if verdict not in (Verdict.HARDWARE, Verdict.TRANSIENT):
        return
    seen = (
        "two more runs of the same step gave different bits"
        if verdict is Verdict.HARDWARE
        else "two more runs of the same step gave the same bits, and others than the first"
    )
    error = HardwareError(
        f"step {run.step + 1}: the loss jumped to {loss:.4g}, above {highest:.4g}, and {seen}, so the "
        "machine computes wrong (train.on_spike=replay); nothing was updated in this step",
        since=run.step + 1,
    )
    error.is_told = run.ranks.rank > 0
    raise error


def _fingerprint(run: Run, loss: float) -> list[Any]:
    """Return the bits of a loss and of the gradients of a step, on all ranks."""
    digest = xxhash.xxh3_128()
    gradients = run.engine.choice.gradients
    are_at_home = set(gradients if isinstance(gradients, tuple) else (gradients,)) == {"host"}
    if run.ranks.size == 1 or are_at_home:  # elsewhere each rank has its share, which nobody reads
        for name, gradient in run.engine.named_gradients():
            digest.update(name.encode())
            digest.update(gradient.contiguous().numpy().tobytes())
    mine = [loss.hex() if math.isfinite(loss) else str(loss), digest.hexdigest()]
    return run.ranks.gather_values(mine)


def _copies(run: Run) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in persistent_buffers(run.engine.model).items()}


def _restore(run: Run, buffers: Mapping[str, torch.Tensor]) -> None:
    own = persistent_buffers(run.engine.model)
    for name, value in buffers.items():
        own[name].copy_(value)


def _why_refused(error: Exception, device: torch.device) -> str:
    """Return why a step cannot be repeated, if that is what an error says; else nothing."""
    cause = error.__cause__ or error
    if isinstance(error, ConfigError) or why_not_deterministic(cause, device) is not None:
        return str(error)
    return ""
