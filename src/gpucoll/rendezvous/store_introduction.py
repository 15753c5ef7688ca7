"""Let ranks that share a store find out whether they are on one host, and agree on a word.

Each rank but 0 sets a key with its nonce and its host. Rank 0 waits for all of these keys and
writes which nonces it has seen. Each rank that finds its own nonce there empties its key. Once all
keys are empty, rank 0 writes the decision for all, with a new random word by which they meet.

Each new rank has a nonce of its own, so the leftovers of a killed job do no harm: a dead rank does
not empty its key, and a decision with other nonces is not for this rank. Nor need the ranks have
met by this store equally often. A key is deleted only when no rank can be about to read it, because
torch's stores block a reader that finds a key which is deleted before it is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpucoll.errors import RendezvousDeadlineError, RendezvousError
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.meeting_store import StorePoint, given_secret
from gpucoll.topology.host_identity import host_id
from gpucoll.transport.tcp.secret import missing_secret_error
from gpucoll.wording import list_ranks, rank_of

if TYPE_CHECKING:
    from gpucoll.rendezvous.frames import Message

_SEEN, _DECISION = "seen", "decision"
_LEAST_SLEEP_S, _MOST_SLEEP_S, _GROWTH = 0.0002, 0.02, 1.2
"""Pauses between two looks into the store: a look over TCP takes 0.05 ms, and ranks may be late.

So a rank notices news late by a sixth of its wait at most, and by 20 ms at most.
"""


@contextlib.contextmanager
def introduced(job: Job, timeout_s: float) -> Iterator[Job]:
    """Yield the job with which its ranks meet: on one host if all are there, else over TCP.

    Parameters
    ----------
    job : Job
        The job; its `meet` is a `StorePoint`. The ranks meet in the body of the block. If that
        succeeds, all have read what is in the store, and nothing is left there.
    timeout_s : float
        How long to wait for the others, in seconds.

    Raises
    ------
    RendezvousDeadlineError
        A rank did not come in time; rank 0's error names the missing ranks.
    RendezvousError
        The store cannot be written.
    AuthenticationError
        The ranks are on several hosts, and some have no secret: raised on all of them.
    ArgumentError, ArgumentTypeError
        The store provides something that is not a secret.
    """
    store = job.meet
    assert isinstance(store, StorePoint)
    given_secret(store)  # raises for an invalid secret before this rank waits for others
    waiting = _Waiting(job, store, time.monotonic() + timeout_s, timeout_s)
    decision = _ask(waiting) if job.rank else _decide(waiting)
    if decision["without_secret"] and not decision["one_host"]:
        raise missing_secret_error(f"{list_ranks(decision['without_secret'])} of {job.world_size}")
    word = str(decision["word"])
    meet = None if decision["one_host"] else store.named(word)
    title = f"{job.name}/{word} of {job.world_size}"
    yield job._replace(token=f"store:{word}", meet=meet, title=title)
    if job.rank == 0:
        for key in (_SEEN, _DECISION, *(f"rank/{rank}" for rank in range(1, job.world_size))):
            store.delete(waiting.key(key))


@dataclass
class _Waiting:
    """Pauses between looks into the store, longer and longer ones."""

    job: Job
    store: StorePoint
    deadline: float
    timeout_s: float
    sleep_s: float = field(default=_LEAST_SLEEP_S)

    def key(self, what: str) -> str:
        return f"gpucoll/{self.job.name}/{what}"

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
        self.sleep_s = min(_GROWTH * self.sleep_s, _MOST_SLEEP_S)


def _ask(waiting: _Waiting) -> Message:
    """Introduce this rank in the store; return rank 0's decision."""
    store, key = waiting.store, waiting.key
    nonce, mine = os.urandom(8).hex(), key(f"rank/{waiting.job.rank}")
    store.set(mine, json.dumps({"nonce": nonce, **_introduction(store)}))
    try:
        while nonce not in _parsed(store.get(key(_SEEN))).get("nonces", ()):
            waiting.pause([0])
    finally:
        with contextlib.suppress(RendezvousError):
            store.set(mine, "")
    waiting.sleep_s = _LEAST_SLEEP_S
    while nonce not in (decision := _parsed(store.get(key(_DECISION)))).get("nonces", ()):
        waiting.pause([0])
    return decision


def _decide(waiting: _Waiting) -> Message:
    """Wait until all ranks have introduced themselves and seen that rank 0 knows; decide."""
    store, key = waiting.store, waiting.key
    others = range(1, waiting.job.world_size)
    said: dict[int, Message] = {}
    have_seen: set[int] = set()
    is_written = False
    while len(have_seen) < len(others):
        is_news = False
        for rank in others:
            found = _parsed(store.get(key(f"rank/{rank}")))
            if found and found != said.get(rank):
                said[rank], is_news = found, True
                have_seen.discard(rank)
            elif not found and is_written and rank in said:
                have_seen.add(rank)
        if is_news and len(said) == len(others):
            nonces = [one.get("nonce") for one in said.values()]
            store.set(key(_SEEN), json.dumps({"nonces": nonces}))
            is_written = True
            waiting.sleep_s = _LEAST_SLEEP_S
        elif len(have_seen) < len(others):
            waiting.pause([rank for rank in others if rank not in said] or [*others])
    decision = {"word": os.urandom(16).hex(), **_decided({0: _introduction(store), **said})}
    store.set(key(_DECISION), json.dumps(decision))
    return decision


def _introduction(store: StorePoint) -> Message:
    return {"host": host_id(), "has_secret": given_secret(store) is not None}


def _decided(said: dict[int, Message]) -> Message:
    """Return what all ranks must agree on, from their introductions."""
    return {
        "nonces": [one.get("nonce") for one in said.values()],
        "one_host": len({one.get("host") for one in said.values()}) == 1,
        "without_secret": sorted(rank for rank, one in said.items() if not one.get("has_secret")),
    }


def _parsed(text: str) -> Message:
    """Return the content of a key; empty if it is anything but a dictionary in JSON."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
