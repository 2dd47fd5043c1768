"""The output of the command line on standard error: the log, and notes on slow operations."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from megatrain.train.screen.status_line import Doing


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the present standard error, since a progress bar replaces it while it is on the screen."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def log_to_stderr() -> None:
    """Show the library's log on standard error, from information on."""
    logger = logging.getLogger("megatrain")
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())
    logger.setLevel(logging.INFO)
    # One sentence of ours reports a hub that is away; its client's lines for each try say less.
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)


def showing(name: str) -> Doing:
    """Report on standard error what a slow command does; of several ranks the first one reports."""
    from megatrain.train.screen.status_line import Doing

    is_first = os.environ.get("RANK", "0") == "0"
    return Doing(name, lambda line: print(line, file=sys.stderr, flush=True) if is_first else None)
