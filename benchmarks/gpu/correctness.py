"""Whether the numbers are right on this device: parity, AdamW on the device, compiled blocks.

- `parity`: streamed against resident training on the same device, tiny models, three steps, over a list of
  settings that holds every pair of two. fp32 with deterministic algorithms and without TF32 should be equal
  bit for bit (`is_bitwise`): same kernels, same order. It fails above `TOLERANCES`, relative to the largest
  gradient of a parameter: a library may choose another algorithm for memory of another alignment, and Adam's
  first steps turn a last bit of a small gradient into a whole step. Settings change no bit among themselves
  either: `groups` counts the different results of the runs that must be equal.
- `device_adamw`: AdamW of resident blocks against the host's, bit for bit, special values included.
- `compiled`: the same training with and without `compile`.
"""

from __future__ import annotations

import hashlib
import itertools
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.run import Record, compile_cheaply, deterministic, device_of

TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}
"""Largest difference in the first step: of a loss, and of a gradient, relative to its parameter's largest."""
LATER_TOLERANCES = {"fp32": 1e-2, "bf16": 2e-1}
"""The same in later steps: Adam turns the last bit of a gradient near zero into a whole step of a weight."""
HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MAX_GRAD_NORM = 0.5
FAMILIES_COMPARED = ("llama_tied", "gemma2", "mixtral", "gpt2")
"""The simplest first; `tests/families.py` has four layers of each."""

AXES: dict[str, tuple[Any, ...]] = {
    "activations": (
        "recompute",
        "keep",
        "offload",
        "recompute_cheap",
        ("recompute", "drop_boundary", "recompute", "drop_boundary"),
        ("drop_boundary", "recompute_cheap", "offload", "keep"),
    ),
    "rounds": ((1, 1), (1, 2), (1, 4), (3, 1), (2, 2)),
    "updates": ("deferred", "serial", "immediate"),
    "resident_layers": (0, 2, 4),
    "num_slots": (2, 1, 3),
    "fragments": (False, True),
    "boundaries": ("device", "host"),
}
"""What parity goes through; (R, m) is a step of R rounds of m micro-batches in lockstep."""


# -- parity ------------------------------------------------------------------------------------------------


@deterministic()
def parity(record: Record, is_dry: bool, cases: Iterable[dict[str, Any]] | None = None) -> None:
    """Train tiny models streamed and resident, and compare losses, gradients, norms and masters."""
    failures = []
    for case in parity_cases(is_dry) if cases is None else cases:
        try:
            row = {**case, **compare(device_of(is_dry), **case)}
        except Exception as error:  # one case's failure must not hide what the others show
            traceback.print_exc()
            row = {**case, "is_ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
        shown = row if not row["is_ok"] else {key: row[key] for key in ("group", "is_bitwise", "digest")}
        record.append("cases", row, shown=shown)
        if not row["is_ok"]:
            failures.append(row)
    rows = record.values["cases"]
    groups: dict[str, Counter[str]] = {}
    for row in rows:
        if "digest" in row:
            groups.setdefault(row["group"], Counter())[row["digest"]] += 1
    record.add(
        num_cases=len(rows),
        num_bitwise=sum(row.get("is_bitwise", False) for row in rows),
        groups={name: {"runs": sum(found.values()), "results": len(found)} for name, found in groups.items()},
        tolerances={"first_step": TOLERANCES, "later_steps": LATER_TOLERANCES},
    )
    assert not failures, f"{len(failures)} of {len(rows)} cases differ, the first: {failures[0]}"


def parity_cases(is_dry: bool) -> Iterator[dict[str, Any]]:
    """Yield what to compare: first the plain settings of every family, then every pair of settings."""
    plain = {axis: values[0] for axis, values in AXES.items()}
    families = FAMILIES_COMPARED[:2] if is_dry else FAMILIES_COMPARED
    for precision in ("fp32", "bf16"):
        for family in families:
            yield {"family": family, "precision": precision, **plain}
    rows = pairwise(AXES)
    for number, row in enumerate(rows):
        for precision in ("fp32", "bf16"):
            if is_dry and (number % 5 or precision == "bf16"):
                continue
            # The resident run that must be equal is of one family for as many runs as possible.
            family = "llama_tied" if precision == "fp32" or is_dry else families[number % len(families)]
            yield {"family": family, "precision": precision, **row}


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Choose rows until every pair of values of two axes is in one: greedily, always the same ones."""
    order = {axis: number for number, axis in enumerate(axes)}

    def pair(one: str, a: Any, other: str, b: Any) -> tuple[Any, ...]:
        return ((one, a), (other, b)) if order[one] < order[other] else ((other, b), (one, a))

    missing = {
        pair(one, a, other, b)
        for one, other in itertools.combinations(axes, 2)
        for a in axes[one]
        for b in axes[other]
    }
    rows = []
    while missing:
        row: dict[str, Any] = dict(min(missing, key=str))
        for axis in axes:
            if axis not in row:
                gains = {
                    value: sum(pair(axis, value, other, b) in missing for other, b in row.items())
                    for value in axes[axis]
                }
                row[axis] = max(gains, key=lambda value: (gains[value], str(value)))
        missing -= {pair(a, row[a], b, row[b]) for a, b in itertools.combinations(axes, 2)}
        rows.append({axis: row[axis] for axis in axes})
    return rows


def compare(
    device: Any,
    *,
    family: str,
    precision: str,
    activations: str | tuple[str, ...],
    rounds: tuple[int, int],
    updates: str,
    resident_layers: int,
    num_slots: int,
    fragments: bool,
    boundaries: str,
    steps: int = 3,
) -> dict[str, Any]:
    """Train streamed and resident for some steps; returns the largest differences of each."""
    import torch

    from tests.families import FAMILIES
    from tests.reference import Resident, attach_plainly, make_batches, make_model

    num_rounds, lockstep = rounds
    num_micro_batches = num_rounds * lockstep
    limit = None if updates == "immediate" else MAX_GRAD_NORM
    config = FAMILIES[family]()
    config._experts_implementation = "eager"  # the grouped kernel of newer GPUs has no fp32 form
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = make_model(config, dtype=dtype)
    reference = Resident(model, **HYPER)
    reference.to(device)
    engine = attach_plainly(
        model,
        device=device,
        precision=precision,
        num_slots=max(num_slots, 2) if fragments else num_slots,  # a layer of these families has two
        activations=activations,
        boundaries=boundaries,
        fragments=fragments,
        resident_layers=resident_layers,
        lockstep=lockstep,
        num_micro_batches=num_micro_batches,
        compile="off",  # as the resident model is
    )
    optimizer = engine.adamw(**HYPER, max_grad_norm=limit, updates=updates)
    differences: list[dict[str, float]] = []
    digest = hashlib.sha256()
    for step in range(steps):
        worst = {"gradient": 0.0, "master": 0.0}
        batches = make_batches(num_micro_batches, seed=step, rows=2, tokens=32, padded=step == 1)
        seeds = [100 * step + number for number in range(num_micro_batches)]
        there = [{key: value.to(device) for key, value in batch.items()} for batch in batches]
        expected = reference.forward_backward(there, seeds).cpu()
        loss = engine.forward_backward(batches, seeds=seeds).cpu()
        worst["loss"] = difference(loss, expected)
        digest.update(loss.numpy().tobytes())
        if updates != "immediate":  # which uses gradients up before anybody can see them
            gradients = dict(engine.named_gradients())
            assert gradients.keys() == reference.sums.keys()
            for name, gradient in gradients.items():
                worst["gradient"] = max(worst["gradient"], difference(gradient, reference.sums[name].cpu()))
        stats = optimizer.step()
        worst["norm"] = abs(stats.grad_norm / reference.norm() - 1)
        reference.step(stats.grad_norm, limit)
        for name, master in engine.named_masters():
            worst["master"] = max(worst["master"], difference(master, reference.master(name)))
        differences.append(worst)
    for _, master in engine.named_masters():
        digest.update(master.numpy().tobytes())
    engine.detach()
    allowed = [TOLERANCES[precision]] + [LATER_TOLERANCES[precision]] * (steps - 1)
    is_ok = all(
        max(worst["loss"], worst["gradient"]) <= limit and worst["norm"] <= max(1e-5, worst["gradient"])
        for worst, limit in zip(differences, allowed, strict=True)
    )
    is_bitwise = all(worst[key] == 0.0 for worst in differences for key in ("loss", "gradient", "master"))
    clipping = "no clipping" if limit is None else "clipping"
    return {
        "is_ok": is_ok,
        "is_bitwise": is_bitwise,
        "differences": differences,
        "group": f"{family}, {precision}, {num_micro_batches} micro-batches, {clipping}",
        "digest": digest.hexdigest()[:16],
    }


def difference(actual: Any, expected: Any) -> float:
    """Return the largest difference, relative to the largest expected value; 0 means equal."""
    assert actual.shape == expected.shape
    scale = expected.abs().max().item() or 1.0
    value = (actual.float() - expected.float()).abs().max().item() / scale
    return value if value == value else float("inf")


# -- AdamW on the device -----------------------------------------------------------------------------------


def device_adamw(record: Record, is_dry: bool) -> None:
    """Update the same planes on the host and on the device for some steps, and compare every bit."""
    import torch

    from megatrain.optim.adamw.device import update_on_device
    from megatrain.optim.adamw.fused import update_fused, why_not_fused
    from megatrain.optim.adamw.host import AdamWStep, update_many
    from megatrain.optim.pool import default_pool

    device = device_of(is_dry)
    numel = 1 << 12 if is_dry else 1 << 22
    failures = []
    reason = "a CPU has none" if device.type == "cpu" else why_not_fused(device.type)
    record.add(kernel=reason or "used")
    updaters = ["operations"] if reason else ["operations", "kernel"]
    for updater, is_split, gradient_dtype in itertools.product(
        updaters, (True, False), (torch.bfloat16, torch.float32)
    ):
        host = planes(numel, is_split=is_split, gradient_dtype=gradient_dtype)
        there: dict[str, Any] = {
            name: None if flat is None else flat.to(device, copy=True) for name, flat in host.items()
        }
        for step in range(1, 7):
            gradient = numbers(numel, 10 + step).to(gradient_dtype)
            hyper = AdamWStep(
                lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step, grad_scale=1 / step
            )
            update_many(default_pool(), [(hyper, as_planes(host, gradient))])
            chunk_numel = (numel // 3) if step % 2 else numel
            ranges = [(hyper, as_planes(there, gradient.to(device)))]
            if updater == "kernel":
                update_fused(ranges)
            else:
                update_on_device(ranges, chunk_numel)
        wrong = {
            name: int((bits(there[name].cpu()) != bits(flat)).sum())
            for name, flat in host.items()
            if flat is not None
        }
        row = {
            "updater": updater,
            "master": "split" if is_split else "fp32",
            "gradient": str(gradient_dtype).removeprefix("torch."),
            "numel": numel,
            "differing": wrong,
            "is_bitwise": not any(wrong.values()),
        }
        record.append("cases", row)
        failures += [] if row["is_bitwise"] else [row]
    assert not failures, f"AdamW on the device differs from the host's: {failures[0]}"


def numbers(numel: int, seed: int) -> Any:
    """Make numbers of both signs and of all sizes, every 61st one special; NaN is left to the tests."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (torch.rand(numel, generator=generator, dtype=torch.float64) * 40 - 38)
    flat = (torch.randn(numel, generator=generator, dtype=torch.float64) * size).float()
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1.1754944e-38, 1.0, -1.0, 1e18, -1e18])
    places = flat[::61]
    places.copy_(special[torch.randint(len(special), places.shape, generator=generator)])
    return flat


def planes(numel: int, *, is_split: bool, gradient_dtype: Any) -> dict[str, Any]:
    """Make the state of an optimizer that has gone a while, by plane."""
    from megatrain.store.master import split_master

    working, remainder = split_master(numbers(numel, 1)) if is_split else (numbers(numel, 1), None)
    return {
        "working": working,
        "remainder": remainder,
        "exp_avg": numbers(numel, 2),
        "exp_avg_sq": numbers(numel, 3).abs_(),
    }


def as_planes(flats: Mapping[str, Any], gradient: Any) -> Any:
    """Name the planes of an update."""
    from megatrain.optim.adamw.host import Planes

    return Planes(**flats, gradient=gradient)


def bits(flat: Any) -> Any:
    """View the bits, of every NaN the same."""
    import torch

    if not flat.is_floating_point():
        return flat
    return torch.where(flat.isnan(), torch.full_like(flat, torch.nan), flat).view(
        torch.int32 if flat.dtype == torch.float32 else torch.int16
    )


# -- compiled blocks ---------------------------------------------------------------------------------------


def compiled(record: Record, is_dry: bool) -> None:
    """Train with and without compiled blocks, and compare losses and masters.

    Compiled kernels round differently, so that is a matter of tolerances; compiled blocks that are recomputed
    and compiled blocks that are kept should give the same bits.
    """
    failures = []
    if is_dry:
        compile_cheaply()
    cases = [("llama", "fp32")] if is_dry else itertools.product(("llama", "gemma2"), ("fp32", "bf16"))
    for family, precision in cases:
        plain = trained(device_of(is_dry), family, precision, compile="off", activations="recompute")
        ours = trained(device_of(is_dry), family, precision, compile="on", activations="recompute")
        kept = trained(device_of(is_dry), family, precision, compile="on", activations="keep")
        apart = max(abs(a - b) / abs(a) for a, b in zip(plain["losses"], ours["losses"], strict=True))
        row = {
            "family": family,
            "precision": precision,
            "losses": {"off": plain["losses"], "on": ours["losses"], "on, kept": kept["losses"]},
            "num_graphs": ours["num_graphs"],
            "largest_loss_difference": apart,
            "largest_master_difference": furthest(ours["masters"], plain["masters"]),
            "is_same_when_kept": ours["losses"] == kept["losses"]
            and furthest(ours["masters"], kept["masters"]) == 0.0,
            "is_ok": apart <= LATER_TOLERANCES[precision] and ours["num_graphs"] > 0,
        }
        record.append("cases", row)
        failures += [] if row["is_ok"] else [row]
    assert not failures, f"compiled blocks differ: {failures[0]}"


def trained(device: Any, family: str, precision: str, *, steps: int = 4, **options: Any) -> dict[str, Any]:
    """Train a tiny model; returns its losses, its masters, and how many graphs were compiled."""
    import torch

    from tests.families import FAMILIES
    from tests.reference import attach_plainly, make_batches, make_model

    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = make_model(FAMILIES[family](), dtype=dtype)
    engine = attach_plainly(model, device=device, precision=precision, **options)
    optimizer = engine.adamw(**HYPER, max_grad_norm=MAX_GRAD_NORM)
    losses = []
    for step in range(steps):
        losses.append(engine.forward_backward(make_batches(1, seed=step, tokens=32)).item())
        optimizer.step()
    masters = dict(engine.named_masters())
    num_graphs = 0 if engine.compiler is None else engine.compiler.num_graphs
    engine.detach()
    return {"losses": losses, "masters": masters, "num_graphs": num_graphs}


def furthest(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Return the largest difference of any tensor."""
    return max(difference(actual[name], value) for name, value in expected.items())
