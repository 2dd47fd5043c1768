"""What the command line writes to standard error: the log, and what takes a while."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from megatrain.train.screen.doing import Doing


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever standard error is now: a progress bar replaces it while it is on the screen."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def log_to_stderr() -> None:
    """Show what the library logs on standard error, from information on."""
    logger = logging.getLogger("megatrain")
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())
    logger.setLevel(logging.INFO)
    # A hub that is away is said in our sentence: its client's lines for each try say less.
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)


def showing(name: str) -> Doing:
    """Say on standard error what a command does, if it takes a while; of several ranks the first one does."""
    from megatrain.train.screen.doing import Doing

    is_first = os.environ.get("RANK", "0") == "0"
    return Doing(name, lambda line: print(line, file=sys.stderr, flush=True) if is_first else None)
