"""`plan_run` leads from settings and a machine to a plan, before a byte is allocated.

The question to the planner, which is settings and data with all that is decided, is in `asking`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatrain.config import Config
from megatrain.config.attention import TILED
from megatrain.config.choice import AUTO
from megatrain.config.decided import larger_step_settings, smaller_step_settings
from megatrain.config.plan import Plan
from megatrain.config.policies import KEEP_ATTENTION, RECOMPUTE
from megatrain.config.sizes import counted
from megatrain.hardware import GIB, HardwareSpec
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.cost.deterministic import copies_of_gradient, filled_share, is_priced
from megatrain.plan.cost.passes import Passes
from megatrain.plan.cost.watching import Watching, watching
from megatrain.plan.search.micro_batches import in_smaller_micro_batches
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.remedies import Remedy, advise
from megatrain.plan.search.request import Request
from megatrain.plan.search.small_step import larger_step
from megatrain.plan.search.verdict import Verdict, judge
from megatrain.plan.search.wear import spare_drives
from megatrain.train.caller import NOBODY, Caller
from megatrain.train.planning.asking import OwnMachine, ask
from megatrain.train.planning.gpus import of_ranks
from megatrain.train.planning.space import Space, space_of
from megatrain.train.planning.stop_time import StopTime, stop_time
from megatrain.train.records.metrics import format_count
from megatrain.train.resume.point import NEW_RUN, ResumePoint

_TOKENS = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan, the request that it answers, and the notes that go with it."""

    plan: Plan
    request: Request
    config: Config
    model: str
    """The model as it was given."""
    count_s: float
    """The seconds of counting the model, and of timing its layers on a CPU, beside `plan.plan_s`."""
    tokens: int = 0
    """The number of tokens still to train on, from which the days and the wear of drives follow."""
    verdict: Verdict
    data: str = ""
    """The training data in a few words; empty if they were not looked at."""
    remedies: tuple[Remedy, ...] = ()
    """The remedies that would make it fit, if it does not."""
    spares: tuple[str, ...] = ()
    """The changes that would spare drives that wear out soon, each with the days that it gives."""
    hint: str = ""
    """The cost of a step that the user has made small; empty if there is none."""
    space: Space | None = None
    """The room in the run directory; None: it is on another machine, or its file system does not say."""
    notes: tuple[str, ...] = ()

    @property
    def watching(self) -> Watching:
        """What is watched of the state in RAM."""
        return watching(self.plan, self.request.step(self.plan.choice), self.config.memory.watch)

    @property
    def stop(self) -> StopTime:
        """How long a stop takes, without an evaluation that may be going on."""
        return stop_time(self.config, self.request, self.plan)

    def evaluation_s(self, num_micro_batches: int) -> float:
        """Return the seconds in which so many micro-batches pass without gradients."""
        step = self.request.step(self.plan.choice)
        return Passes(step, self.plan.together).seconds(num_micro_batches)


def plan_run(
    raw: Mapping[str, Any],
    machine: HardwareSpec | OwnMachine,
    *,
    tokens: int | None = None,
    point: ResumePoint = NEW_RUN,
    caller: Caller = NOBODY,
    **given: Any,
) -> Planned:
    """Plan a run in which every GPU of the machine is a rank; other arguments and errors are those of `ask`.

    Args:
        raw: The settings, as in `ask`.
        machine: The machine, as in `ask`.
        tokens: The number of tokens to train on; None takes those left, or 1e9 if there are no steps.
        point: The point from which the run resumes.
        caller: The folders and the progress, as in `ask`.
        given: The other arguments of `ask`.
    """
    asked = ask(raw, machine, point=point, caller=caller, **given)
    gathers, spec = asked.config.parallel.gathers, asked.request.spec
    request = of_ranks(asked.request, spec.num_ranks, spec.num_nodes, gathers=gathers)
    caller.progress("searching choices")
    plan = make_plan(request)
    done, written_bytes = done_before(point.record)
    if tokens is None:
        left = None if asked.num_steps is None else max(0, asked.num_steps - done)
        tokens = _TOKENS if left is None else left * asked.config.train.tokens_per_step
    remedies: list[Remedy] = []
    spares: tuple[str, ...] = ()
    if not plan.fits:
        caller.progress("looking for what would make it fit")
        smaller = partial(smaller_step_settings, asked.given) if point.record is None else None
        remedies = advise(request, asked.recount, smaller=smaller)
    verdict = judge(
        request,
        plan,
        tokens=tokens,
        written_bytes=written_bytes,
        others=partial(open_sizes, request, asked.recount, asked.given if point.record is None else None),
        progress=caller.progress,
    )
    if plan.fits and plan.bytes_per_step["drive_written"]:
        caller.progress("looking for what would spare the drives")
        spares = tuple(spare_drives(request, plan, tokens=tokens, written_bytes=written_bytes))
    space = None
    if plan.fits and isinstance(machine, OwnMachine):
        space = space_of(
            asked.config,
            request,
            plan,
            num_steps=asked.num_steps,
            steps_per_epoch=None if asked.data is None else asked.data.steps_per_epoch,
            done=done,
        )
    return Planned(
        plan=plan,
        request=request,
        space=space,
        config=asked.config,
        model=asked.model,
        tokens=tokens,
        verdict=verdict,
        data="" if asked.data is None else asked.data.packed.describe(),
        remedies=tuple(remedies),
        spares=spares,
        hint=step_hint(request, plan, asked.given),
        notes=(*asked.notes, *_notes(request), *_results_note(plan, request.anatomy)),
        count_s=asked.count_s,
    )


def open_sizes(request: Request, recount: Callable[..., Anatomy], given: Config | None) -> Iterator[Request]:
    """Yield the step of a request in smaller micro-batches, if the planner chooses their size.

    Args:
        request: The request for the step.
        recount: The function that counts its model anew.
        given: The settings of a new run as the user gave them; None means that its sizes are decided.
    """
    if given is not None and given.train.micro_batch_size == AUTO:
        yield from in_smaller_micro_batches(request, recount)


def step_hint(request: Request, plan: Plan, given: Config) -> str:
    """Return a note on the cost of a small step and the setting that makes it faster; empty if none.

    Args:
        request: The request for which the plan was made.
        plan: The plan.
        given: The settings as the user gave them.
    """
    if not (plan.fits and larger_step_settings(given, 1)):
        return ""
    larger = larger_step(request, plan)
    return "" if larger is None else larger.text(plan, larger_step_settings(given, larger.factor))


def done_before(meta: Mapping[str, Any] | None) -> tuple[int, int]:
    """Return the steps that a run has taken, and the bytes that it has written to its drives.

    Args:
        meta: The record of a checkpoint or a commit; None for a new run.
    """
    return (0, 0) if meta is None else (int(meta["step"]), int(meta.get("drive_written_bytes") or 0))


def _notes(request: Request) -> list[str]:
    anatomy, spec = request.anatomy, request.spec
    notes = []
    if anatomy.num_active_params < 0.98 * anatomy.num_params:
        is_part = anatomy.num_trained < 0.98 * anatomy.num_params
        trained = format_count(anatomy.num_trained) if is_part else ""
        notes.append(
            f"a token passes {format_count(anatomy.num_active_params)} of {format_count(anatomy.num_params)} "
            "parameters; the model's experts are counted as evenly used, and all of them stream"
            + (f", but only the {trained} that are trained update" if trained else " and update")
        )
        if spec.has_accelerator:
            notes.append("published runs of models with experts were slower than their plans")
    notes += [*_tiles_note(anatomy), *rates_note(spec, anatomy.precision)]
    if request.deterministic and spec.has_accelerator and anatomy.num_heads:
        notes.append(_deterministic_note(request))
    if request.optimizer.caveat:
        notes.append(request.optimizer.caveat)
    return notes


def rates_note(spec: HardwareSpec, precision: str) -> list[str]:
    """Return notes on the origin of a machine's rates where they are not measured."""
    source = spec.sources.get("matmul_flops_per_s", "")
    if source.startswith("measured"):
        return []
    measure = "on the machine itself, megatrain doctor --bench measures them"
    if source.startswith(f"{precision}: fitted"):
        return [
            f"of the rates of {spec.name}, that of {precision} products is fitted to another system's "
            f"published run, and all others are vendors' or assumed: megatrain has not run there; {measure}"
        ]
    return [
        f"nobody has measured the rates of {spec.name}, and no published run backs them: they are vendors' "
        f"figures, or assumed; {measure}"
    ]


def _tiles_note(anatomy: Anatomy) -> list[str]:
    """Return a note on layers whose attention goes by tiles of torch's own operations."""
    moved = [layer.forward.attention_bytes for layer in anatomy.layers if layer.forward.attention_bytes]
    if not moved:
        return []
    return [
        f"attention of {len(moved)} of {counted(len(anatomy.layers), 'layer')} goes by tiles of torch's own "
        f"operations ({TILED}), since no kernel is known to do it here: a layer's forward reads and writes "
        f"{max(moved) / GIB:.2f} GiB of scores, tile by tile"
    ]


def _results_note(plan: Plan, anatomy: Anatomy) -> list[str]:
    """Return a note on layers that are to keep what attention returns, and have none that can be kept."""
    layers = anatomy.layers_of(plan.choice)
    asked = [
        layer.saved_bytes[policy.name] == layer.saved_bytes[RECOMPUTE.name]
        for layer, policy in zip(layers, plan.choice.policies, strict=True)
        if policy.keeps_attention_alone
    ]
    if not any(asked):
        return []
    return [
        f"{sum(asked)} of {counted(len(asked), 'layer')} under activations={KEEP_ATTENTION.name} keep "
        "nothing of attention, since none of their operations returns a log-sum-exp (eager attention, "
        "torch's math path, a mixer of another kind): their forward runs again whole"
    ]


def _deterministic_note(request: Request) -> str:
    """Return a note on the cost of deterministic attention."""
    anatomy, spec = request.anatomy, request.spec
    if anatomy.precision != "bf16" or not is_priced(spec, request.heads):
        return (
            f"train.deterministic=true: what attention loses by it on {spec.name} in {anatomy.precision} is "
            "not known, and not in these times"
        )
    assert spec.multiprocessors is not None
    share = spec.flash2_share * filled_share(spec.multiprocessors, request.heads)
    copies = copies_of_gradient(spec.multiprocessors, request.heads)
    nbytes = 4 * copies * anatomy.tokens * request.batch.sequence * anatomy.num_heads * anatomy.head_dim
    return (
        f"train.deterministic=true: attention's forward at {spec.flash2_share:.0%} and its backward at "
        f"{share:.0%} of their rates are in these times; {copies} copies of a gradient, {nbytes / GIB:.2f} "
        "GiB on the device in the backward of a layer, are not in the pools"
    )
