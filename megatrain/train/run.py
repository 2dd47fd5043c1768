"""The parts of a run that are made before its first step: data, model, engine, optimizer, schedule, state."""

from __future__ import annotations

import gc
import logging
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatrain.checkpoint.reader import CheckpointReader
from megatrain.checkpoint.rng import encode_rng, restore_rng
from megatrain.config import Config
from megatrain.config.decided import as_begun, smallest_micro_batches
from megatrain.config.sections.log import Event
from megatrain.config.sizes import counted
from megatrain.data.loader import PackedLoader
from megatrain.distributed.alone import ALONE, Alone
from megatrain.errors import ConfigError
from megatrain.hardware.determinism import set_environment
from megatrain.hardware.health import MachineHealth
from megatrain.model.adapters.adapt import has_adapters
from megatrain.model.check import read_checked
from megatrain.model.liger import uses_liger
from megatrain.model.sequence.range import row_range
from megatrain.model.weights.files import model_directory, read_processor
from megatrain.stream.engine import Engine
from megatrain.stream.lanes.devices import compute_device
from megatrain.stream.optimizer import StreamedOptimizer
from megatrain.train.adapters import base_of, check_base, scaling_notes, write_adapter
from megatrain.train.callbacks.calls import Callbacks
from megatrain.train.caller import NOBODY, Caller
from megatrain.train.engine import engine_of_base, make_engine, untouched
from megatrain.train.evaluate.evaluator import Evaluator
from megatrain.train.experts import ExpertWatch
from megatrain.train.hang_watch import HangWatch
from megatrain.train.inputs import Packer
from megatrain.train.last_good import LastGood, sound_checkpoint_named
from megatrain.train.out_of_memory import memory_told
from megatrain.train.planning.allocation import plan_memory
from megatrain.train.planning.elastic import Elastic
from megatrain.train.planning.lately import Lately
from megatrain.train.planning.plan_run import Planned
from megatrain.train.planning.run_machine import make_health, ready_to_plan
from megatrain.train.preference.answers import loss_of
from megatrain.train.preference.reference import reference_for
from megatrain.train.ranks import agreed, described, in_turn, require_same_run, settle_ranks
from megatrain.train.records.events import EventLog
from megatrain.train.records.shareable import shareable
from megatrain.train.resume.changes import report_changes, require_same_kind
from megatrain.train.resume.point import NEW_RUN, ResumePoint
from megatrain.train.resume.record import record_refused
from megatrain.train.resume.state import compact_counts, expand_counts, read_state, write_model, write_state
from megatrain.train.resume.state_commits import encode_buffers, laid_out_as, tiers_of
from megatrain.train.run_data import RunData, make_eval_sets, make_loader, read_data
from megatrain.train.schedule import make_schedule
from megatrain.train.screen.start import start_lines
from megatrain.train.screen.within_step import WithinStep
from megatrain.train.seeds import micro_batch_seed
from megatrain.train.spikes import Spikes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainerCallback

    from megatrain.distributed.ranks import Ranks

_log = logging.getLogger(__name__)


class Beginning(NamedTuple):
    """The position of a run as a step began, to which it goes back where the step fails."""

    num_issued: int
    """The steps whose changes the engine had issued."""
    position: dict[str, Any]
    """The manifest's record of it, without the counts and the settings."""


@dataclass(slots=True)
class Run:
    """A run between two steps: its parts and its progress."""

    config: Config
    engine: Engine
    optimizer: StreamedOptimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    loader: PackedLoader
    tokenizer: PreTrainedTokenizerBase
    num_steps: int
    health: MachineHealth
    evaluator: Evaluator
    callbacks: Callbacks
    experts: ExpertWatch
    """What follows how evenly tokens go to experts, if the model has any."""
    step: int = 0
    """The number of steps done."""
    tokens: int = 0
    """The number of tokens read so far, without padding."""
    targets: int = 0
    """The number of these tokens that were trained on, which have a label."""
    skipped_in_a_row: int = 0
    planned: Planned | None = None
    """The plan; None if the model could not be counted, so that rules of thumb replace it."""
    is_checked: bool = False
    """Whether the allocations have been found to equal the plan."""
    elastic: Elastic | None = None
    """The planner between steps; None keeps the plan."""
    spikes: Spikes = field(default_factory=Spikes)
    """The losses of the last steps."""
    last_good: LastGood = field(default_factory=LastGood)
    events: EventLog | None = None
    """The log of events; None records nothing, as in a dry run."""
    ranks: Ranks | Alone = ALONE
    """The ranks that train together."""
    base: str | None = None
    """The fingerprint of the model that has adapters; None if the run trains the model itself."""
    reference: str | None = None
    """The fingerprint of the model that answers are compared with; None if there is none."""
    within: WithinStep | None = None
    """What looks at the step that is going on; None between runs of steps, and on ranks after the first."""
    beginnings: deque[Beginning] = field(default_factory=lambda: deque(maxlen=2))
    """The beginnings of the newest two steps, until the run's end."""
    hang_watch: HangWatch | None = None
    """What ends the process if a step, an evaluation or a save hangs; None: nothing does."""
    save_s: float | None = None
    """The seconds that the newest save took; None before the first."""
    processor: Mapping[str, bytes] = field(default_factory=dict)
    """The files of the model's processor of images, by name."""

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.num_steps

    def tell(self, event: Event, **values: Any) -> None:
        """Record an event after the steps so far, with further facts about it as plain values."""
        self.tell_of(self.step, event, **values)

    def tell_of(self, step: int, event: Event, **values: Any) -> None:
        """Record an event of an earlier step."""
        if self.events is not None:
            self.events.write(event, step, **values)

    def doing(self, what: str) -> None:
        """Tell the other ranks what this one does from now on, in case it is lost."""
        self.ranks.watch.doing(what)

    def moving(self, what: str) -> AbstractContextManager[None]:
        """Let the other ranks wait without limit for the work of this one, as long as it makes progress."""
        return self.ranks.watch.moving(what)

    def meta(self) -> dict[str, Any]:
        """Return what a manifest keeps beside the tensors, as plain values."""
        with self.watched(f"step {self.step}"):
            self.engine.settle()  # updates in the background count themselves
        return self._position() | self._counts() | self._settings()

    def watched(self, what: str = "", *, moves: bool = False) -> AbstractContextManager[None]:
        """Have progress watched for as long as the context lasts; the arguments are `HangWatch.watched`'s."""
        return nullcontext() if self.hang_watch is None else self.hang_watch.watched(what, moves=moves)

    def note_position(self) -> None:
        """Note where the run is: a step that fails, or an evaluation that hangs, has drawn random numbers."""
        if self.beginnings and self.beginnings[-1].position["step"] == self.step:
            self.beginnings.pop()  # noted before an evaluation
        num_issued = self.engine.arrangement.integrity.num_issued
        self.beginnings.append(Beginning(num_issued, self._position()))

    def end_update(self, num_targets: int) -> None:
        """Count a step whose update is issued; from now on the run is behind it."""
        self.step += 1
        self.tokens += self.loader.num_tokens
        self.targets += num_targets

    def whole_meta(self) -> dict[str, Any] | None:
        """Return `meta` of the last whole step after one that has failed, whose state the engine has.

        None: no step was taken, or its state is not known to be that of any.

        Raises:
            TornStateError: The state is torn.
        """
        self.engine.settle()
        return self.meta_of(self.engine.arrangement.integrity.num_held)

    def meta_of(self, num_held: int) -> dict[str, Any] | None:
        """Return `meta` of the state that holds so many of the engine's steps; waits for nothing.

        None: no step was taken, or its position is not known.
        """
        found = list(self.beginnings)
        integrity = self.engine.arrangement.integrity
        if found and self.step > found[-1].position["step"]:
            found.append(Beginning(integrity.num_issued, self._position()))
        held = [each.position for each in found if each.num_issued == num_held]
        if not held or not held[-1]["step"]:
            return None
        return held[-1] | self._counts() | self._settings()

    def commit(self) -> None:
        """Make this step the one that a crash goes back to, if the state is on drives; return at once."""
        if tiers_of(self.config) is not None:
            position = self._position() | self._settings() | {"buffers": encode_buffers(self.engine.model)}
            self.engine.commit(self.step, position, finish=self._counts)

    def _position(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "is_last": self.is_complete,
            "tokens": self.tokens,
            "targets": self.targets,
            "skipped": self.optimizer.num_skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "schedule": {"last_epoch": self.scheduler.last_epoch},
            "data": self.loader.state(),
            "rng": encode_rng(),
            "drive_written_bytes": self.health.written_bytes(),
            "fragments": self.engine.choice.fragments,
            "expert_chunks": self.engine.choice.expert_chunks,
            "evaluation": self.evaluator.best_tracker.state(),
            "losses": self.spikes.state(),
            "last_good": self.last_good.state(),
            "router_loss": "mean",  # the mean of a step's micro-batches; older runs have added them up
            "callbacks": self.callbacks.saved_state(),
        } | {name: value for name in ("base", "reference") if (value := getattr(self, name)) is not None}

    def _counts(self) -> dict[str, Any]:
        return {"updates": compact_counts(self.optimizer.steps)}

    def _settings(self) -> dict[str, Any]:
        return {"config": shareable(self.config.model_dump(mode="json"))}

    def write(self, directory: Path, read: set[int] | None = None) -> None:
        """Write the tensors and the files of a checkpoint: the model, or its adapters alone.

        `read` is that of `write_state`, which this raises the errors of.
        """
        if has_adapters(self.engine.model):
            write_adapter(self.engine, self.tokenizer, directory, base=base_of(self.config))
        else:
            write_model(self.engine, self.tokenizer, directory, processor=self.processor)
        write_state(self.engine, directory, read)

    def restore_position(self, meta: Mapping[str, Any]) -> None:
        """Continue where a checkpoint or a commit was made; the engine has all of its state already.

        Raises:
            DataError: The record does not belong to this data.
        """
        self.step, self.tokens = int(meta["step"]), int(meta["tokens"])
        self.targets = int(meta.get("targets", 0))
        self.skipped_in_a_row = int(meta["skipped_in_a_row"])
        self.optimizer.num_skipped = int(meta["skipped"])
        self.optimizer.steps = expand_counts(meta["updates"], self.optimizer.steps)
        self.health.resume(int(meta.get("drive_written_bytes") or 0))
        self.loader.restore(meta["data"])
        self.evaluator.best_tracker.restore(meta.get("evaluation", {}))
        self.spikes.restore(meta.get("losses", ()))
        self.last_good.restore(meta.get("last_good", {"saved": [self.step]}))
        self.callbacks.restore(meta.get("callbacks", {}))
        restore_rng(meta["rng"])
        with warnings.catch_warnings():
            # torch wants an optimizer step before each schedule step; those were done before the checkpoint
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for _ in range(int(meta["schedule"]["last_epoch"])):
                self.scheduler.step()

    def forward_backward(
        self, micro_batches: Sequence[Mapping[str, Any]], seeds: Sequence[int]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Run this rank's part of a step up to its update; return the step's loss and its other values."""
        return loss_of(self.config).forward_backward(self.engine, micro_batches, seeds, self.ranks)

    def micro_batch_seeds(self) -> list[int]:
        """Return one seed of dropout per micro-batch of the next step, from the run's seed and the step."""
        seed, count = self.config.train.seed, self.config.train.grad_accumulation
        return [micro_batch_seed(seed, self.step, number) for number in range(count)]


def prepare(
    config: Config,
    point: ResumePoint = NEW_RUN,
    caller: Caller = NOBODY,
    *,
    references: Path | None = None,
    show: Callable[[str], object] = _log.debug,
    check: Callable[[Planned, RunData], object] = lambda planned, data: None,
    callbacks: Sequence[TrainerCallback] = (),
    ranks: Ranks | Alone = ALONE,
    reader: CheckpointReader | None = None,
) -> Run:
    """Make everything that a run needs, from a checkpoint or a commit on drives if there is one.

    Checks come first, then the data, then the plan, and then memory is taken as planned.

    Args:
        config: The complete and checked settings.
        point: The point from which the run resumes.
        caller: The folders that are kept between runs, and the functions that measure and show progress.
        references: The folder in which log-probabilities of reference models are kept; None compares answers
            with nothing, where only times are measured.
        show: The function that is given the lines of `start_lines`, before memory is taken.
        check: The function that looks at the first rank's plan, and may refuse it, before memory is taken.
        callbacks: The callbacks, of transformers' Trainer, which the run calls.
        ranks: The ranks that train together; the first one plans, and reads weights and state.
        reader: The reader of the checkpoint, which compares what it reads; None: it has been compared.

    Raises:
        DamagedError: The checkpoint is not what its manifest says; what was made of it is let go of.
        MegatrainError: The subclass says what is wrong with the model, the data, the configuration or the
            fit.
    """
    given, checkpoint, earlier = config, point.checkpoint, point.record
    if earlier is not None:
        with record_refused(checkpoint or "the drives"):
            config = as_begun(config, earlier["config"])
    asked, config = config, laid_out_as(point.committed, config)
    device = compute_device(config.train.device)
    if config.train.deterministic or config.train.on_spike == "replay":
        set_environment(device)  # this comes before the first product, in `measure_peak`
    uses_liger(config.model.kernels, device.type)  # an impossible wish is refused before anything is read
    with in_turn(ranks):  # the first rank prepares the data, or fails; the others read them
        base = check_base(config, earlier)
        source = str(checkpoint) if checkpoint is not None and base is None else config.model.path
        caller.progress("reading the model's configuration, and checking its files")
        is_random = checkpoint is None and config.model.init == "random"
        model_config, place = read_checked(
            source,
            has_weights=not is_random and point.committed is None,
            rope_scaling=config.model.rope_scaling,
        )
        processor = {} if is_random or base is not None else read_processor(place or model_directory(source))
        caller.progress("reading and tokenising the data")
        day = None if earlier is None else earlier["data"].get("day")
        data = read_data(config, model_config, checkpoint=checkpoint, folder=caller.prepared, day=day)
        config, tokenizer, num_steps = data.config, data.tokenizer, data.num_steps
        rows = row_range(model_config)
        for line in (*data.packed.notes(), *rows.notes(config.data.seq_len), *scaling_notes(config)):
            show(line)
        packer = Packer(config, tokenizer, model_config, caller.prepared, data.packed.day)
        held_out = packer.evaluation(data.packed)
        if (warmup := config.optim.warmup_steps) > num_steps:
            steps = counted(num_steps, "step")
            raise ConfigError(f"optim.warmup_steps is {warmup}, but the run has {steps}; use fewer")
    packed = data.packed
    model_counts = ready_to_plan(config, source, model_config, packed.packing, caller, packed.document_len)
    planned = None
    settle_ranks(config, ranks)
    if ranks.rank == 0:
        of_run = {"num_steps": num_steps, "earlier": earlier, "given": given}
        planned = plan_memory(
            config, model_counts, caller.measure, ranks, lately=Lately(caller.counts), **of_run
        )
        config = smallest_micro_batches(config) if planned is None else planned.config
        if planned is not None:
            check(planned, data)
        for line in start_lines(
            config,
            planned,
            data,
            first_step=0 if earlier is None else int(earlier["step"]),
            now=datetime.now(),
            ranks=described(ranks, config.parallel.shards),
            evaluated=[len(rows) for rows, _ in held_out.values()],
        ):
            show(line)
    choice, planned_tokens = config.choice, 0
    if planned is not None:
        choice, planned_tokens = planned.plan.choice, planned.plan.tokens_together
    choice, config = agreed(ranks, choice, config)
    planned_tokens = ranks.tell(planned_tokens)
    loader = make_loader(data, config)
    evaluator = Evaluator(
        config.eval,
        make_eval_sets(config, held_out),
        num_steps=num_steps,
        steps_per_epoch=loader.steps_per_epoch,
    )
    for line in evaluator.notes:
        show(line)
    reference = reference_for(config, (loader.rows, *evaluator.rows), references)
    if reference is not None and earlier is not None:
        reference.check(earlier)
    caller.progress("loading the model")
    facts = {"data": loader.state(), "steps": num_steps, "model": model_config.to_dict()}
    require_same_run(ranks, config, facts)
    vocab_size = model_config.get_text_config().vocab_size if config.model.new_tokens else None
    if reference is not None and earlier is not None:
        if ranks.rank == 0 and not reference.is_kept:
            caller.progress("computing the reference with the model that the run began with")
            reference.fill(lambda: engine_of_base(config, choice, vocab_size, planned_tokens))
            gc.collect()  # the run needs its memory now
        ranks.meet("orders")  # the others wait here for as long as that takes
    with (
        memory_told(config, planned, "while the model was loaded"),
        sound_checkpoint_named(checkpoint, point.saved),
    ):
        engine = make_engine(
            config,
            choice,
            model_config if is_random else source,
            adapter=None if base is None else checkpoint,
            committed=point.committed,
            vocab_size=vocab_size,
            ranks=ranks,
            planned_tokens=planned_tokens,
            reader=reader,
        )
    try:
        if reference is not None:
            reference.fill(lambda: untouched(engine), ranks)
        optimizer = engine.make_optimizer(
            config.optim.name,
            max_grad_norm=config.optim.max_grad_norm,
            no_decay=config.optim.no_decay,
            seed=config.train.seed,
            **{name: getattr(config.optim, name) for name in config.optimizer.defaults()},
        )
        if earlier is not None:
            with record_refused(checkpoint or "the drives"):
                require_same_kind(config, earlier)
        if checkpoint is not None and point.committed is None:
            _read_state(engine, checkpoint, reader, ranks)
    except Exception:
        engine.close()  # another attempt, from another checkpoint, uses the same drives
        raise
    scheduler = make_schedule(config, optimizer, num_steps)
    run = Run(
        config=asked.model_copy(update={"train": config.train, "data": config.data}),
        engine=engine,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        tokenizer=tokenizer,
        num_steps=num_steps,
        planned=planned,
        health=make_health(config),
        evaluator=evaluator,
        callbacks=Callbacks(
            callbacks,
            config,
            num_steps=num_steps,
            steps_per_epoch=loader.steps_per_epoch,
            objects={
                "model": engine.model,
                "processing_class": tokenizer,
                "optimizer": optimizer,
                "lr_scheduler": scheduler,
            },
            ranks=ranks,
        ),
        experts=ExpertWatch(engine.count_experts(), ranks),
        base=base,
        reference=None if reference is None else reference.model,
        processor=processor,
        ranks=ranks,
    )
    if (
        ranks.size == 1
        and planned is not None
        and not planned.request.spec.is_cpu
        and not config.train.reproducible
    ):
        run.elastic = Elastic(engine, planned.request, planned.plan)
    if earlier is not None:
        with record_refused(checkpoint or "the drives"):
            report_changes(config, earlier, model_config)
        with record_refused(checkpoint if point.committed is None and checkpoint else "the drives"):
            run.restore_position(earlier)
    return run


def _read_state(
    engine: Engine, checkpoint: Path, reader: CheckpointReader | None, ranks: Ranks | Alone
) -> None:
    """Read the state of a checkpoint, whose working weights the engine has already; all ranks call it.

    Raises:
        DamagedError: Something is not what the manifest says, of what this node has read or the first has.
        CheckpointError: The checkpoint does not belong to this model.
    """
    read_state(engine.host, checkpoint, reads=ranks.local_rank == 0, reader=reader)
    if reader is not None and ranks.rank == 0:
        reader.finish()
    elif reader is not None:
        reader.compare_headers()  # the first rank has compared the rest, which this node does not read
    engine.weights_changed()
    ranks.meet("orders")
