"""The generator of `docs/models.md` from what was found of each family."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.models.check import CHECKS, STEPS, Verdict

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/models.json"
PAGE = ROOT / "docs/models.md"

_INTRODUCTION = f"""\
# Models

This table says which families train, held against the resident model from file to file. Each row is a tiny
model of the real class of transformers, with the keys that its config.json has, in fp32 on the CPU.
`make models` checks every row and writes this page; `make parity` checks them too, and `make test` some.

- **load**: `megatrain inspect` and `load` read the directory, and keep tensors without a place in it.
- **plan**: a run of it is counted and planned.
- **fp8**: projections that the files have as codes of 8 bits with scales of blocks are read as the values
  that they mean. Every format is read tensor by tensor, so the others (MXFP4, compressed-tensors, ModelOpt,
  bitsandbytes, GPTQ, AWQ) are read of these families in the same way; [training](training.md) has them.
- **{STEPS} steps**: every loss, gradient and weight has the resident model's bits.
- **export**: the files have every tensor of the source, and the class that opens them has every weight.

All of a model is trained but what is named as frozen: a tower, which rows of text do not pass, or a bias that
a router corrects by itself. That is exported as it was. A family that is not in the table may train all the
same: `make parity` holds every class that transformers has for causal language models, or for images and
text, to the same bits, or to the sentence with which it is refused (`tests/stream/test_every_class.py`).
"""


def models_page(verdicts: Sequence[Mapping[str, Any]], version: str) -> str:
    """Return the table as Markdown: `docs/models.md`."""
    names = [f"{STEPS} steps" if check == "steps" else check for check in CHECKS]
    lines = [
        _INTRODUCTION,
        f"Found with transformers {version}.",
        "",
        f"| family | class | kind | frozen | {' | '.join(names)} |",
        f"|---|---|---|---|{'---|' * len(names)}",
    ]
    lines += [_row(verdict) for verdict in verdicts]
    return "\n".join([*lines, ""])


def _row(verdict: Mapping[str, Any]) -> str:
    frozen = ", ".join(f"`{name}`" for name in verdict["frozen"]) or "nothing"
    frozen = "biases of its routers" if verdict["fixed"] else frozen
    cells = [verdict["name"], f"`{verdict['model_class']}`", verdict["kind"], frozen]
    failed: Mapping[str, str] = verdict["failed"]
    has_ended = False
    for check in CHECKS:
        cells.append(f"no: {failed[check]}" if check in failed else "not tried" if has_ended else "yes")
        has_ended = has_ended or check in failed
    return f"| {' | '.join(cells)} |"


def write_results(verdicts: Sequence[Verdict], version: str) -> None:
    """Write what was found, and the page of it."""
    found = {"transformers": version, "families": [verdict.json() for verdict in verdicts]}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(saved_page(), encoding="utf-8")


def saved_page() -> str:
    """Return the page of what was found last."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    return models_page(found["families"], found["transformers"])
