"""What is under way on a process's TCP connections, as ``/proc/PID/net`` shows it (proc(5))."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Traffic", "traffic_of"]


class Traffic(NamedTuple):
    """The TCP connections of one process at one moment.

    Attributes
    ----------
    queues : frozenset
        For each connection the socket's number, and the bytes that are not acknowledged and not
        read; they change while data moves.
    unacknowledged : tuple of str
        The hosts to which data was sent again, because they have not acknowledged it.
    """

    queues: frozenset[tuple[int, str]] = frozenset()
    unacknowledged: tuple[str, ...] = ()


def traffic_of(pids: Iterable[int]) -> dict[int, Traffic]:
    """Return the traffic of each process of one host; empty for those that are gone."""
    found, table = dict[int, Traffic](), dict[int, tuple[str, str]]()
    for pid in pids:
        if not table:  # all ranks of a host are in one network namespace
            table = _connections(pid)
        own = {inode: table[inode] for inode in _sockets(pid) if inode in table}
        queues = frozenset((inode, queue) for inode, (queue, _) in own.items())
        silent = sorted({peer for _, peer in own.values() if peer})
        found[pid] = Traffic(queues, tuple(silent))
    return found


def _sockets(pid: int) -> set[int]:
    found, folder = set[int](), f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError, ValueError):
                link = os.readlink(f"{folder}/{name}")
                if link.startswith("socket:["):
                    found.add(int(link[8:-1]))
    return found


def _connections(pid: int) -> dict[int, tuple[str, str]]:
    """Return, by socket, the queues, and the peer if data was sent to it again and is still due."""
    found = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                # number, local, remote, state, tx:rx, timer:when, retransmits, user, timeout, inode
                words = line.split()
                peer = _host(words[2]) if int(words[6], 16) else ""
                found[int(words[9])] = words[4], peer
    return found


def _host(text: str) -> str:
    """Return the address in a row: words of 4 bytes, each in the order of this machine."""
    digits = text.partition(":")[0]
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))
