"""The errors about files of state that are not what their commit record says."""

from __future__ import annotations

from pathlib import Path

from megatrain.errors import CheckpointError
from megatrain.store.drives.record import RECORD_NAME

_OTHER_DRIVE = "check this drive, and resume from the newest checkpoint with another one in memory.tiers.nvme"


def other_size(path: Path) -> CheckpointError:
    """Return the error about a file that is longer or shorter than it was."""
    return CheckpointError(f"{path} has not the size with which it was written; {_OTHER_DRIVE}")


def other_file(path: Path, first: Path) -> CheckpointError:
    """Return the error about a file of another name than the record in the first directory has for it."""
    return CheckpointError(
        f"{path} is not the file that {first / RECORD_NAME} names; give the directories of memory.tiers.nvme "
        "in the order in which they were written"
    )


def damaged_chunk(path: Path, number: int, extent: str, offset: int, num_bytes: int) -> CheckpointError:
    """Return the error about a chunk of an extent with another checksum."""
    return CheckpointError(
        f"{path} is damaged: chunk {number} of {extent} (bytes {offset} to {offset + num_bytes}) is not what "
        f"was written there; {_OTHER_DRIVE}"
    )
