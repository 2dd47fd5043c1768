"""The kinds of file systems, by the names that the system has for them."""

from __future__ import annotations

import os
from pathlib import Path

NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "fuse.ceph", "lustre", "gpfs", "beegfs"),
    *("glusterfs", "fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone"),
}
"""The file systems that several machines share, among which a lock may hold on one machine alone."""

UNKNOWN = "unknown"
_MOUNTS = "proc/self/mountinfo"


def filesystem_of(path: str | os.PathLike[str], root: Path = Path("/")) -> str:
    """Return the kind of the file system of a path, such as `ext4`; `unknown` if that cannot be told."""
    return _mount_of(path, root)[0]


def named_filesystem(path: str | os.PathLike[str], root: Path = Path("/")) -> str:
    """Return the kind and the mount point of the file system of a path, such as `nfs4 at /home`."""
    kind, place = _mount_of(path, root)
    return f"{kind} at {place or path}"


def filesystem_of_device(number: tuple[int, int], root: Path = Path("/")) -> str:
    """Return the kind of the file system that is mounted from a device; `unknown` if none is.

    Args:
        number: The major and minor numbers of the device.
        root: The directory in which `proc` is.
    """
    return _mount(number, root)[0]


def _mount_of(path: str | os.PathLike[str], root: Path) -> tuple[str, str]:
    try:
        number = os.stat(path).st_dev
    except OSError:
        return UNKNOWN, ""
    return _mount((os.major(number), os.minor(number)), root)


def _mount(number: tuple[int, int], root: Path) -> tuple[str, str]:
    """Return the kind and the place of the first mount of a device."""
    try:
        lines = (root / _MOUNTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return UNKNOWN, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if fields[2:3] == [f"{number[0]}:{number[1]}"] and len(fields) > 4 and after:
            return after.split()[0], fields[4]
    return UNKNOWN, ""
