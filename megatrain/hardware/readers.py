"""The threads that read large files: how many there are, and what they find, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from megatrain.hardware.cores import allowed_cpus

T = TypeVar("T")

_MOST_THREADS = 8
_AHEAD = 4
"""Calls under way or waiting, per thread."""


def num_readers() -> int:
    """Return how many threads read: a core hashes faster than most drives deliver, and some wait for them."""
    return min(_MOST_THREADS, 2 * len(allowed_cpus()))


def in_order(calls: Iterable[Callable[[], T]], threads: int) -> Iterator[T]:
    """Yield the results of calls in their order, while others run on threads.

    What a call raises is raised in its place, after the results of all calls before it. Later calls are
    dropped then, and those that run have ended.

    Args:
        calls: The calls, which are taken when it is their turn.
        threads: The number of threads; 1: the calling thread runs them, one by one.
    """
    if threads == 1:
        yield from (call() for call in calls)
        return
    waiting: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="megatrain-reader")
    remaining = iter(calls)
    try:
        waiting.extend(pool.submit(call) for call in islice(remaining, threads * _AHEAD))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(call) for call in islice(remaining, 1))
    finally:
        pool.shutdown(cancel_futures=True)
