"""The cells of the table: megatrain's steps at the sizes that matter."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu.engine import NUM_REAL_LAYERS, Session, ours
from benchmarks.gpu.measure import Work, config_of
from benchmarks.gpu.run import Record

STREAMED: dict[str, Any] = {"resident_layers": 0, "activations": "recompute"}
AUTO: dict[str, Any] = {"resident_layers": "auto", "activations": "auto"}
CHEAP_SHARES = (1.0, 0.75, 0.5, 0.25)
"""Of the layers, from the last on, whose matrix products stay on the device, until one fits."""


def _all_ways(record: Record, session: Session, work: Work) -> None:
    """Measure what `auto` chooses, and memory spent on activations in place of optimizer state.

    Kept layers are compiled; layers that keep their matrix products cannot be.
    """
    until = session.until
    fallback = {"resident_layers": 8, "activations": "recompute"}
    count = config_of("8b", session.is_dry).num_hidden_layers
    kinds = {
        "auto": [AUTO, fallback, STREAMED],
        "kept": [{"resident_layers": 0, "activations": "auto"}],
        "cheap": [cheap(count, share) for share in CHEAP_SHARES],
    }
    for number, (label, attempts) in enumerate(kinds.items()):
        left = len(kinds) - number
        session.until = time.monotonic() + (until - time.monotonic()) / left
        with at_the_end(record, label):
            ours(record, session, "8b", work, attempts, label=label)
    raise_noted(record)


@contextmanager
def at_the_end(record: Record, label: str) -> Iterator[None]:
    """Note a run's failure, for `raise_noted`: it must not hide what the cell's other runs show."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        errors = [*record.values.get("errors", []), f"{label}: {type(error).__name__}: {error}"[:1000]]
        record.add(errors=errors)


def raise_noted(record: Record) -> None:
    """Raise what was noted.

    Raises:
        RuntimeError: A run failed.
    """
    if errors := record.values.get("errors"):
        raise RuntimeError("; ".join(errors))


def cheap(num_layers: int, share: float) -> dict[str, Any]:
    """Return policies that stream everything and keep the matrix products of a share of the layers."""
    kept = round(share * num_layers)
    names = ["recompute"] * (num_layers - kept) + ["recompute_cheap"] * kept
    return {"resident_layers": 0, "activations": tuple(names)}


def cell_8b_32k(record: Record, session: Session) -> None:
    """8B, sequences of 1k, 32k tokens a step: policies auto, and streamed with activations kept."""
    _all_ways(record, session, Work(seq_len=1024, rows=32))


def cell_8b_seq8k(record: Record, session: Session) -> None:
    """8B, sequences of 8k, 32k tokens a step: policies auto, and streamed with activations kept."""
    _all_ways(record, session, Work(seq_len=8192, rows=4))


def cell_8b_128k(record: Record, session: Session) -> None:
    """8B, sequences of 1k, 128k tokens a step: policies auto."""
    work = Work(seq_len=1024, rows=32, num_micro_batches=4)
    fallback = {"resident_layers": 4, "activations": "recompute"}
    ours(record, session, "8b", work, [AUTO, fallback, STREAMED], label="auto")


def cell_8b_24gb(record: Record, session: Session) -> None:
    """8B, 32k tokens a step in 24 GB of device memory, activations included."""
    _budget(record, session, 24, Work(seq_len=1024, rows=8, num_micro_batches=4), boundaries="host")


def cell_8b_80gb(record: Record, session: Session) -> None:
    """8B, 32k tokens a step in 80 GB of device memory, activations included."""
    _budget(record, session, 80, Work(seq_len=1024, rows=32))


def _budget(record: Record, session: Session, gigabytes: int, work: Work, **policies: Any) -> None:
    limit = gigabytes * 10**9
    attempts = [{**AUTO, **policies}, {**STREAMED, **policies}, {**STREAMED, **policies, "num_slots": 1}]
    record.add(device_limit=limit)
    ours(
        record,
        session,
        "8b",
        work,
        attempts,
        limit=limit,
        label=f"{gigabytes} GB",
        again_without_limit=True,
        measuring=session.measuring(steps=4),
    )


def cell_8b_512k(record: Record, session: Session) -> None:
    """8B, sequences of 1k, 512k tokens a step; every second layer's boundary is made again."""
    count = config_of("8b", session.is_dry).num_hidden_layers
    attempts = [
        {
            "resident_layers": 0,
            "activations": tuple(
                "drop_boundary" if number % apart else "recompute" for number in range(count)
            ),
        }
        for apart in (2, 4)
    ]
    work = Work(seq_len=1024, rows=8, num_micro_batches=64)
    measuring = session.measuring(steps=3, warm_up=1)
    ours(record, session, "8b", work, attempts, measuring=measuring, warm_up_with=2)


def cell_3b_ours(record: Record, session: Session) -> None:
    """3B, 8k and 32k tokens a step: policies auto, and everything streamed."""
    for rows in (8, 32):
        kinds = {"auto": AUTO, "streamed": STREAMED}
        if rows == 32:
            kinds["streamed, not compiled"] = {**STREAMED, "compile": "off"}
        for label, policies in kinds.items():
            with at_the_end(record, f"{rows}k tokens, {label}"):
                ours(
                    record,
                    session,
                    "3b",
                    Work(seq_len=1024, rows=rows),
                    [policies, STREAMED],
                    label=label,
                    measuring=session.measuring(steps=10 if rows == 8 else 6),
                    no_decay=[],  # as the rivals' one group of parameters
                )
    raise_noted(record)


def cell_depth(record: Record, session: Session) -> None:
    """Layers of one width, 28 to 180 of them, 16k tokens a step, everything streamed."""
    depths = (28, 84, 180)
    rates: dict[int, float] = {}
    for depth in depths:
        row = ours(
            record,
            session,
            "deep",
            Work(seq_len=1024, rows=16),
            [STREAMED],
            num_layers=depth,
            label=f"{depth} layers",
            measuring=session.measuring(steps=4),
        )
        rates[depth] = row["tokens_per_s"] * row["num_layers"]
    session.drop()
    of_shallow = {str(depth): rate / rates[depths[0]] for depth, rate in rates.items()}
    record.add(layer_tokens_per_s={str(depth): rate for depth, rate in rates.items()}, of_shallow=of_shallow)


def cell_120b(record: Record, session: Session) -> None:
    """122B shape, 16k tokens a step; all layers' planes lie over those of 4 (see `aliased`)."""
    model, config = session.model("120b")
    state = model.__dict__["_megatrain_host"]
    num_real = 2 if session.is_dry else NUM_REAL_LAYERS
    record.add(
        is_aliased=True,
        note=f"the state of {num_real} of {config.num_hidden_layers} layers is in host memory, and all "
        "layers' planes lie over it; the bytes moved and updated are the whole model's, losses mean nothing",
        host_bytes_if_whole=state.host_bytes,
    )
    measuring = session.measuring(steps=2, warm_up=1)
    attempts = [STREAMED, {**STREAMED, "boundaries": "host"}]
    ours(record, session, "120b", Work(seq_len=1024, rows=16), attempts, measuring=measuring)
    session.drop()
