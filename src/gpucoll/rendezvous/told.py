"""Let ranks meet that can exchange bytes already, over MPI for example."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from gpucoll.rendezvous.addresses import join_address
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.meeting_points import HandedPoint
from gpucoll.rendezvous.tcp import listen_at
from gpucoll.topology.host_identity import host_id
from gpucoll.topology.interfaces import own_address
from gpucoll.transport.tcp.credentials import Credentials, job_tls
from gpucoll.wording import rank_of

__all__ = ["told_job"]

_BACKLOG = 4096


def told_job(rank: int, world_size: int, tell: Callable[[bytes], list[bytes]], origin: str) -> Job:
    """Return the job of ranks that are about to meet; each of them calls this.

    On one host they meet by a word that rank 0 makes. Otherwise they meet at a port of rank 0,
    which listens already when this returns, with a secret that rank 0 makes. So no secret has to be
    distributed beforehand: the meeting is as safe as the channel of `tell`.

    Parameters
    ----------
    rank, world_size : int
        This rank's place.
    tell : callable
        Sends this rank's bytes to every rank; returns all ranks' bytes, by rank.
    origin : str
        The channel of `tell`, for messages.
    """
    hosts = [part.decode() for part in tell(host_id().encode())]
    spans_hosts = len(set(hosts)) > 1
    listener = None
    said: dict[str, Any] = {}
    if rank == 0:
        said = {"word": os.urandom(16).hex()}
        if spans_hosts:
            who = rank_of(rank, world_size)
            listener = listen_at(own_address(None), 0, f"{who} cannot listen", _BACKLOG)
            place = join_address(*listener.getsockname()[:2])
            said |= {"address": place, "secret": os.urandom(32).hex()}
    try:
        first = json.loads(tell(json.dumps(said).encode())[0])
        title = f"{origin}/{first['word']} of {world_size}"
        point = None
        if spans_hosts:
            tls = job_tls(rank_of(rank, world_size))
            credentials = Credentials(bytes.fromhex(first["secret"]), tls)
            point = HandedPoint(first["address"], credentials, listener)
    except BaseException:
        if listener is not None:
            listener.close()
        raise
    token = f"{origin}:{first['word']}"
    is_launched = world_size > 1
    return Job(rank, world_size, token, origin, is_launched, meet=point, title=title)
