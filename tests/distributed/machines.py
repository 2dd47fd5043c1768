"""Two machines on one link, made of namespaces of this one: a link that is cut leaves both ends in silence.

Each has a network, a boot id, a host name and an `/etc/hosts` of its own, in which that name stands for the
machine itself (127.0.1.1), as Debian and Ubuntu write it. It knows the other one by its name. It takes root.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from uuid import uuid4

ADDRESSES = ("10.9.0.1", "10.9.0.2")
WIDER_ADDRESSES = ("fd09::1", "fd09::2")
"""The same places in IPv6."""

_LINKS = ("to-node1", "to-node0")
_BOOT = "/proc/sys/kernel/random/boot_id"
_KINDS = ("net", "mnt", "uts")
"""Namespaces of a machine, in the order in which a process enters them."""


class RefusedError(Exception):
    """This system makes no namespaces for us; says why."""


class Machines:
    """Two of them, until `close`."""

    def __init__(self, place: Path, *, wider: bool = False) -> None:
        """Make them, and their link.

        Args:
            place: Directory for their files.
            wider: They speak IPv6 alone.

        Raises:
            RefusedError: They cannot be made here.
        """
        self.addresses = WIDER_ADDRESSES if wider else ADDRESSES
        self._keepers: list[subprocess.Popen[bytes]] = []
        try:
            for node in range(2):
                self._keepers.append(_keep(self._keepers))
                self.run(node, "ip", "link", "set", "lo", "up")
                other = 1 - node
                own = f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 node{node}\n"
                (place / f"hosts{node}").write_text(f"{own}{self.addresses[other]} node{other}\n")
                self.run(node, "mount", "--bind", str(place / f"hosts{node}"), "/etc/hosts")
                (place / f"boot{node}").write_text(f"{uuid4()}\n")
                self.run(node, "mount", "--bind", str(place / f"boot{node}"), _BOOT)
                self.run(node, "hostname", f"node{node}")
            first, second = _LINKS
            behind = ["peer", "name", second, "netns", str(self._keepers[1].pid)]
            self.run(0, "ip", "link", "add", first, "type", "veth", *behind)
            length = 64 if wider else 24
            for node, link in enumerate(_LINKS):
                more = ["nodad"] if wider else []
                self.run(node, "ip", "address", "add", f"{self.addresses[node]}/{length}", "dev", link, *more)
                self.run(node, "ip", "link", "set", link, "up")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Machines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, node: int, *command: str) -> str:
        """Run a command on a machine, and return what it says.

        Raises:
            RefusedError: It fails.
        """
        done = subprocess.run(
            command,
            preexec_fn=lambda: self.enter(node),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RefusedError(f"{' '.join(command)}: {done.stdout.strip()}")
        return done.stdout

    def enter(self, node: int) -> None:
        """Go on with this process, which has no other threads, on a machine."""
        libc = ctypes.CDLL(None, use_errno=True)
        for kind in _KINDS:
            place = f"/proc/{self._keepers[node].pid}/ns/{kind}"
            if os.readlink(place) != os.readlink(f"/proc/self/ns/{kind}"):
                file = os.open(place, os.O_RDONLY)
                if libc.setns(file, 0):
                    raise OSError(ctypes.get_errno(), f"cannot enter {place}")
                os.close(file)

    def cut(self, node: int) -> None:
        """Cut the link at this end, as when a cable is drawn or a power supply fails."""
        self.run(node, "ip", "link", "set", _LINKS[node], "down")

    def close(self) -> None:
        """End them; what still runs there goes on without a network."""
        for keeper in self._keepers:
            keeper.kill()
            keeper.communicate()


def _keep(others: Sequence[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Start a process that keeps the namespaces of a machine.

    Raises:
        RefusedError: They are refused.
    """
    command = ["unshare", "--net", "--mount", "--uts", "--propagation", "private", "sleep", "infinity"]
    try:
        keeper = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise RefusedError(f"unshare: {error}") from error
    own = os.readlink("/proc/self/ns/uts")
    while keeper.poll() is None:
        if os.readlink(f"/proc/{keeper.pid}/ns/uts") != own:
            return keeper
        time.sleep(0.01)
    assert keeper.stderr is not None
    raise RefusedError(keeper.stderr.read().decode().strip())
