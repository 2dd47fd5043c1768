"""Ranks that long products share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.crew import Crew


@pytest.fixture(scope="session")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Crew]]:
    """Return a crew of so many ranks, the same one until it fails."""
    crews: dict[int, Crew] = {}

    def find(size: int) -> Crew:
        if size in crews and not crews[size].is_ready:
            crews.pop(size).close()
        if size not in crews:
            crews[size] = Crew(tmp_path_factory.mktemp("crew") / "ranks", size)
        return crews[size]

    yield find
    for crew in crews.values():
        crew.close()
