"""The network interface by which a machine reaches the others, of which Gloo and NCCL are told.

Left alone, Gloo takes the address that the host's name stands for. On many systems that is one at which only
the machine itself is reached: 127.0.1.1 in the `/etc/hosts` of Debian and Ubuntu.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from collections.abc import Iterator, MutableMapping

VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""What Gloo, TensorPipe and NCCL read in the environment; what the user has set there stays."""

_ELSEWHERE = "192.0.2.1"
"""An address of no machine (RFC 5737), to ask for the way to all that are not near."""


def own_address(host: str, port: int) -> str | None:
    """Return this machine's address on its way to a host; None: there is none.

    A connected datagram socket knows the way, and nothing is sent.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as way:
                way.connect(place)
                return str(way.getsockname()[0]).partition("%")[0]
        except OSError:  # no way there in this family
            continue
    return None


def is_own(address: str) -> bool:
    """Whether an address means the machine itself, to whichever asks."""
    return ipaddress.ip_address(address).is_loopback


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address of this machine; None: none has it."""
    return next((name for name, own in _interfaces() if own == ipaddress.ip_address(address)), None)


def name_interface(environment: MutableMapping[str, str], address: str) -> str | None:
    """Let libraries use the interface that has an address; return its name, or None where none has it.

    Args:
        environment: The environment of this process, before any library reads it.
        address: The address of this machine.
    """
    name = interface_of(address)
    if name is not None:
        for variable in VARIABLES:
            exactly = "=" if variable.startswith("NCCL") else ""  # it would take any that begins so
            environment.setdefault(variable, exactly + name)
    return name


def name_interface_alone(environment: MutableMapping[str, str]) -> None:
    """Name the interface before anybody can be asked, from what a launcher has said in the environment.

    Where the first host's name stands for this machine alone, and others train too, it is the one by which
    this machine reaches all that are not near.
    """
    address = own_address(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
    is_alone = environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"]) == environment["WORLD_SIZE"]
    if address is not None and is_own(address) and not is_alone:
        address = own_address(_ELSEWHERE, 9)
    if address is not None:
        name_interface(environment, address)


class _Address(ctypes.Structure):
    """`struct ifaddrs` up to where it is read (getifaddrs(3))."""


_Address._fields_ = [
    ("next", ctypes.POINTER(_Address)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]

_PLACES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
"""Where an address begins in its structure, and its length, by family (ip(7), ipv6(7))."""


def _interfaces() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Yield every address of this machine with the name of its interface."""
    libc, first = ctypes.CDLL(None), ctypes.POINTER(_Address)()
    if libc.getifaddrs(ctypes.byref(first)):
        return
    try:
        place = first
        while place:
            entry = place.contents
            if entry.address:
                family = ctypes.c_ushort.from_address(entry.address).value
                if family in _PLACES:
                    start, length = _PLACES[socket.AddressFamily(family)]
                    address = ctypes.string_at(entry.address + start, length)
                    yield entry.name.decode(), ipaddress.ip_address(address)
            place = entry.next
    finally:
        libc.freeifaddrs(first)
