"""Ranks that share a store learn by it whether they are on one host, and a word to meet by.

Each rank but 0 leaves a key that says who it is and on which host; rank 0 waits for all of them and
answers under one key, with a word that nobody has used before; each empties its own key when it has
read the answer, and rank 0 takes all away when all have. Whoever is new has a nonce of its own, and
an answer without it is not for this rank: so keys that a killed job has left are no harm, and the
ranks need not have met by this store equally often. A key is taken away only when nobody can be
about to read it: torch's stores let a reader wait who finds that a key is there and then gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, field, replace
from typing import Any

from gpucoll.errors import RendezvousDeadlineError, RendezvousError
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.meeting_store import StorePoint
from gpucoll.topology.host_identity import host_id
from gpucoll.transport.tcp.secret import job_secret, missing_secret_error
from gpucoll.wording import list_ranks, rank_of

_LEAST_SLEEP_S, _MOST_SLEEP_S = 0.0002, 0.02
"""Between two looks into the store: a look over TCP takes 0.05 ms, and members may be late."""


def introduce(job: Job, timeout_s: float) -> Job:
    """Return the job as its ranks meet now: on one host where all are there, else over TCP.

    Parameters
    ----------
    job : Job
        Its `meet` is a `StorePoint`.
    timeout_s : float
        How long to wait for the others, in seconds.

    Raises
    ------
    RendezvousDeadlineError
        A rank did not come in time; rank 0 names those.
    RendezvousError
        The store cannot be written.
    AuthenticationError
        The ranks are on several hosts, and some have no secret: raised on all of them.
    """
    store = job.meet
    assert isinstance(store, StorePoint)
    waiting = _Waiting(job, store, time.monotonic() + timeout_s, timeout_s)
    answer = _ask(waiting) if job.rank else _answer(waiting)
    if answer["without_secret"] and not answer["one_host"]:
        raise missing_secret_error(f"{list_ranks(answer['without_secret'])} of {job.world_size}")
    word = str(answer["word"])
    meet = None if answer["one_host"] else store.named(word)
    title = f"{job.name}/{word} of {job.world_size}"
    return replace(job, token=f"store:{word}", meet=meet, title=title)


@dataclass
class _Waiting:
    """Looks into the store again and again, less often the longer it takes."""

    job: Job
    store: StorePoint
    deadline: float
    timeout_s: float
    sleep_s: float = field(default=_LEAST_SLEEP_S)

    def pause(self, missing: list[int]) -> None:
        if time.monotonic() > self.deadline:
            who = rank_of(self.job.rank, self.job.world_size)
            trouble = f" ({self.store.trouble})" if self.store.trouble else ""
            raise RendezvousDeadlineError(
                f"{who}: {list_ranks(missing)} did not come to init at {self.store.text} within "
                f"{self.timeout_s:g} s{trouble}. Every rank of the group calls it, with the same "
                "store and name"
            )
        time.sleep(self.sleep_s)
        self.sleep_s = min(2 * self.sleep_s, _MOST_SLEEP_S)


def _ask(waiting: _Waiting) -> dict[str, Any]:
    """Say who this rank is; return what rank 0 answers."""
    job, store = waiting.job, waiting.store
    nonce, mine = os.urandom(8).hex(), f"rank/{job.rank}"
    store.write(mine, json.dumps({"nonce": nonce, **_introduction()}))
    try:
        while True:
            answer = _parsed(store.read("answer"))
            if nonce in answer.get("nonces", ()):
                return answer
            waiting.pause([0])
    finally:
        with contextlib.suppress(RendezvousError):
            store.write(mine, "")


def _answer(waiting: _Waiting) -> dict[str, Any]:
    """Wait until all ranks have said who they are, and until all have read the answer."""
    job, store = waiting.job, waiting.store
    others = range(1, job.world_size)
    answer: dict[str, Any] = {"word": os.urandom(16).hex()}
    said: dict[int, dict[str, Any]] = {}
    have_read: set[int] = set()
    try:
        while len(have_read) < len(others):
            is_news = False
            for rank in others:
                found = _parsed(store.read(f"rank/{rank}"))
                if found and found != said.get(rank):
                    said[rank], is_news = found, True
                elif not found and "nonces" in answer and rank in said:
                    have_read.add(rank)
            if is_news and len(said) == len(others):
                answer.update(_decided({0: _introduction(), **said}))
                store.write("answer", json.dumps(answer))
            elif len(have_read) < len(others):
                waiting.pause([rank for rank in others if rank not in said] or [*others])
    except BaseException:
        with contextlib.suppress(RendezvousError):
            store.write("answer", "")
        raise
    for key in ("answer", *(f"rank/{rank}" for rank in others)):
        store.erase(key)
    return answer


def _introduction() -> dict[str, Any]:
    return {"host": host_id(), "has_secret": job_secret() is not None}


def _decided(said: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return what all must agree on, from what each rank has said."""
    return {
        "nonces": [one.get("nonce") for one in said.values()],
        "one_host": len({one.get("host") for one in said.values()}) == 1,
        "without_secret": sorted(rank for rank, one in said.items() if not one.get("has_secret")),
    }


def _parsed(text: str) -> dict[str, Any]:
    """Return what a key holds; nothing where it holds something else."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
