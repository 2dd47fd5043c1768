"""One step of megatrain on one model, and what is said of it: time, bytes, policies, lanes.

A cell is given a list of attempts, policies for `megatrain.attach`; the first that memory does not refuse is
measured, and the others are recorded with what was said of them. Cells of one shape that follow each other
share a process and its model, whose weights go on from cell to cell; optimizers begin anew.

The fp32 sums of several rounds would be 4 bytes per parameter more on the host, which an 8B model does not
find in 128 GiB beside its 14: every step is one round, all of its micro-batches in lockstep.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.measure import (
    HYPER,
    MAX_GRAD_NORM,
    Measuring,
    Work,
    attempts_until_one_fits,
    config_of,
    described,
    measure,
    num_parameters,
    random_model,
)
from benchmarks.gpu.run import Heard, Record, device_of, measured_peak, release

NUM_REAL_LAYERS = 4
"""Of the 120B shape: 19 GB of state each, far more than a cache holds."""


class Session:
    """A process's device, its peak, and the one model that it holds."""

    def __init__(self, out: Path, is_dry: bool) -> None:
        """Begin without a model."""
        self.out = out
        self.is_dry = is_dry
        self.until = time.monotonic() + 3600
        """When the running step must be done; the runner sets it."""
        self._key: tuple[Any, ...] | None = None
        self._model: Any = None
        self._config: Any = None
        self._peak: float | None = None
        self.load_s = 0.0

    @property
    def device(self) -> Any:
        """The device of the run."""
        return device_of(self.is_dry)

    @property
    def peak_flops(self) -> float:
        """Rate of a large matrix product."""
        if self._peak is None:
            self._peak = measured_peak(self.out, self.is_dry)
        return self._peak

    def measuring(self, *, steps: int = 6, warm_up: int = 2) -> Measuring:
        """Return what `measure` wants to know of this process."""
        if self.is_dry:
            steps, warm_up = 2, 1
        return Measuring(
            device=self.device, peak_flops=self.peak_flops, until=self.until, warm_up=warm_up, steps=steps
        )

    def model(self, shape: str, num_layers: int | None = None) -> tuple[Any, Any]:
        """Return the random bf16 model of a shape and its configuration; a dry run makes a new one."""
        key = (shape, num_layers)
        if self._key != key or self.is_dry:
            self.drop()
            began = time.perf_counter()
            self._config = config_of(shape, self.is_dry, num_layers)
            self._model = self._make(shape)
            self.load_s = time.perf_counter() - began
            self._key = key
        return self._model, self._config

    def _make(self, shape: str) -> Any:
        import torch

        if shape == "120b":
            from benchmarks.gpu.aliased import aliased_model

            return aliased_model(self._config, 2 if self.is_dry else NUM_REAL_LAYERS)
        return random_model(self._config, dtype=torch.bfloat16, small=self.is_dry)

    def drop(self) -> None:
        """Give the model's memory back."""
        self._model = self._config = self._key = None
        release(self.device)


def ours(
    record: Record,
    session: Session,
    shape: str,
    work: Work,
    attempts: Sequence[dict[str, Any]],
    *,
    num_layers: int | None = None,
    measuring: Measuring | None = None,
    label: str = "",
    warm_up_with: int | None = None,
    limit: int | None = None,
    again_without_limit: bool = False,
    look: Callable[[Any], dict[str, Any]] | None = None,
    **adamw: Any,
) -> dict[str, Any]:
    """Measure the first of some policies that fits, record it as a run, and return its row.

    Args:
        record: Of the cell.
        session: Of the process.
        shape: Name of the model's shape.
        work: What a step is given.
        attempts: Policies, arguments of `megatrain.attach`.
        num_layers: In place of the shape's own.
        measuring: In place of the session's own.
        label: Name of the row.
        warm_up_with: Warm up with as many micro-batches only.
        limit: Device memory for everything, activations included, in bytes.
        again_without_limit: Measure once more with the same engine and all of the device's memory.
        look: Called with the engine after its steps; what it returns is added to the row.
        **adamw: Further arguments of `engine.adamw`.
    """
    work = work.sized(session.is_dry)
    model, config = session.model(shape, num_layers)
    release(session.device)
    chosen = measuring or session.measuring()
    row: dict[str, Any] = {}

    def run(policies: dict[str, Any]) -> dict[str, Any]:
        found = trained(session, model, config, work, policies, chosen, warm_up_with, limit, adamw)
        return {**found, **(look(model._megatrain_engine) if look else {})}

    def clean() -> None:
        detach(model)
        release(session.device)

    found = attempts_until_one_fits(list(attempts), run, clean)
    try:
        with capped(session, limit):
            for row in found:
                record.append("runs", {"label": label, "shape": shape, **row})
        if again_without_limit:
            with capped(session, None):
                again = timed_engine(session, model._megatrain_engine, config, work, chosen, warm_up_with)
            row["of_unlimited_same_policies"] = row["tokens_per_s"] / again["tokens_per_s"]
            record.append("runs", {"label": f"{label}, no limit", "shape": shape, **again})
            record.add(of_unlimited_same_policies=row["of_unlimited_same_policies"])
    finally:
        began = time.perf_counter()
        detach(model)
        release(session.device)
        record.add(detach_s=time.perf_counter() - began)
    assert row["is_falling"] is not False or shape == "120b", f"the loss does not fall: {row['losses']}"
    return row


def trained(
    session: Session,
    model: Any,
    config: Any,
    work: Work,
    policies: dict[str, Any],
    measuring: Measuring,
    warm_up_with: int | None,
    limit: int | None,
    adamw: dict[str, Any],
) -> dict[str, Any]:
    """Attach, train, and return the figures; the engine stays attached.

    What is `auto` is planned, and with it all that is not given; otherwise that is the plainest choice.
    """
    import megatrain
    from megatrain.config.choice import StepBatch
    from tests.reference import attach_plainly

    count = work.num_micro_batches
    began = time.perf_counter()
    attach = megatrain.attach if "auto" in policies.values() else attach_plainly
    engine = attach(
        model,
        device=session.device,
        precision="bf16",
        lockstep=count,
        batch=StepBatch(micro_batch_size=work.rows, seq_len=work.seq_len, num_micro_batches=count),
        device_limit=limit,
        **policies,
    )
    engine.adamw(**{**HYPER, "max_grad_norm": MAX_GRAD_NORM, "updates": "deferred", **adamw})
    attach_s = time.perf_counter() - began
    row = timed_engine(session, engine, config, work, measuring, warm_up_with)
    return {**row, "asked": described(policies), "load_s": session.load_s, "attach_s": attach_s}


def timed_engine(
    session: Session, engine: Any, config: Any, work: Work, measuring: Measuring, warm_up_with: int | None
) -> dict[str, Any]:
    """Train with an engine, and return the figures and what its lanes did."""
    batches = work.micro_batches(config.vocab_size)
    optimizer = engine.optimizer
    heard: list[Heard] = []
    moved: list[int] = []
    started: list[float] = []

    def train(parts: Sequence[dict[str, Any]]) -> tuple[float, float]:
        loss = engine.forward_backward(parts)
        stats = optimizer.step()
        norm = stats.grad_norm
        assert not stats.skipped, "a step was skipped: its gradients are not finite"
        return loss.item(), norm

    def begin() -> None:
        heard.append(Heard(engine))
        moved.append(bytes_moved(engine))
        started.append(time.perf_counter())

    row = measure(
        lambda: train(batches),
        measuring,
        work=work,
        config=config,
        parameters=num_parameters(engine.model),
        warm_up=None if warm_up_with is None else lambda: train(batches[:warm_up_with]),
        after_warm_up=begin,
    )
    whole_s = time.perf_counter() - started[0]
    last = engine.last_step
    heard[0].stop()
    if "device_bytes_peak" not in row:
        row["device_bytes_peak"] = engine.device_bytes_peak
    return {
        **row,
        "policies": policies_of(engine),
        "host_bytes": getattr(engine.host, "real_bytes", engine.host_bytes),
        "bytes_moved_per_step": (bytes_moved(engine) - moved[0]) // row["num_steps"],
        **lane_use(heard[0], whole_s),
        "bound": f"{last.bound}, {last.bound_s / last.seconds:.0%} of the step",
        "last_step": {**dataclasses.asdict(last), "mfu": last.mfu, "over_bound": last.over_bound},
    }


def detach(model: Any) -> None:
    """Take the engine off a model, whatever state a failure has left it in."""
    engine = getattr(model, "_megatrain_engine", None)
    if engine is not None:
        # Nobody wants the state that lies on the device: to take it home would last as long as some steps.
        with contextlib.suppress(Exception):
            engine.weights_changed()
        with contextlib.suppress(Exception):
            engine.detach()
        model._megatrain_engine = None


@contextlib.contextmanager
def capped(session: Session, limit: int | None) -> Iterator[None]:
    """Let torch take no more than `limit` bytes of the device, for activations too."""
    import torch

    if limit is None or session.is_dry:
        yield
        return
    total = torch.cuda.get_device_properties(session.device).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total, session.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, session.device)


# -- what is said of a run ---------------------------------------------------------------------------------


def bytes_moved(engine: Any) -> int:
    """Return what crossed the link since attach: weights, gradients, saved activations."""
    offloaded = engine.arrangement.offloaded
    return int(
        engine.counts.fetch_bytes
        + engine.counts.offload_bytes
        + offloaded.saved_bytes
        + offloaded.restored_bytes
    )


def policies_of(engine: Any) -> dict[str, Any]:
    """Return the choice as plain values; resident blocks by their number."""
    values = dataclasses.asdict(engine.choice)
    values["residents"] = engine.arrangement.residents
    values["boundaries_on_host"] = engine.choice.boundaries != "device"
    values["compiles"] = engine.compiler is not None
    return described(values)


def lane_use(heard: Heard, whole_s: float) -> dict[str, Any]:
    """Say which share of the time each lane worked, and what the lanes waited for, in seconds.

    The head and the embedding, which are no visits of a block, are not in compute's share.
    """
    intervals: dict[str, list[tuple[float, float]]] = {}
    for span in heard.spans:
        if span.label not in ("", "outer"):  # that one lasts a whole pass, its waits included
            intervals.setdefault(span.lane.value, []).append((span.start_s, span.end_s))
    waits: Counter[str] = Counter()
    for wait in heard.waits:
        waits[f"{wait.cause.waiting.value} for {wait.cause.owner.value}: {wait.cause.buffer}"] += wait.seconds
    return {
        "busy": {lane: union_s(spans) / whole_s for lane, spans in intervals.items()},
        "waits_s": {cause: round(seconds, 6) for cause, seconds in waits.most_common(8)},
    }


def union_s(intervals: list[tuple[float, float]]) -> float:
    """Return the seconds that any of some intervals covers."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
