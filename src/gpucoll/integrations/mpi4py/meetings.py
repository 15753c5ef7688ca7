"""The rendezvous of a new communicator's members, through messages among them.

Each member keeps what all members have written, and sends the others what it writes itself. This is
the store that `gpucoll.init(meet=...)` needs, without a server. The messages use a communicator of
all processes that serves nothing else.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gpucoll
from gpucoll.integrations.mpi4py.job import job

if TYPE_CHECKING:
    from gpucoll import Communicator

_PAUSE_S = 1e-4
_inboxes: defaultdict[str, dict[str, Any]] = defaultdict(dict)
_ended: defaultdict[str, set[int]] = defaultdict(set)
_numbers: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


class MessageStore:
    """The keys and values of one rendezvous.

    Parameters
    ----------
    name : str
        The name of the rendezvous: the same on all members, and unique.
    members : sequence of int
        The members' ranks in COMM_WORLD.
    """

    def __init__(self, name: str, members: Sequence[int]) -> None:
        self._name = name
        self._others = [rank for rank in members if rank != job.world.rank]
        self._works: list[Any] = []

    def set(self, key: str, value: str) -> None:
        """Set a key, and send it to the other members."""
        _inboxes[self._name][key] = value
        self._tell(key, value)

    def get(self, key: str) -> str | None:
        """Return a key's value; None if it has not arrived yet."""
        _take_all()
        return _inboxes[self._name].get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have arrived."""
        _take_all()
        return all(key in _inboxes[self._name] for key in keys)

    def delete_key(self, key: str) -> None:
        """Delete a key, and tell the other members."""
        _inboxes[self._name].pop(key, None)
        self._tell(key, None)

    def end(self, timeout_s: float) -> None:
        """Tell the other members that nothing follows, and wait until they have done so, too."""
        self._tell("", None)
        until_s = time.monotonic() + timeout_s
        while not _ended[self._name].issuperset(self._others):
            _take_all()
            if time.monotonic() > until_s:
                missing = sorted(set(self._others) - _ended[self._name])
                raise gpucoll.DeadlineError(
                    f"a communicator of ranks {self._others} and {job.world.rank} was made, but "
                    f"ranks {missing} of COMM_WORLD did not confirm it within {timeout_s:g} s"
                )
            time.sleep(_PAUSE_S)
        gpucoll.wait_all(self._works, timeout_s)
        del _ended[self._name]
        _inboxes.pop(self._name, None)

    def _tell(self, key: str, value: str | None) -> None:
        message = (self._name, key, value, job.world.rank)
        with job.service_lock:
            self._works.extend(
                job.service.send_object(message, rank, async_op=True) for rank in self._others
            )


def _take_all() -> None:
    """Receive all messages that have arrived, for any rendezvous."""
    with job.service_lock:
        while (message := job.service.probe(wait=False)) is not None:
            name, key, value, sender = job.service.recv_object(message.source, message.tag)
            if not key:
                _ended[name].add(sender)
            elif value is None:
                _inboxes[name].pop(key, None)
            else:
                _inboxes[name][key] = value


def meet(context: str, members: Sequence[int], timeout_s: float) -> Communicator:
    """Return gpucoll's communicator of some processes. Only these processes call this."""
    mine = job.world.rank
    whole = f"{context}:{','.join(map(str, members))}"
    name = f"{whole}#{next(_numbers[whole])}"
    store = MessageStore(name, members)
    comm = gpucoll.init(
        rank=list(members).index(mine),
        world_size=len(members),
        meet=store if len(members) > 1 else None,
        name=f"mpi4py {name}"[:60],
        timeout_s=timeout_s,
    )
    store.end(timeout_s)
    return comm
