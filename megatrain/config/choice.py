"""The choices about the places and the movement of a step's bytes, of which none changes the result.

A field of a `Choice` that is `AUTO` is open, and the planner decides it. An engine runs a resolved choice, in
which nothing is open. This module loads neither pydantic nor torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, TypeVar

from megatrain.config.policies import POLICIES, RECOMPUTE, Policy
from megatrain.config.runs import Runs, StepSums, round_sizes
from megatrain.config.tiles import tile_of
from megatrain.errors import ConfigError, one_of

AUTO: Any = "auto"
"""The value of a field that the planner decides."""

BOUNDARIES = ("device", "host", "nvme")
"""The places where the inputs of recomputed layers can wait for their backward."""

GRADIENTS = ("host", "device", "nvme")
"""The places where the complete gradients of a layer can wait for the norm."""

SUMS = ("device", "host", "nvme")
"""The places where gradients of several rounds can add up, or wait in between."""

_Member = TypeVar("_Member", bound=Enum)


class Updates(str, Enum):
    """The times at which blocks are updated; the numbers are the same."""

    DEFERRED = "deferred"
    IMMEDIATE = "immediate"
    SERIAL = "serial"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One way to run a step, as far as it is decided; the types are those of decided fields."""

    num_slots: int = AUTO
    """The number of device buffers of streamed blocks: 2, or one more than a layer has fragments, overlap
    copies and compute; 1 saves memory."""
    num_gradient_buffers: int = AUTO
    """The number of device buffers in which gradients of streamed blocks add up."""
    activations: tuple[str, ...] = AUTO
    """One name of `POLICIES` per decoder layer; while open also one for all layers, as a plain string."""
    boundaries: str = AUTO
    """The place where inputs of recomputed layers wait. With `nvme`, `offload` saves to drives too."""
    fragments: bool = AUTO
    """Whether each layer streams in parts (attention; mlp or experts), in slots as large as a part."""
    expert_chunks: int = AUTO
    """The number of chunks in which the experts of a layer stream, each through slots of its size, while all
    micro-batches of a round pass it; 1: they are a part of their layer like any other."""
    resident_layers: int = AUTO
    """The number of first layers that stay on the device with all their state, and are updated there."""
    outer_resident: bool = AUTO
    """Whether embedding, head and the like keep their optimizer state on the device too."""
    mirror_resident: bool = AUTO
    """Whether resident blocks have their places in RAM too. Without, their state is on the device alone, and
    a device that is lost costs what is since the last checkpoint."""
    outer_streams: bool = AUTO
    """Whether embedding and head stream through the slots, each fetched for its use. Otherwise their weights
    and the fp32 sums of their gradients stay on the device."""
    lockstep: int = AUTO
    """The number of micro-batches of a round, which pass each layer together; it is fetched twice."""
    updates: str = AUTO
    """The time at which the optimizer runs: a name of `Updates`."""
    gradients: tuple[str, ...] = AUTO
    """The place where the complete gradients of each streamed layer wait for the norm, by decoder layer;
    while open also one place for all layers, as a plain string."""
    sums: str = AUTO
    """The place where gradients of a step of several rounds add up. With `device`, the sum so far is loaded
    there and comes back, in fp32. With `host`, nothing is loaded: after the first round each gradient travels
    by itself, in the working dtype, and the host adds it, in the same order. With `nvme`, sums are added as
    on the device, and wait on drives in between."""
    tiers: frozenset[tuple[str, str]] = AUTO
    """The pairs of a plane and `ram` or `nvme`; a plane that is not named is in RAM."""
    blocks_in_ram: int = AUTO
    """The number of blocks, the largest first, whose state is in RAM although planes are on drives."""
    weights_in_ram: int = AUTO
    """The number of blocks, the largest first, whose weights are in RAM although `working` is on drives."""
    head_chunk_tokens: int | None = AUTO
    """The number of tokens that pass head and loss at a time. None derives it from the size of the vocabulary
    and passes small batches whole, which is bitwise the model's own loss."""

    def tier(self, plane: str) -> str:
        """Return the place of a plane: `ram` or `nvme`."""
        return dict(self.tiers).get(plane, "ram")

    def has_state_on_drives(self, num_blocks: int) -> bool:
        """Return whether the state or the weights of any of so many blocks are on drives."""
        has_state = self.tier("moments") == "nvme" and self.blocks_in_ram < num_blocks
        return has_state or (self.tier("working") == "nvme" and self.weights_in_ram < num_blocks)

    @property
    def has_state_on_device(self) -> bool:
        """Return whether the state of any block is on the device and nowhere else."""
        return not self.mirror_resident and (self.resident_layers > 0 or self.outer_resident)

    @property
    def has_scratch_on_drives(self) -> bool:
        """Return whether saved activations, gradients or their sums wait on drives."""
        return self.boundaries == "nvme" or "nvme" in self.gradients or self.sums == "nvme"

    @property
    def uses_drives(self) -> bool:
        """Return whether anything is on drives: planes, saved activations, gradients or their sums."""
        return bool(self.tiers) or self.has_scratch_on_drives

    def num_rounds(self, num_micro_batches: int) -> int:
        """Return the number of rounds in which the micro-batches of a step pass."""
        return -(-num_micro_batches // self.lockstep)

    def rounds(self, num_micro_batches: int) -> list[int]:
        """Return the number of micro-batches of each round of a step of so many."""
        return round_sizes(num_micro_batches, self.lockstep)

    def uses_gradients_up(self, num_micro_batches: int) -> bool:
        """Return whether each gradient is used by its update as soon as it is complete, and waits nowhere.

        Args:
            num_micro_batches: The number of micro-batches of a step.
        """
        return self.updates == "immediate" and self.num_rounds(num_micro_batches) == 1

    def adds_on_host(self, num_micro_batches: int) -> bool:
        """Return whether the host adds gradients up in a step of so many micro-batches."""
        return self.sums == "host" and self.num_rounds(num_micro_batches) > 1

    def sums_pass_buffers(self, num_micro_batches: int) -> bool:
        """Return whether gradients or their sums pass host buffers on their way to where they add up or wait.

        If complete gradients pass these buffers too, there is room for sums that wait on drives in any case.

        Args:
            num_micro_batches: The number of micro-batches of a step.
        """
        if self.sums == "nvme" and any(place != "host" for place in self.gradients):
            return True
        return self.sums != "device" and self.num_rounds(num_micro_batches) > 1

    @property
    def split(self) -> dict[str, Any]:
        """Return how layers come apart into blocks, as `find_blocks` takes it; what is open: not at all."""
        given = self.given
        return {"fragments": given.get("fragments", False), "expert_chunks": given.get("expert_chunks", 1)}

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Return the policy of each layer."""
        return tuple(POLICIES[name] for name in self.activations)

    @property
    def given(self) -> dict[str, Any]:
        """Return the fields that are decided, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value != AUTO}

    @property
    def is_resolved(self) -> bool:
        """Return whether nothing is open."""
        per_layer = (self.activations, self.gradients)
        return len(self.given) == len(fields(self)) and not any(isinstance(v, str) for v in per_layer)

    def is_compiled(self, setting: str, *, can_compile: bool) -> bool:
        """Return whether layers run compiled.

        Args:
            setting: The setting: `on`, `off`, or `auto`, which compiles where that is possible and allowed.
            can_compile: Whether the machine's device and its software allow it.
        """
        activations = self.given.get("activations", ())
        names = (activations,) if isinstance(activations, str) else activations
        is_refused = any(POLICIES[name].compile_problem for name in names)
        return setting == "on" or (setting == "auto" and can_compile and not is_refused)

    def require_resolved(self, what: str) -> None:
        """Refuse a choice that is not resolved; `what` begins the sentence.

        Raises:
            ConfigError: Some fields are open.
        """
        if not self.is_resolved:
            given = self.given
            names = [field.name for field in fields(self) if field.name not in given]
            names = names or [name for name in _PER_LAYER if isinstance(given[name], str)]
            raise ConfigError(
                f"{what} needs a choice in which nothing is open, but {', '.join(names)} "
                f"{'is' if len(names) == 1 else 'are'} not decided; change one that is, such as engine.choice"
            )

    def describe(self) -> str:
        """Return one line for the log; nothing may be open."""
        outer = " and the outer blocks" if self.outer_resident else ""
        outer += ", on the device alone" * self.has_state_on_device
        outer += "; embedding and head stream" * self.outer_streams
        return (
            f"layers: {len(self.activations)}{self._in_parts} through {self.num_slots} slots; "
            f"resident: {self.resident_layers} layers{outer}; activations: "
            f"{_counted(self.activations)}; boundaries on the {self.boundaries}; micro-batches in lockstep: "
            f"{self.lockstep}; gradients wait on: {_counted(self.gradients)}; sums on the {self.sums}; "
            f"updates: {self.updates}"
        )

    @property
    def _in_parts(self) -> str:
        chunks = f", experts in {self.expert_chunks} chunks," if self.expert_chunks > 1 else ""
        return " in fragments" * self.fragments + chunks

    @property
    def comes_apart(self) -> bool:
        """Return whether layers stream in parts of any kind."""
        return self.fragments or self.expert_chunks > 1

    def for_layers(self, num_layers: int) -> Choice:
        """Return the choice for a model of so many layers: one policy or place for all becomes one per layer.

        Raises:
            ConfigError: A field has not one value per layer, or more layers are resident than exist.
        """
        per_layer: dict[str, Any] = {}
        for name, what in _PER_LAYER.items():
            value = getattr(self, name)
            if isinstance(value, str) and value != AUTO:
                value = (value,) * num_layers
            if value != AUTO and len(value) != num_layers:
                raise ConfigError(
                    f"{name} names {len(value)} {what} for {num_layers} layers; give one, or one per layer"
                )
            per_layer[name] = value
        if self.resident_layers != AUTO and self.resident_layers > num_layers:
            raise ConfigError(
                f"resident_layers (memory.resident_blocks) is {self.resident_layers}, but the model has "
                f"{num_layers} layers; use at most that"
            )
        return replace(self, **per_layer)

    def with_defaults(self, num_layers: int, num_parts: int = 1) -> Choice:
        """Return a resolved choice, in which open fields take the plainest values.

        Two slots, recomputed layers, nothing resident, one micro-batch at a time, and no drives are used.

        Args:
            num_layers: The number of layers of the model.
            num_parts: The largest number of fragments of a layer, if layers are streamed in fragments.
        """
        given = self.for_layers(num_layers).given
        parts = num_parts if given.get("fragments") else 1
        if given.get("expert_chunks", 1) > 1:
            parts = max(parts, 3)  # what is beside the experts, and the two matrices of a chunk
        buffers = parts + 1 if given.get("lockstep", 1) > 1 else 1
        plain: dict[str, Any] = {
            "num_slots": parts + 1,
            "num_gradient_buffers": buffers,
            "activations": (RECOMPUTE.name,) * num_layers,
            "boundaries": "device",
            "fragments": False,
            "expert_chunks": 1,
            "resident_layers": 0,
            "outer_resident": False,
            "mirror_resident": True,
            "outer_streams": False,
            "lockstep": 1,
            "updates": Updates.DEFERRED.value,
            "gradients": ("host",) * num_layers,
            "sums": "device",
            "tiers": frozenset(),
            "blocks_in_ram": 0,
            "weights_in_ram": 0,
            "head_chunk_tokens": None,
        }
        return Choice(**plain | given)


KEYS: Mapping[str, str] = {
    "num_slots": "memory.num_slots",
    "activations": "memory.activations",
    "boundaries": "memory.boundaries",
    "fragments": "memory.fragments",
    "expert_chunks": "memory.expert_chunks",
    "resident_layers": "memory.resident_blocks",
    "mirror_resident": "memory.mirror_resident",
    "lockstep": "memory.lockstep",
    "num_gradient_buffers": "memory.num_gradient_buffers",
    "gradients": "memory.gradients",
    "sums": "memory.sums",
    "updates": "optim.updates",
}
"""The fields of a choice that are settings of a run, by the setting's name."""

WITHOUT_DRIVES: Mapping[str, str] = {"boundaries": "host", "gradients": "host", "sums": "device"}
"""The fields that may be `nvme`, with their values where there are no drives."""

_PER_LAYER = {"activations": "policies", "gradients": "places"}
"""The fields with a value for each decoder layer, and the noun for these values."""


def _counted(values: Sequence[str]) -> str:
    """Name the values of a field that has one per layer, with their numbers where they differ."""
    counts = Counter(values)
    return ", ".join(name if len(counts) == 1 else f"{name} in {number}" for name, number in counts.items())


def read_member(kind: type[_Member], name: str, what: str) -> _Member:
    """Return the member of an enumeration whose value is `name`.

    Args:
        kind: The enumeration.
        name: The name that a user or caller has given.
        what: The setting, at the beginning of the error.

    Raises:
        ConfigError: The enumeration has no such member.
    """
    values = [member.value for member in kind]
    if name not in values:
        raise ConfigError(f"{what} is {name!r}; use {one_of(values)}")
    return kind(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """The batch of a step."""

    micro_batch_size: int
    """The number of rows of a micro-batch."""
    seq_len: int
    num_micro_batches: int
    num_passes_before: int = 0
    """The number of passes without gradients before each micro-batch's loss, such as a reference's."""
    rows_each: int = 1
    """The number of rows that stay together: 2 for a pair or two judged answers; the head runs row by row."""
    num_runs: int = 1
    """The number of runs, in which gradients add up; `parallel.shards`."""
    runs_are_rounds: bool = False
    """Whether a plan decides the number of runs: one per round, where rounds are equal and a power of two."""
    num_ranks: int = 1
    """The number of ranks of which this is one's part of the step; 1 means the whole step."""
    num_nodes: int = 1
    """The number of nodes on which these ranks are, equally many on each."""
    gathers: bool = False
    """Whether ranks of a node each fetch a piece of a block and gather it (`parallel.gather`)."""
    sequence: int = 1
    """The number of ranks that share each row's tokens (`parallel.sequence`); `seq_len` is of whole rows."""
    tile_tokens: int | None = None
    """The tokens of a tile of a row (`train.tile_tokens`); None: they follow from the length of rows."""

    @property
    def tile(self) -> int:
        """Return the tokens of a tile in which position-wise modules pass rows; 0: rows pass whole."""
        return tile_of(self.seq_len, self.tile_tokens)

    @property
    def ranks_of_node(self) -> int:
        """Return the number of ranks that share the memory of a node."""
        return self.num_ranks // self.num_nodes

    @property
    def gathers_among(self) -> int:
        """Return the number of ranks that fetch a piece of each block, and gather it; 1 if none does."""
        return self.ranks_of_node if self.gathers else 1

    @property
    def adds_up(self) -> bool:
        """Return whether the gradients of several micro-batches add up, on this rank or among ranks."""
        return self.num_micro_batches > 1 or self.num_ranks > 1

    @property
    def runs(self) -> Runs:
        """Return the runs in which gradients add up.

        Raises:
            ConfigError: The micro-batches cannot be cut into so many runs.
        """
        return Runs.of(self.num_runs, self.num_micro_batches)

    def sums(self, choice: Choice) -> StepSums:
        """Return the partial sums of a step under a resolved choice.

        Raises:
            ConfigError: `runs` raises it.
        """
        runs = self.runs
        if self.runs_are_rounds:
            rounds = round_sizes(self.num_micro_batches, choice.lockstep)
            is_even = len({*rounds}) == 1 and len(rounds).bit_count() == 1
            runs = Runs.of(len(rounds) if is_even else 1, self.num_micro_batches)
        on_drives = choice.sums == "nvme"
        return StepSums.of(runs, choice.lockstep, self.num_ranks, self.sequence, on_drives=on_drives)

    @property
    def tokens(self) -> int:
        """Return the tokens of a step; for a rank's part of one, those that it has of each row."""
        own_len = self.seq_len if self.num_ranks == 1 else -(-self.seq_len // self.sequence)
        return self.micro_batch_size * own_len * self.num_micro_batches

    @property
    def step_tokens(self) -> int:
        """Return the tokens of all ranks' step."""
        return self.tokens * self.num_ranks


def part_of(
    num_ranks: int,
    choice: Choice,
    batch: StepBatch | None,
    *,
    num_nodes: int = 1,
    gathers: bool = False,
) -> tuple[Choice, StepBatch | None]:
    """Return the choice and the batch of one rank; one that trains alone keeps both as they are.

    Args:
        num_ranks: The number of ranks that train together.
        choice: The choice so far.
        batch: The batch of all ranks' step; None: it is not known.
        num_nodes: The number of nodes on which they are.
        gathers: Whether the ranks of a node gather weights, of which each fetches a piece.

    Raises:
        ConfigError: Ranks cannot do what is decided, or the batch cannot be shared out.
    """
    if num_ranks > 1:
        sums = choice.given.get("sums", "device")
        if sums != "device":
            raise ConfigError(
                f"sums ({KEYS['sums']}) is {sums}, but {num_ranks} ranks train together; use device, or one "
                "rank"
            )
        choice = replace(choice, sums="device")
    if batch is None:
        return choice, None
    part = batch.runs.shared_out(num_ranks, batch.sequence)
    if num_ranks == 1:
        return choice, batch
    number = part * batch.runs.length
    if choice.given.get("lockstep", 1) > number:
        choice = replace(choice, lockstep=number)
    among: dict[str, Any] = {"num_ranks": num_ranks, "num_nodes": num_nodes, "gathers": gathers}
    return choice, replace(batch, num_micro_batches=number, num_runs=part, **among)
