"""A process that trains alone: it has the methods of `Ranks`, so nobody asks whether there are others.

Every exchange returns at once what it is given, and nothing of torch.distributed is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from torch import Tensor


class Unwatched:
    """The `Watch` of a process that nobody waits for."""

    last_words: Callable[[str], object] | None = None
    at_end: Callable[[], str | None] | None = None

    def doing(self, what: str, *, prepares: bool = False) -> None:
        """Tell nobody."""

    def moving(self, what: str) -> AbstractContextManager[None]:
        """Keep nobody waiting."""
        return nullcontext()

    def look(self) -> None:
        """Miss nobody."""

    def finishing(self, progress: Callable[[], object] = lambda: None) -> AbstractContextManager[None]:
        """Miss nobody at the end either."""
        return nullcontext()

    def ends(self, error: Exception) -> None:
        """Tell nobody."""

    def waited_s(self) -> list[float]:
        """Return nothing: this process waits for nobody."""
        return []


class Alone:
    """The only rank of a run; see `Ranks` for what the methods do among several."""

    rank = node = local_rank = 0
    size = num_nodes = local_size = 1
    gathers = have_given_up = False

    def __init__(self) -> None:
        self.watch = Unwatched()

    def __enter__(self) -> Alone:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave nobody."""

    def begin_step(self) -> None:
        """Begin it for nobody else."""

    def end_step(self) -> None:
        """End it for nobody else."""

    def give_up(self) -> None:
        """Let nobody know."""

    def exchange(self, mine: Tensor, counts: Sequence[int], lane: str, parts: Tensor) -> Tensor:
        """Return the tensor as the one part that there is."""
        return mine.view(1, -1)

    def neighbours(self, number: int) -> NoReturn:
        """Refuse: whoever shares out rows has several ranks, which is checked before."""
        raise AssertionError(f"{number} ranks share out rows, but this process is alone")

    def gather(self, mine: Tensor, lane: str = "caller") -> list[Tensor]:
        """Return the one tensor."""
        return [mine]

    def gather_pieces(self, whole: Tensor) -> None:
        """Leave it as it is: whole."""

    def gather_shares(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Leave them as they are."""

    def gather_values(self, mine: Any, lane: str = "caller") -> list[Any]:
        """Return the one value."""
        return [mine]

    def gather_bytes(self, mine: bytes, lane: str = "caller") -> list[bytes]:
        """Return the one value."""
        return [mine]

    def tell(self, value: Any = None) -> Any:
        """Return the value."""
        return value

    def meet(self, lane: str = "caller") -> None:
        """Wait for nobody."""

    def spread(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Leave them as they are: no other node lacks them."""

    def shared_memory(self, nbytes: int) -> None:
        """Return no descriptor: memory of its own is all that this process needs."""


ALONE = Alone()
