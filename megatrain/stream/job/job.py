"""The job for which a model is streamed: what `load` and `attach` are told, whatever is chosen."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from megatrain.config.choice import Choice, StepBatch, part_of
from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.optimizers.registry import DEFAULT, find
from megatrain.config.runs import Runs, StepSums, SumRoom
from megatrain.config.sizes import parse_limit
from megatrain.distributed.alone import ALONE
from megatrain.layout.blocks import BlockLayout
from megatrain.layout.totals import GradientPlaces
from megatrain.store.placement import Tiers
from megatrain.store.precision import Precision, read_precision
from megatrain.store.state import HostState
from megatrain.stream.job.ranks import Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Everything that decides the bytes of a model's state, beside the model and the choice."""

    precision: Precision = Precision.FP32
    """The precision in which weights are kept."""
    optimizer: Optimizer = DEFAULT
    """The optimizer for whose state there must be room."""
    batch: StepBatch | None = None
    """This rank's part of the batch of a step; None: one micro-batch, of which nothing is known."""
    host_limit: int | None = None
    """The number of bytes that the whole state may take; None: what the machine has."""
    tiers: Tiers | None = None
    """The tiers, which say what goes to drives; None: nothing does."""
    ranks: Ranks = ALONE
    """The ranks that train together and keep one state."""

    @classmethod
    def read(
        cls,
        choice: Choice,
        *,
        precision: str,
        batch: StepBatch | None,
        optimizer: str,
        optimizer_state: str,
        host_limit: int | str | None,
        tiers: Tiers | None,
        ranks: Ranks | None,
    ) -> tuple[Choice, Job]:
        """Read the arguments of `attach` and `load`; return one rank's part of the choice, and its job.

        Raises:
            ConfigError: An unknown value, or ranks that cannot do what is decided.
        """
        Tiers.check(tiers)
        kept, kind = read_precision(precision), find(optimizer, optimizer_state)
        ranks, limit = ranks or ALONE, parse_limit(host_limit, "host_limit")
        choice, part = part_of(ranks.size, choice, batch, num_nodes=ranks.num_nodes, gathers=ranks.gathers)
        if limit is None and tiers is not None:
            limit = tiers.ram_bytes
        return choice, cls(
            precision=kept, optimizer=kind, batch=part, host_limit=limit, tiers=tiers, ranks=ranks
        )

    @property
    def runs(self) -> Runs:
        """The runs of this rank's part of a step: how many there always are, and how long they are."""
        return Runs() if self.batch is None else self.batch.runs

    @property
    def sequence(self) -> int:
        """The number of neighbours among the ranks that share out the tokens of every row."""
        return 1 if self.batch is None else self.batch.sequence

    def sums(self, choice: Choice) -> StepSums:
        """Return the partial sums of a step under a choice."""
        on_drives = choice.sums == "nvme"
        return StepSums.of(self.runs, choice.lockstep, self.ranks.size, self.sequence, on_drives=on_drives)

    def sum_room(self, choice: Choice) -> SumRoom:
        """Return the room for partial sums in fp32 that are kept between rounds, beside whole gradients."""
        return self.sums(choice).between(is_wide=self.precision is Precision.BF16)

    def allocate(
        self, layouts: Sequence[BlockLayout], room: SumRoom, on_device: Collection[int] = ()
    ) -> HostState:
        """Allocate the host state, in RAM or also on drives.

        Args:
            layouts: The layouts of all blocks.
            room: The room for partial sums on which a placement on drives counts.
            on_device: The blocks whose state will be on the device and nowhere else.

        Raises:
            MegatrainError: `HostState` refuses.
        """
        return HostState(
            layouts,
            self.precision,
            tiers=self.tiers,
            optimizer=self.optimizer,
            sum_room=room,
            ranks=self.ranks,
            on_device=on_device,
        )

    def as_chosen(self, choice: Choice) -> Job:
        """Return the job with what a choice says of its tiers."""
        return self if self.tiers is None else replace(self, tiers=self.tiers.as_chosen(choice))

    def with_gradients(self, places: GradientPlaces) -> Job:
        """Let a placement count on the gradients that will wait in RAM; the caller may count on none."""
        if self.tiers is None:
            return self
        tiers = replace(self.tiers, sums_on_drives=frozenset(places.sums_on_drives))
        if not tiers.keeps_gradients:  # all of them pass through the buffers
            return replace(self, tiers=replace(tiers, gradients_in_ram=frozenset()))
        staged = frozenset(places.staged)
        tiers = replace(tiers, gradients_in_ram=frozenset(places.on_host), gradients_staged=staged)
        return replace(self, tiers=tiers)
