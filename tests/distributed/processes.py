"""Ranks as real processes on Gloo: forks of one interpreter, which the tests start and compare."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.errors import as_ours
from tests.forks import run_script

if TYPE_CHECKING:
    from megatrain.distributed.ranks import Ranks

_SCRIPT = """
import sys
from tests.distributed.processes import fork_ranks
fork_ranks(*sys.argv[1:])
"""


def run_ranks(
    place: Path,
    size: int,
    task: Callable[..., Any],
    *,
    num_nodes: int = 1,
    timeout_s: float = 120,
    **settings: Any,
) -> list[Any]:
    """Run `task(ranks, **settings)` on every rank, and return what each has returned, which is plain JSON.

    Args:
        place: Directory of this run alone.
        size: Number of ranks; of one, `ranks` is None.
        task: A function of a module.
        num_nodes: On which they believe to be.
        timeout_s: How long one may be silent, or keep others waiting.
        settings: Plain JSON.
    """
    codes = exit_codes(place, size, task, num_nodes=num_nodes, timeout_s=timeout_s, **settings)
    assert not any(codes), (place / "errors").read_text()
    return [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(size)]


def exit_codes(
    place: Path,
    size: int,
    task: Callable[..., Any],
    *,
    num_nodes: int = 1,
    timeout_s: float = 120,
    **settings: Any,
) -> list[int]:
    """Run ranks as `run_ranks`, and return their exit codes; that of one that was killed is negative.

    One that has stopped itself is killed when the others have ended.
    """
    place.mkdir()
    name = f"{task.__module__}:{task.__qualname__}"
    sizes = f"{size}/{num_nodes}/{timeout_s}"
    done = run_script(_SCRIPT, name, sizes, place, json.dumps(settings), after="tests.distributed.runs")
    (place / "errors").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads((place / "codes.json").read_text())


def fork_ranks(name: str, ranks: str, place: str, settings: str) -> None:
    """Fork the ranks, run the task on each, and write down their exit codes."""
    size, num_nodes, timeout_s = map(float, ranks.split("/"))
    sizes = int(size), int(num_nodes), timeout_s
    module, _, function = name.partition(":")
    task = getattr(__import__(module, fromlist=[function]), function)
    children = []
    for rank in range(sizes[0]):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _run(rank, sizes, Path(place), task, json.loads(settings))
                code = 0
            except BaseException as error:  # told as the command line tells it
                ours = as_ours(error)
                code = 1 if ours is None else ours.exit_code
                if ours is None:
                    traceback.print_exc()
                elif not ours.is_told:
                    sys.stdout.write(f"rank {rank}: {ours}\n")  # in one piece, unlike what `print` writes
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    Path(place, "codes.json").write_text(json.dumps(_codes(children)))


def joins_by_itself(task: Callable[..., Any]) -> bool:
    """Whether a task is a user's script: it finds in the environment what torchrun says, and joins others."""
    return bool(getattr(task, "is_script", False))


def _codes(children: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    stopped: set[int] = set()
    while len(codes) < len(children):
        child, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            stopped.add(child)
        else:
            codes[child] = os.waitstatus_to_exitcode(status)
        if len(codes) + len(stopped - set(codes)) == len(children):
            for left in stopped - set(codes):
                os.kill(left, signal.SIGKILL)
    return [codes[child] for child in children]


def _run(
    rank: int,
    sizes: tuple[int, int, float],
    place: Path,
    task: Callable[..., Any],
    settings: dict[str, Any],
) -> None:
    size, num_nodes, timeout_s = sizes
    own: dict[str, Any] = {"num_nodes": num_nodes, "timeout_s": timeout_s, "by_itself": joins_by_itself(task)}
    with joined(rank, size, str(place / "store"), **own) as ranks:
        found = task(ranks, **settings)
        (place / f"rank{rank}.json").write_text(json.dumps(found))


@contextmanager
def joined(
    rank: int, size: int, store: str, *, num_nodes: int = 1, timeout_s: float = 120, by_itself: bool = False
) -> Iterator[Ranks | None]:
    """Make this process one of several ranks, which end together; None: it is alone, or joins `by_itself`."""
    import torch
    import torch.distributed as dist

    from megatrain.distributed.ranks import Ranks

    torch.set_num_threads(1)
    if size == 1:
        yield None
        return
    meeting = dist.FileStore(store, size)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size)
    local_size, ranks = size // num_nodes, None
    if by_itself:
        numbers: dict[str, Any] = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % local_size}
        numbers |= {"LOCAL_WORLD_SIZE": local_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
        os.environ.update({name: str(number) for name, number in numbers.items()})
    else:
        ranks = Ranks(meeting, timeout_s, local_size=local_size)
    with ranks or nullcontext():
        yield ranks
        dist.barrier()
    dist.destroy_process_group()
