"""Runs of a small model on an emulated machine, as a choice says: what plans are compared with.

The machine's compute, links and host memory take as long as its rates say, and operations begin late by
chance. The model is so small that what really happens takes less than that.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from megatrain.config.choice import Choice, StepBatch
from megatrain.hardware import HardwareSpec
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.count import count_anatomy
from megatrain.plan.search.request import Request
from megatrain.store.placement import Tiers
from megatrain.stream.attach.attach import attach
from megatrain.stream.attach.load import load
from megatrain.stream.engine import Engine
from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine, InlineLanes
from megatrain.stream.lanes.emulated_spec import emulated_spec
from tests.device_bytes import DeviceBytes

JITTER_S = 2e-4
"""Every operation begins up to this much late."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its batch, and whether gradients are clipped."""

    name: str
    config: PretrainedConfig
    batch: StepBatch
    precision: str = "fp32"
    clips: bool = True
    state: str = "fp32"
    """What the optimizer keeps its moments in."""

    def anatomy(self) -> Anatomy:
        """Count the model."""
        return count_anatomy(
            self.config,
            micro_batch_size=self.batch.micro_batch_size,
            seq_len=self.batch.seq_len,
            precision=self.precision,  # type: ignore[arg-type]
            device_type="cpu",
        )

    def request(self, spec: HardwareSpec, **changes: Any) -> Request:
        """Ask for a plan of the case on a machine."""
        return Request(
            spec=spec,
            anatomy=self.anatomy(),
            batch=self.batch,
            clips=self.clips,
            state=self.state,
            **changes,
        )


def machine_of(rates: dict[str, float], *, device_bytes: int | None, seed: int = 0) -> EmulatedMachine:
    """Make a machine of rates, with jitter."""
    machine = EmulatedMachine.from_rates({**rates, "device_bytes": 0})
    return replace(machine, device_bytes=device_bytes, jitter_s=JITTER_S, seed=seed)


def spec_of(machine: EmulatedMachine) -> HardwareSpec:
    """Describe a machine to the planner."""
    return emulated_spec(machine)


class Run:
    """An engine that takes steps."""

    def __init__(
        self,
        case: Case,
        machine: EmulatedMachine | None,
        choice: Choice | None,
        *,
        tiers: Tiers | None = None,
    ) -> None:
        """Attach it to a new model; without a machine, the CPU is its own."""
        self.case = case
        is_split = choice is not None and choice.fragments
        model = load(config=case.config, precision=case.precision, fragments=is_split, seed=0, tiers=tiers)
        self.lanes = InlineLanes() if machine is None else EmulatedLanes(machine)
        self.engine: Engine = attach(
            model.train(),
            device=self.lanes,
            precision=case.precision,
            choice=choice,
            batch=case.batch,
            optimizer_state=case.state,
            tiers=tiers,
        )
        updates = None if choice is None else choice.updates
        self.optimizer = self.engine.adamw(
            lr=1e-4, max_grad_norm=1.0 if case.clips else None, updates=updates
        )
        self._generator = torch.Generator().manual_seed(0)
        self._step = 0

    def step(self, rows: list[torch.Tensor] | None = None) -> float:
        """Take one step on `rows`, or on new ones, and return its seconds."""
        rows = rows or self.draw()
        began_s = time.perf_counter()
        seeds = [self._step * 1000 + number for number in range(len(rows))]
        self.engine.forward_backward([{"input_ids": x, "labels": x} for x in rows], seeds=seeds)
        self.optimizer.step()
        self._step += 1
        return time.perf_counter() - began_s

    def draw(self) -> list[torch.Tensor]:
        """Draw the tokens of a step."""
        batch = self.case.batch
        vocab_size = self.case.config.get_text_config().vocab_size
        shape = (batch.micro_batch_size, batch.seq_len)
        return [
            torch.randint(0, vocab_size, shape, generator=self._generator)
            for _ in range(batch.num_micro_batches)
        ]

    def steady_s(self, num_steps: int) -> float:
        """Return the median seconds of so many steps, after two that are not counted."""
        for _ in range(2):
            self.step()
        return statistics.median(self.step() for _ in range(num_steps))

    def device_peak(self) -> int:
        """Take a step, and return the most bytes of all storages that torch makes, and of the lanes' own."""
        batch, rows = self.case.batch, self.draw()
        with DeviceBytes(self.lanes) as device:
            self.step(rows)
            self.engine.settle()
        together = min(batch.num_micro_batches, self.engine.choice.lockstep)
        # on a device, a round's tokens and labels; buffers of the model were there before
        ids = 16 * together * batch.micro_batch_size * batch.seq_len
        return device.peak + ids + sum(buffer.nbytes for buffer in self.engine.model.buffers())

    def close(self) -> None:
        """End the run; what is on drives is removed."""
        self.engine.close(removes=True)


def step_seconds(case: Case, machine: EmulatedMachine, choice: Choice, *, num_steps: int = 3) -> float:
    """Measure a choice."""
    run = Run(case, machine, choice)
    try:
        return run.steady_s(num_steps)
    finally:
        run.close()
