"""Network interfaces of this host: their addresses, and the interface that leads to a host."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import Any, NamedTuple

from gpucoll import config
from gpucoll.errors import ArgumentError, RendezvousError

# --- the kernel's interfaces, with their addresses and MTUs ---------------------------------------

# They are read by ioctl and from ``/proc/net/if_inet6``, both of which show this process's own
# network namespace. ``/sys/class/net`` shows the namespace that it was mounted in.


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


# --- the choice -----------------------------------------------------------------------------------


_ANY_PORT = 9  # discard; a UDP socket that is connected sends nothing
_DOCUMENTATION = ("192.0.2.1", "2001:db8::1")
"""Addresses that no host has (RFC 5737, 3849), so that only the default route leads to them."""


class Interface(NamedTuple):
    """A network interface."""

    name: str
    mtu: int


# --- of this host -----------------------------------------------------------------------------


def addresses_of(interface_name: str) -> list[str]:
    """Return an interface's addresses: IPv4 first, then IPv6, link-local ones last with their zone.

    Raises
    ------
    ArgumentError
        There is no such interface; the error lists those that there are.
    """
    _check_there(interface_name)
    return addresses_by_interface().get(interface_name, [])


def interface_of(address: str) -> Interface:
    """Return the interface that has an address of this host.

    Raises
    ------
    ArgumentError
        No interface has it; the error lists the addresses that there are.
    """
    wanted = ipaddress.ip_address(address.partition("%")[0])
    zone = address.partition("%")[2]
    for name, addresses in addresses_by_interface().items():
        for found in addresses:
            plain, _, found_zone = found.partition("%")
            if ipaddress.ip_address(plain) == wanted and zone in ("", found_zone):
                return Interface(name, mtu_of(name))
    for name, addresses in addresses_by_interface().items():  # the loopback has all of 127.0.0.0/8
        if wanted.is_loopback and any(ipaddress.ip_address(a).is_loopback for a in addresses[:1]):
            return Interface(name, mtu_of(name))
    raise ArgumentError(f"no network interface of this host has the address {address}: {_there()}")


def is_local(address: str) -> bool:
    """Return whether a numeric address is this host's own, so that a socket can listen there."""
    try:
        family, place = _resolved(address)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as end:
            end.bind((place[0], 0, *place[2:]))
    except OSError:
        return False
    return True


def chosen_addresses(family: socket.AddressFamily | None = None) -> list[str]:
    """Return the addresses that ``GPUCOLL_INTERFACES`` names; empty: it is not set.

    Parameters
    ----------
    family : socket.AddressFamily, optional
        ``AF_INET`` or ``AF_INET6``. Default: the first address of each interface, IPv4 if it has
        one.

    Raises
    ------
    ArgumentError
        There is no such interface or address, or it has no address of this family.
    """
    words = [word.strip() for word in config.variable(config.INTERFACES).split(",")]
    return [_chosen(word, family) for word in words if word]


def _chosen(word: str, family: socket.AddressFamily | None) -> str:
    where = f"{config.INTERFACES} names {word!r}"
    if _version(word):
        if not is_local(word):
            raise ArgumentError(f"{where}, which is no address of this host: {_there()}")
        found = [word]
    else:
        if word not in interface_names():
            raise ArgumentError(f"{where}: {_no_such(word)}")
        found = _usable(addresses_of(word))
    of_family = [a for a in found if family is None or _version(a) == _VERSIONS[family]]
    if not of_family:
        kind = f"IPv{_VERSIONS[family]} " if family is not None else ""
        raise ArgumentError(f"{where}, which has no {kind}address: {_there()}")
    return of_family[0]


_VERSIONS = {socket.AF_INET: 4, socket.AF_INET6: 6}


def _version(address: str) -> int:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).version
    except ValueError:
        return 0


def _check_there(name: str) -> None:
    if name not in interface_names():
        raise ArgumentError(_no_such(name))


def _no_such(name: str) -> str:
    return f"this host has no network interface {name!r}: {_there()}"


def _there() -> str:
    """Return a list of the interfaces, for errors."""
    found = addresses_by_interface()
    parts = [
        f"{name} ({', '.join(found.get(name, [])) or 'no address'})" for name in interface_names()
    ]
    return f"there are {'; '.join(parts)}"


# --- towards other hosts ------------------------------------------------------------------------


def own_address(towards: str | None = None) -> str:
    """Return the address at which other hosts reach this host's ranks.

    It is the first address of ``GPUCOLL_INTERFACES`` in a family by which `towards` is reached. If
    none is set, it is the address on the way to `towards`, or else the one on the default route.

    Parameters
    ----------
    towards : str, optional
        A host in the direction of the other hosts.

    Raises
    ------
    ArgumentError, RendezvousError
        Raised by `chosen_addresses` and `local_address_towards`.
    """
    if not chosen_addresses():
        return default_address() if towards is None else local_address_towards(towards)
    if towards is not None:
        for family in dict.fromkeys(family for family, _ in _places(towards)):
            with contextlib.suppress(ArgumentError):
                return chosen_addresses(family)[0]
    return chosen_addresses()[0]


def reachable_addresses(host: str) -> list[str]:
    """Return the numeric addresses at which other hosts can reach a host.

    On the host itself, its own name often resolves to the loopback, by its ``/etc/hosts`` (Debian:
    127.0.1.1), while the other hosts' DNS gives another address. So if a name resolves to the
    loopback but is not plainly the loopback's, it is this host. Its addresses are then those of
    ``GPUCOLL_INTERFACES``, or the one on its default route.

    Multicast DNS and systemd's resolver put link-local addresses of IPv6 in front of those of IPv4.
    They are left out if there are others.

    Raises
    ------
    OSError
        The name does not resolve, as `socket.getaddrinfo` reports it.
    """
    found = numeric_addresses(host)
    if not means_loopback(host) and all(map(is_loopback, found)):
        return chosen_addresses() or [default_address()]
    return _usable(found)


def _usable(addresses: list[str]) -> list[str]:
    """Return the addresses that other hosts can use; if there are none, all, to explain why."""
    return [address for address in addresses if not _is_link_local(address)] or addresses


def _is_link_local(address: str) -> bool:
    plain = ipaddress.ip_address(address.partition("%")[0])
    return plain.version == 6 and plain.is_link_local


def is_loopback(address: str) -> bool:
    """Return whether a numeric address is one of the loopback's."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def check_not_link_local(address: str) -> None:
    """Raise RendezvousError for an address that is valid on one link of one host only."""
    if _is_link_local(address):
        raise RendezvousError(
            f"{address} is a link-local address of IPv6, which other hosts cannot use as it stands "
            f"(each would have to add the name of its own interface): give the hosts other "
            f"addresses, such as fd00::1 or IPv4 ones, and name those in {config.MEET} and "
            f"{config.INTERFACES}; {_there()}"
        )


def means_loopback(host: str) -> bool:
    """Return whether a name or address is plainly the loopback's, on every host."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    return bool(_version(host)) and is_loopback(host)


def local_address_towards(host: str) -> str:
    """Return this host's address from which packets to another host go, without sending any.

    If the name is this host's own, it is the address at which others reach it
    (`reachable_addresses`).

    Parameters
    ----------
    host : str
        A name or an address, IPv4 or IPv6.

    Raises
    ------
    RendezvousError
        The name does not resolve, or resolves to link-local addresses of IPv6 only, or no interface
        leads there.
    """
    last: OSError | None = None
    for family, place in _places(host):
        try:
            return _towards(family, place)
        except OSError as error:
            last = error
    said = _said(last) if last is not None else "it has no address"
    raise RendezvousError(f"no network interface of this host leads to {host}: {said}; {_there()}")


def default_address() -> str:
    """Return this host's address on its default route; without one, a loopback address."""
    for address in _DOCUMENTATION:
        try:
            return _towards(*_resolved(address)[0])
        except OSError:
            continue
    return "127.0.0.1"


def numeric_addresses(host: str) -> list[str]:
    """Return the numeric addresses of a host, in the order in which to try them.

    Raises
    ------
    OSError
        The name does not resolve, as `socket.getaddrinfo` reports it.
    """
    found = [
        socket.getnameinfo(place, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]
        for _, place in _resolved(host)
    ]
    return list(dict.fromkeys(found))


def _places(host: str) -> list[tuple[socket.AddressFamily, Any]]:
    try:
        found = reachable_addresses(host)
        check_not_link_local(found[0])
        return [place for address in found for place in _resolved(address)]
    except OSError as error:
        raise RendezvousError(f"the host name {host!r} does not resolve: {_said(error)}") from None


def _towards(family: socket.AddressFamily, place: Any) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as end:
        end.connect(place)
        name: tuple[str, int] = end.getsockname()
        return socket.getnameinfo(name, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def _resolved(host: str) -> list[tuple[socket.AddressFamily, Any]]:
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except UnicodeError as error:  # a part of the name is empty, or has over 63 characters
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from None
    return [(entry[0], entry[4]) for entry in found]


def _said(error: OSError) -> str:
    return error.strerror or str(error)
