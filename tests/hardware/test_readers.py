from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from megatrain.hardware.readers import in_order


def test_results_come_in_order_however_long_each_takes() -> None:
    def slow(number: int) -> int:
        time.sleep(0.002 * (number % 5))
        return number

    for threads in (1, 2, 5):
        assert list(in_order((partial(slow, number) for number in range(40)), threads)) == list(range(40))


def test_the_first_error_in_order_is_raised_after_the_results_before_it() -> None:
    """The call that fails first in time is a later one."""
    third_may_fail = threading.Event()

    def call(number: int) -> int:
        if number == 3:
            assert third_may_fail.wait(10)
            raise ValueError("third")
        if number == 5:
            third_may_fail.set()
            raise ValueError("fifth")
        return number

    found: list[int] = []
    with pytest.raises(ValueError, match="third"):
        found.extend(in_order((partial(call, number) for number in range(1000)), 4))
    assert found == [0, 1, 2]
    running = [each.name for each in threading.enumerate() if "reader" in each.name]
    assert running == []


def test_calls_are_taken_as_they_are_needed_and_so_many_run_at_once() -> None:
    lock, now, most, taken = threading.Lock(), 0, 0, 0

    def call() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.001)
        with lock:
            now -= 1

    def calls():  # type: ignore[no-untyped-def]
        nonlocal taken
        for _ in range(200):
            taken += 1
            yield call

    results = in_order(calls(), 3)
    next(results)
    assert taken <= 3 * 4 + 1
    assert len(list(results)) == 199
    assert most == 3
