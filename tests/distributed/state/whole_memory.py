"""Memory of whole processes that train together, as the kernel counts it, beside what their plan lists."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatrain.hardware.memory import give_back_freed
from megatrain.stream.ranks import shared_gradients
from megatrain.train import loop
from megatrain.train.caller import Caller
from megatrain.train.records.metrics import StepMetrics
from megatrain.train.run import Run
from tests.train.project import make_config, write_corpus, write_model_config

_train_step = loop.train_step


def measure_run(ranks: Any, *, root: str, updates: str, hidden: int, num_layers: int) -> dict[str, Any]:
    """Train a tiny model, and then a larger one of as many layers.

    The tiny one loads and compiles all code, and has as many objects: what it takes is the program's. Both
    run as on a machine whose memory is short, where what was freed is given back.

    Returns:
        `grown`: bytes of this process's own memory after the second step of the larger model, beyond those
        of the tiny one then; `peak`: the same in that step, at most; `shared`: its part of the pages that all
        ranks map; `pools`: those of the plan, of the first rank; `host`: planes; `num_params`.
    """
    place = Path(root)
    size = 1 if ranks is None else ranks.size
    found: dict[str, Any] = {}
    of_program = 0
    for name, sizes in (("tiny", {"hidden_size": 32}), ("large", {"hidden_size": hidden})):
        if ranks is None or ranks.rank == 0:
            (place / name / "model").mkdir(parents=True)
            write_corpus(place / name / "corpus.txt")
            sizes |= {"num_hidden_layers": num_layers, "num_attention_heads": 2, "vocab_size": 1024}
            sizes["intermediate_size"] = 3 * sizes["hidden_size"]
            write_model_config(place / name / "model", **sizes)
        if ranks is not None:
            ranks.meet("orders")
        config = make_config(
            place / name,
            train={"steps": 2, "grad_accumulation": size, "precision": "bf16", "micro_batch_size": 1},
            data={"seq_len": 16},
            optim={
                "warmup_steps": 0,
                "updates": updates,
                "max_grad_norm": 1.0 if updates == "deferred" else None,
            },
            memory={"activations": "recompute", "lockstep": 1, "host_limit": "8GiB"},
            parallel={"shards": size},
            log={"report": False},
        )

        def noted(run: Run) -> StepMetrics:
            with _peak() as peaks:
                row = _train_step(run)
            if run.step == 2:
                run.engine.settle()
                if run.ranks is not None:
                    run.ranks.meet()
                found.update(own=own_bytes(), shared=shared_bytes(), peak=max(peaks))
                found["num_params"] = sum(each.numel() for each in run.engine.model.parameters())
                found["host"] = dict(run.engine.host.plane_bytes)
                if run.planned is not None:
                    found["pools"] = {p.name: p.nbytes for p in run.planned.plan.pools if p.nbytes}
                if run.ranks is not None:
                    run.ranks.meet()
            return row

        short = patch.object(shared_gradients, "give_back_where_short", lambda room: give_back_freed())
        with short, patch.object(loop, "train_step", noted):
            loop.train(config, ranks=ranks, caller=Caller(counts=place))
        if name == "tiny":
            of_program = found["own"]
    return found | {"grown": found["own"] - of_program, "peak": found["peak"] - of_program}


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Look at this process's own memory again and again, from another thread."""
    found, ends = [_anonymous_bytes()], threading.Event()

    def look() -> None:
        while not ends.wait(0.001):
            found.append(_anonymous_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ends.set()
        thread.join()


def own_bytes() -> int:
    """Return the anonymous pages of this process that are in memory; what was freed is given back first."""
    gc.collect()
    give_back_freed()
    return _anonymous_bytes()


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon:")))


def shared_bytes() -> int:
    """Return this process's part of the pages of mappings that ranks have together."""
    total, is_shared = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            is_shared = "memfd:megatrain" in line
        elif first == "Pss:" and is_shared:
            total += 1024 * int(rest[0])
    return total
