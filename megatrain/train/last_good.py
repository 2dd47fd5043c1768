"""The choice of checkpoints that a run keeps because steps were skipped: the newest that are surely sound.

A step is skipped when its gradient is not finite. A wrong weight causes this in every later step, and
checkpoints saved meanwhile hold that weight. So the newest checkpoint before the first such step is kept,
however old. If no step has passed since it was saved, nothing proves yet that it is sound, and the one before
it is kept too. Both stay until the run is healthy: until the newest `checkpoint.keep_last` checkpoints, which
are all that would be left, each were saved without a skipped step since the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatrain.checkpoint.load import find_step
from megatrain.model.weights.reading import NonFiniteError


@dataclass(slots=True)
class LastGood:
    """Counts steps between checkpoints; it is in every checkpoint, so that a resumed run knows."""

    saved: list[int] = field(default_factory=list)
    """The steps of the newest checkpoints, two at most."""
    kept: list[int] = field(default_factory=list)
    """The steps of the checkpoints that are kept, in order; empty if no step was skipped of late."""
    num_sound_steps: int = 0
    """The number of steps since the newest checkpoint, up to the first that was skipped."""
    has_skipped: bool = False
    """Whether a step was skipped since the newest checkpoint."""
    num_healthy: int = 0
    """The number of newest checkpoints that were each saved without a skipped step since the one before."""
    before: tuple[int, dict[str, Any]] | None = field(default=None, repr=False, compare=False)
    """The step saved last, and the counts before that; it is in no checkpoint, since one there is whole."""

    def take(self, *, is_skipped: bool) -> None:
        """Record a step that was skipped, or whose loss was not finite, or that was sound."""
        if is_skipped and not self.kept:
            self.kept = self.saved[-1 if self.num_sound_steps else -2 :]
        self.has_skipped |= is_skipped
        self.num_sound_steps += not self.has_skipped

    def save(self, step: int, keep_last: int) -> None:
        """Record that a checkpoint is about to be saved, of which the newest `keep_last` are kept."""
        if step in self.saved:
            return
        self.before = step, self.state()
        self.num_healthy = 0 if self.has_skipped else self.num_healthy + 1
        if self.num_healthy >= keep_last:
            self.kept = []
        self.saved = [*self.saved[-1:], step]
        self.num_sound_steps, self.has_skipped = 0, False

    def lose(self, step: int) -> None:
        """Record that the checkpoint of a step could not be saved: the counts are as if none had begun.

        Steps may have been taken since. Their first ones were sound, up to one that was skipped.
        """
        if self.before is None or self.before[0] != step:
            return
        num_sound_since, has_skipped_since = self.num_sound_steps, self.has_skipped
        self.restore(self.before[1])
        for _ in range(num_sound_since):
            self.take(is_skipped=False)
        if has_skipped_since:
            self.take(is_skipped=True)

    @property
    def sound(self) -> int | None:
        """Return the step of the newest surely sound checkpoint, while there are doubts about later ones."""
        return self.kept[0] if self.kept else None

    def state(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        counts = asdict(self)
        del counts["before"]
        return counts

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; a run of an older version begins to count."""
        self.before = None
        for name in self.state():
            if name in state:
                setattr(self, name, state[name])


@contextmanager
def sound_checkpoint_named(checkpoint: Path | None, meta: Mapping[str, Any] | None) -> Iterator[None]:
    """Name the newest surely sound checkpoint in the error about weights that are not finite.

    Args:
        checkpoint: The checkpoint that is loaded; None if another model is.
        meta: The manifest's record of the run.

    Raises:
        NonFiniteError: The checkpoint has such weights.
    """
    try:
        yield
    except NonFiniteError as error:
        known = LastGood()
        known.restore((meta or {}).get("last_good", {}))
        sound = None
        if checkpoint is not None and known.sound is not None:
            sound = find_step(checkpoint.parent, known.sound)
        if sound is None:
            raise
        raise NonFiniteError(
            f"{error}: the newest that is surely sound is {sound}; go on from it with --resume {sound} and "
            "another --out"
        ) from error
