"""Check every family, and write `docs/models.md`: `python -m benchmarks.models`, five minutes on one core."""

from __future__ import annotations

import argparse
import json
import logging
import warnings

import torch
import transformers

from benchmarks.models.check import check
from benchmarks.models.families import FAMILIES
from benchmarks.models.page import write_results


def main() -> None:
    """Check all families, or print what is found of those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*", help="types to check, without writing anything; none: all")
    asked = parser.parse_args().model_types
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    verdicts = []
    for family in FAMILIES:
        if not asked or family.model_type in asked:
            verdicts.append(check(family))
            print(f"{family.model_type}: {verdicts[-1].failed or 'holds'}", flush=True)
    if not asked:
        write_results(verdicts, transformers.__version__)
    print(json.dumps({"families": len(verdicts), "failed": [each.name for each in verdicts if each.failed]}))


if __name__ == "__main__":
    main()
