"""A random search for runs in which streaming differs from a resident model.

    nice python -m benchmarks.training.random_search --seeds 0:1000 [--jobs N] [--out FILE]
    python -m benchmarks.training.random_search --shrink SEED [--settings FILE]

A seed draws a whole run: a tiny model of one of 80 families, precision, adapters, frozen parts, every field
of a choice, tiers, lanes, runs, chunks of the head, and what happens in it: steps of the engine, of the
caller's own backwards and losses; exceptions in hooks, infinite gradients, other choices, freezing, detaching
and attaching again, generating, evaluating, saving and loading. After each event everything is held against a
resident model in plain PyTorch (`oracle.py`), bit by bit.

Each run is a fork of this process and prints one line:

- `equal`: nothing differs;
- `no model`: transformers or PEFT cannot build or run the model by themselves;
- `refused`: the settings were refused as a whole, in a sentence, before anything was trained;
- `differs`, `refused late`, `failed`, `hung`: a fault, of the engine or of this search.

`--shrink` plays one seed (or the settings of a file), takes away what the fault does not need, and prints the
least settings that still have it. The last line is JSON, with counts; the status is 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import emit, hardware
from benchmarks.training.random_search.forks import Outcome, each_played, played
from benchmarks.training.random_search.settings import draw
from benchmarks.training.random_search.shrink import shrunk

FAULTS = ("differs", "refused late", "failed", "hung")


def main() -> None:
    """Search, or shrink."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--seeds", default="0:100", help="from:to, the latter left out")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a run counts as hung")
    parser.add_argument(
        "--shrink", type=int, metavar="SEED", help="find the least settings that have its fault"
    )
    parser.add_argument("--settings", type=Path, help="play the settings of a JSON file in place of a seed's")
    parser.add_argument("--out", help="file to save the JSON line to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    if arguments.shrink is not None or arguments.settings is not None:
        settings = draw(arguments.shrink or 0)
        if arguments.settings is not None:
            settings = json.loads(arguments.settings.read_text())
        outcome = played(settings, arguments.limit)
        print(line(settings, outcome), flush=True)
        if arguments.shrink is not None and outcome.kind in FAULTS:
            settings, outcome = shrunk(settings, outcome, arguments.limit)
            print(line(settings, outcome))
        print(json.dumps(settings))
        sys.exit(outcome.kind in FAULTS)
    first, _, stop = arguments.seeds.partition(":")
    seeds = range(int(first), int(stop or int(first) + 1))
    began, outcomes = time.perf_counter(), {}
    for seed, outcome in each_played(seeds, arguments.jobs, arguments.limit):
        outcomes[seed] = outcome
        print(line(draw(seed), outcome), flush=True)
    faults = {seed: outcome.what for seed, outcome in outcomes.items() if outcome.kind in FAULTS}
    emit(
        {
            "benchmark": "random_search",
            "seeds": [seeds.start, seeds.stop],
            "runs": Counter(outcome.kind for outcome in outcomes.values()),
            "families": len({draw(seed)["family"] for seed in seeds}),
            "events": sum((Counter(outcome.counts) for outcome in outcomes.values()), Counter()),
            "faults": faults,
            "refusals": Counter(o.what[:80] for o in outcomes.values() if o.kind == "refused").most_common(),
            "cpu_s": round(sum(outcome.cpu_s for outcome in outcomes.values()), 1),
            "wall_s": round(time.perf_counter() - began, 1),
            "hardware": hardware(),
        },
        arguments.out,
    )
    sys.exit(bool(faults))


def line(settings: dict[str, Any], outcome: Outcome) -> str:
    """Return the line of a run."""
    names = " ".join(f"{kind} {number}" for kind, number in sorted(outcome.counts.items()))
    head = f"{settings['seed']:>6} {outcome.kind:<12} {settings['family']:<16} {settings['precision']}"
    return f"{head} {outcome.cpu_s:4.1f} s  {outcome.what or names}"


if __name__ == "__main__":
    main()
