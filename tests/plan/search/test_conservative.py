"""Without a model's cost, the plainest choice; where blocks are large, one that takes less of the device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.config.choice import Choice
from megatrain.plan.search.conservative import conservative


def tried(choice: Choice, num_parts: int = 3) -> list[Choice]:
    """Return what is tried, in order: nothing fits."""
    seen: list[Choice] = []

    def fits(found: Choice) -> bool:
        seen.append(found)
        return False

    assert conservative(choice, 4, num_parts, fits) == seen[-1]
    return seen


def test_where_all_fits_it_is_the_plainest() -> None:
    assert conservative(Choice(), 4, 3, lambda _: True) == Choice().with_defaults(4)


def test_less_and_less_of_the_device_is_taken() -> None:
    plain = Choice().with_defaults(4)
    in_parts = Choice(fragments=True).with_defaults(4, 3)
    expected = [plain, replace(plain, num_slots=1), in_parts, replace(in_parts, num_slots=3)]
    assert tried(Choice()) == expected
    assert in_parts.num_slots == 4
    for number, choice in enumerate(expected):
        assert conservative(Choice(), 4, 3, expected[number:].__contains__) == choice


def test_layers_that_do_not_come_apart_stay_whole() -> None:
    assert [choice.num_slots for choice in tried(Choice(), num_parts=1)] == [2, 1]
    assert not any(choice.fragments for choice in tried(Choice(), num_parts=1))


@pytest.mark.parametrize(
    "choice", [Choice(num_slots=3), Choice(fragments=False), Choice(fragments=True), Choice(lockstep=2)]
)
def test_what_is_given_is_kept(choice: Choice) -> None:
    for found in tried(choice):
        assert found.is_resolved
        assert found.given.items() >= choice.given.items()
