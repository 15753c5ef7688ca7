"""Which host this is: ranks whose answers are equal share memory, the others connect by TCP."""

from __future__ import annotations

import os

from gpucoll import config
from gpucoll.topology.cpus import FILE_SYSTEM, read_text

__all__ = ["host_id", "network_id"]

_NAMESPACES = ("net", "uts")


def host_id() -> str:
    """Return this host's identity: ``GPUCOLL_HOST_ID``, or what the kernel says.

    That is the boot id with the inodes of the network and the UTS namespace. Abstract Unix sockets,
    by which the ranks of a host meet, belong to a network namespace: containers with one of their
    own are hosts of their own. The boot id alone would hold for all containers of a machine, and
    a host name for every machine that was installed from the same image.
    """
    if named := config.variable(config.HOST_ID):
        return named
    return "/".join([_kernel(), *map(_namespace, _NAMESPACES)])


def network_id() -> str:
    """Return which kernel and network namespace this is, whatever ``GPUCOLL_HOST_ID`` says.

    Ranks for which this differs cannot meet at an abstract Unix socket, and so share no memory.
    """
    return f"{_kernel()}/{_namespace('net')}"


def _kernel() -> str:
    boot = read_text(FILE_SYSTEM / "proc/sys/kernel/random/boot_id").strip()
    return boot or os.uname().nodename


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:  # a kernel without this kind, or no /proc: there is one only
        return f"{kind}:"
