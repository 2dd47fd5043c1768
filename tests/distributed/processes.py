"""Ranks as real processes on Gloo: forks of one interpreter, which the tests start and compare."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatrain.errors import MegatrainError
from tests.forks import run_script

_SCRIPT = """
import sys
from tests.distributed.processes import fork_ranks
fork_ranks(*sys.argv[1:])
"""


def run_ranks(
    place: Path, size: int, task: Callable[..., Any], *, num_nodes: int = 1, **settings: Any
) -> list[Any]:
    """Run `task(ranks, **settings)` on every rank, and return what each has returned, which is plain JSON.

    Args:
        place: Directory of this run alone.
        size: Number of ranks; of one, `ranks` is None.
        task: A function of a module.
        num_nodes: On which they believe to be.
        settings: Plain JSON.
    """
    codes = exit_codes(place, size, task, num_nodes=num_nodes, **settings)
    assert not any(codes), (place / "errors").read_text()
    return [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(size)]


def exit_codes(
    place: Path, size: int, task: Callable[..., Any], *, num_nodes: int = 1, **settings: Any
) -> list[int]:
    """Run ranks as `run_ranks`, and return their exit codes; that of one that was killed is negative."""
    place.mkdir()
    name = f"{task.__module__}:{task.__qualname__}"
    done = run_script(_SCRIPT, name, f"{size}/{num_nodes}", place, json.dumps(settings))
    (place / "errors").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads((place / "codes.json").read_text())


def fork_ranks(name: str, ranks: str, place: str, settings: str) -> None:
    """Fork the ranks, run the task on each, and write down their exit codes."""
    size, num_nodes = map(int, ranks.split("/"))
    module, _, function = name.partition(":")
    task = getattr(__import__(module, fromlist=[function]), function)
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _run(rank, (size, num_nodes), Path(place), task, json.loads(settings))
                code = 0
            except MegatrainError as error:
                code = error.exit_code
                print(f"rank {rank}: {error}")
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    Path(place, "codes.json").write_text(json.dumps(codes))


def _run(
    rank: int, sizes: tuple[int, int], place: Path, task: Callable[..., Any], settings: dict[str, Any]
) -> None:
    import torch
    import torch.distributed as dist

    from megatrain.distributed.ranks import Ranks

    torch.set_num_threads(1)
    ranks, (size, num_nodes) = None, sizes
    if size > 1:
        store = dist.FileStore(str(place / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        ranks = Ranks(local_size=size // num_nodes)
    found = task(ranks, **settings)
    (place / f"rank{rank}.json").write_text(json.dumps(found))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
