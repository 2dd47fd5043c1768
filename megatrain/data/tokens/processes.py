"""Encoding of examples by this process or by several, in the data's order."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import ModuleType

from megatrain.data.example import Example, TokensExample, texts_of
from megatrain.data.flagged_tokens import Words
from megatrain.data.pairs import Judged
from megatrain.data.tokens.encode import Encoder, EncoderRecipe, Refused
from megatrain.errors import ConfigError

_EXAMPLES_AT_ONCE, _CHARACTERS_AT_ONCE = 256, 1 << 20
_CHARACTERS_OF_TOKEN = 4


def encode_all(
    examples: Iterable[Example], recipe: EncoderRecipe, workers: int
) -> Iterator[tuple[Example, Words | Judged | Refused]]:
    """Yield each example with its words or its judged answers, in order.

    Args:
        examples: The examples, of one kind that the recipe's objective accepts.
        recipe: The recipe of the encoder.
        workers: The number of processes that encode; with 1, this process does.

    Raises:
        ConfigError: `Encoder.encode` raises it, or a process has ended early.
        DataError: `Encoder.encode` raises it.
    """
    chunks = _chunks(examples)
    if workers == 1:
        encoder = recipe.make()
        for chunk in chunks:
            yield from zip(chunk, _encode_with(encoder, chunk), strict=True)
        return
    # spawn, since torch's threads do not survive a fork
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(workers, context, _begin_worker, (recipe,)) as pool:
            waiting: deque[tuple[Sequence[Example], Future[list[Words | Judged | Refused]]]] = deque()
            for chunk in chunks:
                with _no_script():
                    waiting.append((chunk, pool.submit(_encode, chunk)))
                if len(waiting) > 2 * workers:  # a bound, since otherwise all data would wait in memory
                    done, result = waiting.popleft()
                    yield from zip(done, result.result(), strict=True)
            for done, result in waiting:
                yield from zip(done, result.result(), strict=True)
    except BrokenProcessPool as error:
        raise ConfigError(
            "a process that tokenises has ended before its time, as one that is killed for want of memory; "
            "use fewer data.workers"
        ) from error


@contextmanager
def _no_script() -> Iterator[None]:
    """Start processes without this process's script, since an unguarded script would run in each."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _chunks(examples: Iterable[Example]) -> Iterator[list[Example]]:
    chunk: list[Example] = []
    characters = 0
    for example in examples:
        chunk.append(example)
        characters += _size(example)
        if len(chunk) >= _EXAMPLES_AT_ONCE or characters >= _CHARACTERS_AT_ONCE:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _size(example: Example) -> int:
    """Return the characters of an example, or about as many as its tokens stand for."""
    if isinstance(example, TokensExample):
        return _CHARACTERS_OF_TOKEN * len(example.input_ids)
    return sum(map(len, texts_of(example)))


_encoder: Encoder | None = None
"""The encoder of a worker process."""


def _begin_worker(recipe: EncoderRecipe) -> None:
    global _encoder
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core for each process
    _encoder = recipe.make()


def _end_with_parent() -> None:
    """Wait until the parent process is gone, however it ended, and exit too."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(examples: Sequence[Example]) -> list[Words | Judged | Refused]:
    assert _encoder is not None
    return _encode_with(_encoder, examples)


def _encode_with(encoder: Encoder, examples: Sequence[Example]) -> list[Words | Judged | Refused]:
    return [*(encoder.encode_judged if encoder.takes_judged else encoder.encode)(examples)]
