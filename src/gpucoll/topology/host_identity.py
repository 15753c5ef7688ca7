"""This host's identity: ranks with equal identities share memory, others connect over TCP."""

from __future__ import annotations

import os

from gpucoll import config
from gpucoll.topology.cpus import FILE_SYSTEM, read_text

_NAMESPACES = ("net", "uts")


def host_id() -> str:
    """Return this host's identity: ``GPUCOLL_HOST_ID``, or one from the kernel.

    The kernel's identity is the boot id with the inodes of the network and the UTS namespace. The
    ranks of a host meet by abstract Unix sockets, which belong to a network namespace, so a
    container with a network namespace of its own is a host of its own. The boot id alone would be
    the same in all containers of a machine, and a host name the same on all machines that were
    installed from one image.
    """
    if named := config.variable(config.HOST_ID):
        return named
    return "/".join([_kernel(), *map(_namespace, _NAMESPACES)])


def network_id() -> str:
    """Return the identity of kernel and network namespace; ``GPUCOLL_HOST_ID`` does not change it.

    Ranks with different ones cannot meet at an abstract Unix socket, and so share no memory.
    """
    return f"{_kernel()}/{_namespace('net')}"


def _kernel() -> str:
    boot = read_text(FILE_SYSTEM / "proc/sys/kernel/random/boot_id").strip()
    return boot or os.uname().nodename


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:  # a kernel without this kind, or no /proc: there is only one namespace
        return f"{kind}:"
