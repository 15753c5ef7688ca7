"""The test of the CPU path: an all_reduce between two processes, checked on both."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from gpucoll.doctor.facts import SelfTest

if TYPE_CHECKING:
    from gpucoll.api.communicator import Communicator

__all__ = ["self_test"]

RANKS = 2
SIZES = (3, 1 << 18)
"""Numbers of elements: one array fits a slot, the other (1 MiB) is sent in chunks."""


def self_test(timeout_s: str) -> SelfTest:
    """Run the test; its ranks are ended after `timeout_s`, which is given as text."""
    from gpucoll.launcher.function import launch

    start = time.monotonic()
    try:
        readable = launch(_rank, RANKS, timeout_s=float(timeout_s))
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        return SelfTest(passed=False, elapsed_s=None, single_copy=None, problem=text)
    elapsed_s = round(time.monotonic() - start, 3)
    return SelfTest(passed=True, elapsed_s=elapsed_s, single_copy=all(readable), problem=None)


def _rank(comm: Communicator) -> bool:
    """Return whether this rank can read the others' memory; raise if a result is wrong."""
    import numpy as np

    from gpucoll.transport.shared import peer_memory

    for size in SIZES:
        x = np.arange(size, dtype=np.float32) % 1024 * (comm.rank + 1)
        # small integers, whose sums are exact
        expected = np.arange(size, dtype=np.float32) % 1024 * 3
        out = np.full_like(x, np.nan)
        comm.all_reduce(x, out=out)
        if not np.array_equal(out, expected):
            raise RuntimeError(f"all_reduce of {size} float32 gave a wrong sum on rank {comm.rank}")
    probes = comm.all_gather_object((os.getpid(), *peer_memory.own_probe()))
    readable = all(peer_memory.is_readable(*probe) for probe in probes)
    comm.barrier()  # no rank ends while the other one reads its memory
    return readable
