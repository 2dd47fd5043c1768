"""Whether anything is used before it is there, and whether the launching thread ever stands still.

- `races`: blocks with tiny and huge weights in turn, with and without random delays in the compute stream
  and in the copy streams; every run equals a run that waits for the device after every copy, bit for bit.
- `syncs`: whether the launching thread ever waits for the device inside a step. torch's own mode for that
  counts for the whole process, and the lanes' threads may wait, so calls are noted with their thread in
  place of being made errors.
"""

from __future__ import annotations

import random
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from benchmarks.gpu.run import Heard, Record, deterministic, device_of

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


# -- races -------------------------------------------------------------------------------------------------

RACES: tuple[dict[str, Any], ...] = (
    {"activations": "recompute", "num_slots": 2, "num_gradient_buffers": 1},
    {"activations": "keep", "num_slots": 2, "num_gradient_buffers": 2},
    {"activations": "offload", "num_slots": 2, "lockstep": 2},
    {"activations": "recompute_cheap", "num_slots": 3, "fragments": True, "resident_layers": 2},
    {"activations": "recompute", "num_slots": 1, "num_gradient_buffers": 1},
    {"activations": "keep", "num_slots": 3, "num_gradient_buffers": 1},
    {"activations": "recompute", "boundaries": "host", "fragments": True, "lockstep": 2},
    {"activations": ("recompute", "drop_boundary") * 5, "num_slots": 2, "lockstep": 2},
)
"""The first ones are those of a dry run."""


def races(record: Record, is_dry: bool) -> None:
    """Compare runs with every kind of delay, bit for bit, with one that waits after every copy."""
    steps = 3 if is_dry else 9
    variants = ["plain", "slow_both"] if is_dry else ["plain", "slow_compute", "slow_copies", "slow_both"]
    race(record, is_dry, RACES[:4] if is_dry else RACES, variants, steps)


@deterministic()
def race(
    record: Record, is_dry: bool, cases: Iterable[dict[str, Any]], variants: Sequence[str], steps: int
) -> None:
    """Compare runs of some settings under some kinds of delay, bit for bit, with one that always waits."""
    failures = []
    for options in cases:
        expected = trained(is_dry, "synchronous", steps, **options)
        for variant in variants:
            found = trained(is_dry, variant, steps, **options)
            wrong = [name for name, value in expected.items() if not same(found[name], value)]
            record.append("runs", {**options, "variant": variant, "steps": steps, "differing": wrong[:5]})
            failures += wrong
    assert not failures, (
        f"a race: {len(failures)} values differ from the synchronous run, first {failures[0]}"
    )


def same(actual: Any, expected: Any) -> bool:
    """Compare bits, so that NaN equals NaN."""
    import torch

    return torch.equal(actual.view(torch.int32), expected.view(torch.int32))


def trained(is_dry: bool, variant: str, steps: int, **options: Any) -> dict[str, Any]:
    """Train uneven blocks under one kind of delay; returns losses, norms and the final masters."""
    import torch

    from tests.reference import attach_plainly

    chance = random.Random(f"{variant} {options}")
    model = uneven_model(is_dry)
    device = device_of(is_dry)
    if variant in ("slow_compute", "slow_both") and device.type != "cpu":
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_: doze(device, chance))
            layer.mlp.register_forward_hook(
                lambda module, args, output: doze_in_backward(output, device, chance)
            )
    lanes = lanes_for(variant, device, chance)
    if isinstance(options["activations"], tuple):
        options["activations"] = options["activations"][: len(model.model.layers)]
    engine = attach_plainly(model, device=lanes, precision="fp32", compile="off", **options)
    optimizer = engine.adamw(**HYPER, max_grad_norm=1.0)
    generator = torch.Generator().manual_seed(1)
    losses, norms = [], []
    for step in range(steps):
        # Few tokens: copies of huge blocks outlast their compute. Every third step adds up three
        # micro-batches, in lockstep two and one.
        ids = [torch.randint(0, 256, (1, 16), generator=generator) for _ in range(3 if step % 3 == 2 else 1)]
        losses.append(engine.forward_backward([{"input_ids": part, "labels": part} for part in ids]).cpu())
        norms.append(optimizer.step().grad_norm)
    values = {name: value.clone() for name, value in engine.named_masters()}
    engine.detach()
    assert torch.stack(losses).isfinite().all()
    assert min(norms) > 0
    return {"losses": torch.stack(losses), "norms": torch.tensor(norms), **values}


def uneven_model(is_dry: bool) -> Any:
    """Make a Llama whose layers are tiny and huge in turn."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, num_layers, widths = (32, 4, (16, 512)) if is_dry else (256, 10, (16, 16384))
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=widths[0],
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=256,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float().train()
    for layer in model.model.layers[1::2]:
        layer.mlp.gate_proj = torch.nn.Linear(hidden, widths[1], bias=False)
        layer.mlp.up_proj = torch.nn.Linear(hidden, widths[1], bias=False)
        layer.mlp.down_proj = torch.nn.Linear(widths[1], hidden, bias=False)
    return model


def doze(device: Any, chance: random.Random) -> None:
    """Keep the current stream busy for up to a millisecond or so."""
    import torch

    if device.type == "cuda":
        torch.cuda._sleep(chance.randrange(1, 2_000_000))
        return
    busy = torch.ones(1 << 14, device=device)
    for _ in range(chance.randrange(1, 20)):
        busy.sin_()  # no product: a layer that keeps its products would take it for one of its own


def doze_in_backward(output: Any, device: Any, chance: random.Random) -> None:
    """Delay the backward at this place as well."""
    if output.requires_grad:
        output.register_hook(lambda _: doze(device, chance))


def lanes_for(variant: str, device: Any, chance: random.Random) -> Any:
    """Make lanes with the delays of a variant."""
    from megatrain.stream import lanes

    if device.type == "cpu":
        machine = lanes.EmulatedMachine(jitter_s=1e-4, seed=chance.randrange(1 << 20))
        return lanes.InlineLanes() if variant == "synchronous" else lanes.EmulatedLanes(machine)
    import torch

    class Slow(lanes.AcceleratorLanes):
        """Copies begin after a random delay."""

        def _submit(self, lane: Any, function: Callable[[], object], work: float, label: object) -> None:
            def late() -> None:
                if lane is not lanes.Lane.HOST:
                    doze(self.device, chance)
                function()

            super()._submit(lane, late, work, label)

    class Synchronous(lanes.AcceleratorLanes):
        """The device is idle before and after every copy."""

        def _submit(self, lane: Any, function: Callable[[], object], work: float, label: object) -> None:
            torch.accelerator.synchronize(self.device)
            super()._submit(lane, function, work, label)
            self.drain()

    kinds = {"synchronous": Synchronous, "slow_copies": Slow, "slow_both": Slow}
    return kinds.get(variant, lanes.AcceleratorLanes)(device)


# -- waits -------------------------------------------------------------------------------------------------


def syncs(record: Record, is_dry: bool) -> None:
    """Note, from the third step on, where the launching thread waits for the device inside a step."""
    import torch

    from tests.reference import attach_plainly

    device = device_of(is_dry)
    settings: tuple[dict[str, Any], ...] = (
        {"activations": "recompute"},
        {"activations": "recompute", "lockstep": 2, "num_micro_batches": 2},
        {"activations": "offload", "boundaries": "host", "fragments": True},
        {"activations": "recompute_cheap", "resident_layers": 2, "lockstep": 2, "num_micro_batches": 2},
        {"activations": "keep", "resident_layers": 4},
    )
    for options in settings[:2] if is_dry else settings:
        model = uneven_model(is_dry)
        engine = attach_plainly(model, device=device, precision="bf16", **options)
        optimizer = engine.adamw(**HYPER, max_grad_norm=1.0)
        ids = torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(0))
        batches = [{"input_ids": ids, "labels": ids}] * options.get("num_micro_batches", 1)
        results = []
        for step in range(5):
            if step == 2:
                heard = Heard(engine)
            with ExitStack() as stack:
                found = stack.enter_context(watched(device)) if step >= 2 else []
                loss = engine.forward_backward(batches)
                stats = optimizer.step()
            results.append((loss, stats))
            note_calls(record, options, step, found)
        heard.stop()
        losses = [loss.item() for loss, _ in results]
        record.append(
            "runs",
            {
                **options,
                "losses": losses,
                "grad_norms": [stats.grad_norm for _, stats in results],
                "waits_of_launcher_s": waits_by_cause(heard.waits, ("compute", "caller")),
                "waits_of_copies_s": waits_by_cause(heard.waits, ("fetch", "offload", "save", "restore")),
            },
        )
        engine.detach()
    calls = record.values.get("calls", [])
    launching = [call for call in calls if call["is_launching"]]
    record.add(is_ok=not launching, num_launching=len(launching), num_elsewhere=len(calls) - len(launching))


def note_calls(record: Record, options: dict[str, Any], step: int, found: list[dict[str, Any]]) -> None:
    """Add the calls that waited in one step, each place once."""
    places = Counter((call["is_launching"], call["thread"], call["what"], call["stack"]) for call in found)
    for (is_launching, thread, what, stack), count in places.items():
        row = {"is_launching": is_launching, "thread": thread, "what": what, "count": count}
        record.append("calls", {**options, "step": step, **row, "stack": list(stack)})


def waits_by_cause(waits: Sequence[Any], lanes: Sequence[str]) -> dict[str, float]:
    """Add up the seconds that some lanes waited, by what they waited for."""
    total: Counter[str] = Counter()
    for wait in waits:
        if wait.cause.waiting.value in lanes:
            cause = wait.cause
            total[f"{cause.waiting.value} for {cause.owner.value}: {cause.buffer}"] += wait.seconds
    return dict(total)


@contextmanager
def watched(device: Any) -> Iterator[list[dict[str, Any]]]:
    """Yield a list to which every call that waits for the device is added, with its thread and stack."""
    import torch

    found: list[dict[str, Any]] = []

    def note(what: str) -> None:
        thread = threading.current_thread()
        # autograd's threads are torch's own, and Python knows them as dummies
        is_launching = thread is threading.main_thread() or isinstance(thread, threading._DummyThread)
        frames = [frame for frame in traceback.extract_stack()[:-2] if "/warnings.py" not in frame.filename]
        stack = tuple(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-8:])
        found.append({"is_launching": is_launching, "thread": thread.name, "what": what, "stack": stack})

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            note("an operation of torch")

    def noting(call: Callable[..., Any], what: str) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            note(what)
            return call(*args, **kwargs)

        return called

    if device.type != "cuda":
        yield found
        return
    torch.cuda.synchronize(device)
    held = torch.cuda.get_sync_debug_mode()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("warn")  # which warns of itself
        stack.callback(torch.cuda.set_sync_debug_mode, held)
        warnings.simplefilter("always")
        stack.enter_context(mock.patch.object(warnings, "showwarning", show))
        for owner, name in (
            (torch.cuda.Event, "synchronize"),
            (torch.cuda.Stream, "synchronize"),
            (torch.cuda, "synchronize"),
        ):
            stack.enter_context(
                mock.patch.object(owner, name, noting(getattr(owner, name), f"{owner.__name__}.{name}"))
            )
        yield found
