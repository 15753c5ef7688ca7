"""A program of an elastic job: rank 1 is killed and comes back, then rank 0."""

from __future__ import annotations

PROGRAM = """\
import os, signal, sys
import gpucoll

comm = gpucoll.init(timeout_s=60)
while comm.epoch < 4:
    try:
        comm.barrier()
        if (comm.epoch, comm.rank) in ((0, 1), (2, 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()
    except gpucoll.PeerLostError:
        comm = comm.shrink().grow(wait_s=60)
sys.stdout.write(f"{comm.rank} of {comm.world_size} in epoch {comm.epoch}: {comm.all_reduce(1)}\\n")
comm.close()
"""
SAID = [f"{rank} of 3 in epoch 4: 3" for rank in range(3)]
"""The lines of its three ranks in the end: what was rank 2, then 1, then 0."""


def again(python: str, program: object) -> list[str]:
    """Return a command that runs the program, and after a failure again as a newcomer."""
    return ["sh", "-c", f"{python} {program} || GPUCOLL_JOIN=1 exec {python} {program}"]
