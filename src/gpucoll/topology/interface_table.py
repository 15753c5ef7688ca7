"""The kernel's network interfaces, with their addresses and MTUs.

They are read by ioctl and from ``/proc/net/if_inet6``, both of which show this process's own
network namespace. ``/sys/class/net`` shows the namespace that it was mounted in.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

__all__ = ["addresses_by_interface", "interface_names", "mtu_of"]

_SIOCGIFCONF, _SIOCGIFMTU = 0x8912, 0x8921  # Linux: include/uapi/linux/sockios.h
_NAME_BYTES = 16
_REQUEST_BYTES = 40 if struct.calcsize("P") == 8 else 32  # struct ifreq
_MOST_ADDRESSES = 4096
_AF_INET_AT = struct.Struct("=H2x4s")  # family (host order), port (skipped), address (bytes)
_NOT_USABLE = 0x08 | 0x40  # IFA_F_DADFAILED, IFA_F_TENTATIVE
_LINK_SCOPE = 0x20


def interface_names() -> list[str]:
    """Return the names of all interfaces, in the kernel's order."""
    try:
        return [name for _, name in socket.if_nameindex()]
    except OSError:  # it is forbidden
        return sorted(_ipv4())


def addresses_by_interface() -> dict[str, list[str]]:
    """Return each interface's addresses: IPv4, then IPv6, link-local ones last with their zone.

    Interfaces without an address are left out.
    """
    found = _ipv4()
    for name, addresses in _ipv6().items():
        found.setdefault(name, []).extend(addresses)
    return found


def _ipv4() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    space = array.array("B", bytes(_REQUEST_BYTES * _MOST_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        asked = struct.pack("iP", len(space), space.buffer_info()[0])
        try:
            size, _ = struct.unpack("iP", fcntl.ioctl(end, _SIOCGIFCONF, asked))
        except OSError:
            return found
    for start in range(0, size, _REQUEST_BYTES):
        request = space[start : start + _REQUEST_BYTES].tobytes()
        label = os.fsdecode(request[:_NAME_BYTES].split(b"\0")[0])
        family, address = _AF_INET_AT.unpack_from(request, _NAME_BYTES)
        if family == socket.AF_INET:  # a second address may be labelled eth0:1
            found.setdefault(label.partition(":")[0], []).append(socket.inet_ntoa(address))
    return found


def _ipv6() -> dict[str, list[str]]:
    found: dict[str, list[tuple[bool, str]]] = {}
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # a kernel without IPv6
        lines = []
    for line in lines:
        digits, _, _, scope, flags, name = line.split()
        if int(flags, 16) & _NOT_USABLE:
            continue
        address = str(ipaddress.IPv6Address(bytes.fromhex(digits)))
        is_link_local = int(scope, 16) == _LINK_SCOPE
        found.setdefault(name, []).append((is_link_local, address + f"%{name}" * is_link_local))
    return {name: [address for _, address in sorted(pairs)] for name, pairs in found.items()}


def mtu_of(name: str) -> int:
    """Return an interface's MTU in bytes; OSError: there is no such interface."""
    request = bytearray(os.fsencode(name)[: _NAME_BYTES - 1].ljust(_REQUEST_BYTES, b"\0"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        fcntl.ioctl(end, _SIOCGIFMTU, request)
    return int(struct.unpack_from("i", request, _NAME_BYTES)[0])
