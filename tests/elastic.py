"""A program of an elastic job: rank 1 is killed, the others shrink, and win it back."""

from __future__ import annotations

PROGRAM = """\
import os, signal, sys
import gpucoll

comm = gpucoll.init(timeout_s=60)
if comm.epoch == 0:
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.barrier()
    except gpucoll.PeerLostError:
        comm = comm.shrink()
    comm = comm.grow(wait_s=60)
sys.stdout.write(f"{comm.rank} of {comm.world_size} in epoch {comm.epoch}: {comm.all_reduce(1)}\\n")
comm.close()
"""
SAID = [f"{rank} of 3 in epoch 2: 3" for rank in range(3)]
"""The lines of its three ranks, in order."""


def again(python: str, program: object) -> list[str]:
    """Return a command that runs the program, and after a failure again as a newcomer."""
    return ["sh", "-c", f"{python} {program} || GPUCOLL_JOIN=1 exec {python} {program}"]
