"""Let all ranks of a job meet: either all have what they share afterwards, or none has.

Rank 0 listens. The others connect and introduce themselves with their file descriptors. Rank 0
checks that all belong together, decides what all must agree on, and sends all ranks' descriptors to
all ranks. Each rank makes its part of what they share and reports that. Once the last one has, rank
0 confirms the meeting to all. So either all ranks have it or none. If a rank is lost or gives up on
the way, its connection shows that, and the meeting ends for all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpucoll.rendezvous.endpoint import Endpoint
from gpucoll.rendezvous.held_signals import held_signals
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.marks import marked
from gpucoll.rendezvous.meeting import Decide, Meeting, T, Terms, Watch
from gpucoll.rendezvous.unix import UnixEndpoint

if TYPE_CHECKING:
    from gpucoll.rendezvous.frames import Message

__all__ = ["Meeting", "Watch", "meet"]


def meet(
    job: Job,
    introduction: Message,
    fds: list[int],
    *,
    check: Callable[[Message, list[int]], None],
    decide: Decide,
    settle: Callable[[Meeting], T],
    undo: Callable[[T], None],
    timeout_s: float,
    watch: Watch | None = None,
    endpoint: Endpoint | None = None,
) -> T:
    """Meet the other ranks of the job; return what `settle` made of it.

    Parameters
    ----------
    job : Job
        The ranks that meet. The job's token names the Unix socket; two meetings at the same time
        need different tokens.
    introduction : dict
        Sent to every rank. ``introduction["same"]`` must be equal on all of them.
    fds : list of int
        Sent with the introduction; the same number on every rank. The caller keeps them.
    check : callable
        Called on rank 0 with every other introduction and its descriptors; raises ValueError, with
        the end of a sentence, if they cannot be a rank's.
    decide : callable
        Called on rank 0 with all introductions; returns the decision and descriptors for all.
    settle : callable
        Called on every rank with the `Meeting`, whose descriptors it takes over.
    undo : callable
        Called with what `settle` returned if another rank fails after that.
    timeout_s : float
        How long to wait for the others, in seconds.
    watch : Watch, optional
        Knows, beyond the meeting's own connections, which ranks can never come.
    endpoint : Endpoint, optional
        How the ranks reach rank 0; default: the Unix socket of this host.

    Raises
    ------
    RendezvousDeadlineError
        A rank did not come in time.
    RendezvousError
        A rank does not belong to the job.
    PeerLostError, AbortedError
        A rank's process has ended, or a rank has given up.
    """
    watch = watch or Watch(job.rank, job.world_size)
    watch.has_begun = True
    endpoint = endpoint or UnixEndpoint(job)
    with held_signals() as signals, marked(job, watch):
        terms = Terms(
            job, introduction, fds, check, decide, settle, undo, timeout_s, watch, signals, endpoint
        )
        try:
            if job.world_size == 1:
                decision, shared = decide([introduction])
                own = [os.dup(fd) for fd in fds]
                return settle(Meeting(job, [introduction], decision, shared, [own]))
            if job.rank == 0:
                from gpucoll.rendezvous.host import Host

                return Host(terms).run()
            from gpucoll.rendezvous.guest import Guest

            return Guest(terms).run()
        finally:
            watch.close()
            endpoint.close()
