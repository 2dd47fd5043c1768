"""The steps of the first ten minutes that train a model of real size: streamed, resident, and as planned.

A step with nothing resident shows what megatrain claims: at 4k tokens the copies take longest and at 32k the
products, so the first says how fast a step is against the link alone, and the second against the products
alone. Then plain torch and megatrain train the same few layers, and at last the plan's own choice is held
against what it took.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

from benchmarks.gpu.cells import STREAMED, at_the_end, raise_noted
from benchmarks.gpu.engine import Session, ours
from benchmarks.gpu.first import rates
from benchmarks.gpu.measure import Work, config_of
from benchmarks.gpu.rivals import resident
from benchmarks.gpu.run import Record, compile_cheaply, synchronize

DEPTHS = (32, 24, 16, 8)
"""Layers of the 8B shape, until one fits into the host's memory."""
RESIDENT_LAYERS = 8
"""Layers that plain torch trains with all state on the device: 3.2 GB of weights, 26 GB in all."""
LONGEST_SHOWN = 12
"""Kernels of a traced step."""


def cell_streamed(record: Record, session: Session) -> None:
    """8B with nothing resident, layers run again and not compiled, 4k and 32k tokens a step.

    What a plan of the same choice says is beside it, with the least seconds of copies and of products.
    """
    policies = {**STREAMED, "compile": "off"}
    words = []
    for rows in (4, 32):
        work = Work(seq_len=1024, rows=rows)
        label = f"{work.tokens // 1024}k tokens"
        with at_the_end(record, label):
            depth, _ = planned(session, work.sized(session.is_dry), compiles=False, **STREAMED)
            row = ours(
                record, session, "8b", work, [policies], num_layers=depth, label=label,
                measuring=session.measuring(steps=4, warm_up=1),
                look=partial(bounds_of, session, work, depth),
            )  # fmt: skip
            median_s = row["step_s"]["median"]
            bound_s = row["planned"]["bounds_s"]
            copies_s = max(seconds for name, seconds in bound_s.items() if name.startswith("copies"))
            rows_of = {
                "tokens": row["tokens_per_step"],
                "step_s": median_s,
                "planned_s": row["planned"]["step_s"],
                "copies_s": copies_s,
                "compute_s": bound_s["compute"],
                "busy": row["busy"],
            }
            record.append("overlap", rows_of)
            words.append(
                f"{label}: {row['tokens_per_s']:,.0f} tokens/s, {median_s:.2f} s (copies alone "
                f"{copies_s:.2f}, products {bound_s['compute']:.2f}, plan {row['planned']['step_s']:.2f})"
            )
            record.add(gist="; ".join(words))
    raise_noted(record)


def bounds_of(session: Session, work: Work, depth: int, engine: Any) -> dict[str, Any]:
    """Return the plan of an engine's own choice on the machine that was measured."""
    from megatrain.plan.search.planner import plan_of

    request = request_of(session, work.sized(session.is_dry), depth, compiles=False)
    plan = plan_of(request, engine.choice)
    return {"planned": {"step_s": plan.step_s, "bounds_s": plan.bounds_s, "bound": plan.bound}}


def cell_side_by_side(record: Record, session: Session) -> None:
    """A few layers of the 8B shape, 32k tokens a step: plain torch with all on the device, and megatrain."""
    depth = RESIDENT_LAYERS
    plain = resident(session, Work(seq_len=1024, rows=4, num_micro_batches=8), depth)
    record.append("runs", {"label": "plain torch", "shape": "8b", **plain})
    session.drop()
    ratios = {}
    for label, policies in (("streamed", STREAMED), ("kept", {"resident_layers": 0, "activations": "keep"})):
        with at_the_end(record, label):
            row = ours(
                record, session, "8b", Work(seq_len=1024, rows=32), [{**policies, "compile": "off"}],
                num_layers=depth, label=label, measuring=session.measuring(steps=4),
            )  # fmt: skip
            ratios[label] = row["tokens_per_s"] / plain["tokens_per_s"]
            shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
            record.add(over_plain=ratios, gist=f"{row['num_layers']} layers, of plain torch's speed: {shown}")
    session.drop()
    raise_noted(record)


def cell_packed(record: Record, session: Session) -> None:
    """A few layers of the 8B shape on rows of 8k tokens in documents of 512: a mask, and without one.

    Raises:
        AssertionError: The first losses, of equal weights, are further apart than bf16 explains.
    """
    from megatrain.config.attention import VARLEN
    from megatrain.model.documents.begins import set_attention

    work = Work(seq_len=8192, rows=4, document_len=512)
    seconds: dict[str, float] = {}
    firsts: list[float] = []
    for label, attention, compiles in (
        ("mask", "sdpa", "off"),
        ("varlen", VARLEN, "off"),
        ("varlen compiled", VARLEN, "on"),
    ):
        with at_the_end(record, label):
            session.drop()  # the others have trained its weights
            model, _ = session.model("8b", RESIDENT_LAYERS)
            set_attention(model, attention)
            row = ours(
                record, session, "8b", work, [{**STREAMED, "compile": compiles}], num_layers=RESIDENT_LAYERS,
                label=label, measuring=session.measuring(steps=4, warm_up=1),
            )  # fmt: skip
            seconds[label] = row["step_s"]["median"]
            firsts.append(row["losses"][0])
            words = ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items())
            record.add(first_losses=firsts, gist=f"{row['num_layers']} layers, a step with {words}")
    session.drop()
    raise_noted(record)
    assert max(firsts) - min(firsts) < 0.02, f"the first losses are {firsts}"


def cell_shape(record: Record, session: Session) -> None:
    """8B, sequences of 1k, 32k tokens a step, four steps: layers not compiled and compiled, as planned."""
    work = Work(seq_len=1024, rows=32)
    if session.is_dry:
        compile_cheaply()
    until, words = session.until, []
    for compiles, left in (("off", 2), ("on", 1)):
        session.until = time.monotonic() + (until - time.monotonic()) / left
        with at_the_end(record, f"compile {compiles}"):
            depth, plan = planned(session, work.sized(session.is_dry), compiles=compiles == "on")
            attempts = [{"choice": plan.choice, "compile": compiles}, {**STREAMED, "compile": compiles}]
            row = ours(
                record, session, "8b", work, attempts, num_layers=depth,
                label=f"compile {compiles}",
                measuring=session.measuring(steps=4, warm_up=1),
                look=partial(look, session, work, f"trace-compile-{compiles}"),
            )  # fmt: skip
            facts = {
                "compile": compiles,
                **against_fact(plan, row),
                "is_the_planned": "choice" in row["asked"],
            }
            record.append("plan_against_fact", facts)
            assert compiles == "off" or row["num_graphs"], "no layer was compiled; the log says why"
            seconds, peak = (facts[name]["off_by"] for name in ("step_s", "device_bytes"))
            rate = f"{row['tokens_per_s']:,.0f} tokens/s, {row['of_matmul_peak']:.0%} of products alone"
            words.append(f"compile {compiles}: {rate}; plan: time {seconds:+.0%}, device memory {peak:+.0%}")
            record.add(gist="; ".join(words))
    raise_noted(record)


def planned(session: Session, work: Work, *, compiles: bool, **decided: Any) -> tuple[int, Any]:
    """Return how many layers fit into this machine, and their plan; `decided` are fields of its choice.

    Raises:
        CapacityError: Not even the fewest fit.
    """
    from megatrain.errors import CapacityError
    from megatrain.plan.search.planner import make_plan

    for depth in DEPTHS:
        plan = make_plan(request_of(session, work, depth, compiles=compiles, **decided))
        if plan.fits:
            return depth, plan
    raise CapacityError(plan.problem)


def request_of(session: Session, work: Work, depth: int, *, compiles: bool, **decided: Any) -> Any:
    """Return the request for a plan of so many layers."""
    from megatrain.config.choice import Choice, StepBatch
    from megatrain.model.profile.count import count_anatomy
    from megatrain.plan.search.request import Request

    batch = StepBatch(micro_batch_size=work.rows, seq_len=work.seq_len, num_micro_batches=1)
    config = config_of("8b", session.is_dry, depth)
    anatomy = count_anatomy(config, micro_batch_size=work.rows, seq_len=work.seq_len, precision="bf16")
    return Request(
        spec=machine(session), anatomy=anatomy, batch=batch, compiles=compiles, choice=Choice(**decided)
    )


def machine(session: Session) -> Any:
    """Return the machine that the step `rates` has measured in this directory, or measure it."""
    from megatrain.hardware import load_machine

    path = session.out / "rates.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    if "machine" not in found:
        record = Record(session.out / "rates-again.json")
        rates(record, session.is_dry)
        found = record.values
    kept = session.out / "machine.json"
    kept.write_text(json.dumps(found["machine"]))
    return load_machine(kept)


def look(session: Session, work: Work, name: str, engine: Any) -> dict[str, Any]:
    """Train one step more under torch's profiler, whose trace is kept, and say what it took longest for."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    batches = work.sized(session.is_dry).micro_batches(engine.model.config.vocab_size)
    activities = supported_activities() & {getattr(ProfilerActivity, kind) for kind in ("CPU", "CUDA", "XPU")}
    with profile(activities=activities) as found:
        engine.forward_backward(batches)
        engine.optimizer.step()
        synchronize(session.device)
    trace = session.out / f"{name}.json.gz"
    found.export_chrome_trace(str(trace))
    events = found.key_averages()
    kind = "device" if any(event.self_device_time_total for event in events) else "cpu"
    own = [(event.key, getattr(event, f"self_{kind}_time_total"), event.count) for event in events]
    longest = sorted(own, key=lambda row: -row[1])[:LONGEST_SHOWN]
    return {
        "trace": trace.name,
        "num_graphs": 0 if engine.compiler is None else engine.compiler.num_graphs,
        "longest": [{"kernel": key[:80], "ms": us / 1e3, "count": count} for key, us, count in longest],
        "device_pool_bytes": engine.lanes.device_bytes,
        "host_plane_bytes": sum(engine.host.plane_bytes.values()),
    }


def against_fact(plan: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Hold what was planned against what was measured."""
    pairs = {
        "step_s": (plan.step_s, row["step_s"]["median"]),
        "device_pool_bytes": (plan.device_pool_bytes, row["device_pool_bytes"]),
        "device_bytes": (plan.tier_bytes("device"), row["device_bytes_peak"]),
        "host_plane_bytes": (plan.host_plane_bytes, row["host_plane_bytes"]),
    }
    return {
        "bound": plan.bound,
        "choice": plan.choice.describe(),
        **{
            name: {"planned": one, "measured": other, "off_by": one / other - 1 if other else None}
            for name, (one, other) in pairs.items()
        },
    }
