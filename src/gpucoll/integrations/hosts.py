"""Which ranks of a communicator share a host."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from gpucoll import config

if TYPE_CHECKING:
    from gpucoll import Communicator


def colour_of_host(comm: Communicator) -> int:
    """Return the lowest rank on this rank's host."""
    everyone = comm.all_gather_object(_host())
    return int(everyone.index(everyone[comm.rank]))


def _host() -> str:
    """Return gpucoll's identifier of this host, by which a container is a host of its own."""
    if named := config.variable(config.HOST_ID):
        return named
    parts = [os.uname().nodename]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    for kind in ("net", "uts"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(f"/proc/self/ns/{kind}"))
    return "/".join(parts)
