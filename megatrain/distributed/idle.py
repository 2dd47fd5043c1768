"""A process that does not train, and stays until those that do have ended: its node can take part later."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from megatrain.distributed.beats import AGAIN, DONE, LOST, beat_of
from megatrain.distributed.guard import Guard
from megatrain.distributed.processes import tell_launcher
from megatrain.errors import RankError

if TYPE_CHECKING:
    from torch.distributed import Store

_IS_LOST = f"a rank of those that train is lost. {AGAIN}"


def watch_idly(store: Store, timeout_s: float) -> None:
    """Return when the ranks that train have ended; the store may end with the first of them.

    Args:
        store: The store where the ranks meet.
        timeout_s: The time for which the store may be silent; the first of them twice as long.

    Raises:
        RankError: They were lost.
    """
    guard = Guard(timeout_s, lambda silent_s: _see(silent_s, timeout_s))
    seen, since_s = b"", guard.clock.now()
    guard.start()
    try:
        while not store.check([DONE]):
            beat = store.get(beat_of(0)) if store.check([beat_of(0)]) else b""
            guard.come_round()
            if beat != seen:
                seen, since_s = beat, guard.clock.now()
            if store.check([LOST]) or guard.clock.now() - since_s > 2 * timeout_s:
                error = RankError(_IS_LOST)
                error.is_told = True
                raise error
            time.sleep(min(timeout_s / 10, 1.0))
    except RuntimeError:  # the store has ended
        pass
    finally:
        guard.close()


def _see(silent_s: float, timeout_s: float) -> None:
    """End this process, which waits for the store's answer; those that train say why."""
    if silent_s > timeout_s:
        tell_launcher(_IS_LOST)
        os._exit(RankError.exit_code)
