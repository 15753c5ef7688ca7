"""TCP addresses as text: ``host:port``, with an IPv6 address in brackets."""

from __future__ import annotations

import ipaddress

from gpucoll.hashing import blake2b

__all__ = ["LONGEST_HOST", "derived_port", "is_place", "join_address", "split_address"]

LONGEST_HOST = 255
_LOWEST_DERIVED, _END_DERIVED = 10240, 32768


def join_address(host: str, port: int) -> str:
    """Return ``host:port``; an IPv6 address gets its brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of ``host:port``.

    Raises
    ------
    ValueError
        The text is not an address; the error's text completes a sentence about it.
    """
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError("an IPv6 address must stand in brackets: [fd00::1]:29500")
        digits = rest[1:]
    elif text.count(":") > 1:
        raise ValueError("an IPv6 address must stand in brackets: [fd00::1]:29500")
    else:
        host, _, digits = text.partition(":")
    if not host:
        raise ValueError("it names no host")
    if len(host) > LONGEST_HOST or any(c in "/@?# \\" or not c.isprintable() for c in host):
        raise ValueError("the part before the port is not a host name")
    if not digits:
        raise ValueError("it has no port: HOST:PORT, with a port that is free on that host")
    if not (digits.isascii() and digits.isdecimal()) or not 0 < int(digits[:6]) < 65536:
        raise ValueError(f"the port must be a number from 1 to 65535, but is {digits[:20]!r}")
    return host, int(digits)


def is_place(told: object) -> bool:
    """Return whether a value from another rank can be where it listens: ``[address, port]``."""
    if not isinstance(told, list) or [type(part) for part in told] != [str, int]:
        return False
    host, port = told
    try:
        ipaddress.ip_address(host)
    except ValueError:  # a name would have to be resolved, which may take long
        return False
    return bool(0 < port < 65536)


def derived_port(word: str) -> int:
    """Return the port that is derived from a job's name, the same on every host: 10240 to 32767.

    Daemons use lower ports. Linux gives higher ports to outgoing connections (32768 to 60999,
    unless ``ip_local_port_range`` is set otherwise), where one of them might take the job's port by
    chance.
    """
    number = int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "big")
    return _LOWEST_DERIVED + number % (_END_DERIVED - _LOWEST_DERIVED)
