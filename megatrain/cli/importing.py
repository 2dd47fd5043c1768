"""Imports of torch and transformers without garbage collection of the objects that they make."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage during the imports inside, and exclude their objects from later collections.

    Modules stay until the process ends, and each collection that passes all of them costs a tenth of a
    second. These were a sixth of the CPU seconds that a run takes to its first step.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
