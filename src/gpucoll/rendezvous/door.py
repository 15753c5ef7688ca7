"""Where newcomers wait until the ranks of a communicator let them in (`Communicator.grow`).

Rank 0 opens the door with the first call of `grow`, and it stays open until the communicator is
closed. Newcomers connect, prove that they belong to the job as in a meeting (on one host by their
user, between hosts by the job's secret), introduce themselves, and wait. Rank 0 serves the door
only within `grow`, so nothing of this costs anything between two calls.

====================  ==============================================================
rank 0 says           and the newcomer
====================  ==============================================================
``ask``               answers ``here``: it is neither stopped nor gone
``plan``              meets the ranks in the way that the plan describes, and says ``made``
``in``                is a rank: all old ranks have gone over to the new communicator
``out``               drops what it has made, if anything, and waits on
====================  ==============================================================
"""

from __future__ import annotations

import atexit
import os
import select
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Final

from gpucoll.errors import AuthenticationError
from gpucoll.rendezvous import frames
from gpucoll.rendezvous.arrivals import Arrivals, Introduced
from gpucoll.rendezvous.door_place import DoorPlace
from gpucoll.rendezvous.endpoint import PeerConnection
from gpucoll.rendezvous.frames import BadMessageError, Message
from gpucoll.rendezvous.meeting import SLICE_S, poll_once

ANSWERING_S: Final = 1.0
"""How long a newcomer may take to say that it is there; a stopped one does not."""
_INTRODUCING_S: Final = 0.5
"""How long `Door.wait` waits for each newcomer that has connected and not introduced itself."""
_TELLING_S: Final = 0.2
"""How long newcomers may leave a message unread that their connections have no room for."""
ENTERING_S: Final = _INTRODUCING_S + ANSWERING_S + _TELLING_S + 0.5
"""How long the door may keep rank 0 beyond the time for which it waits for newcomers."""


class Door:
    """Rank 0's side; `door_caller.Caller` is a newcomer's.

    Parameters
    ----------
    place : DoorPlace
        Where it is.
    who : str
        This rank, for messages.
    same : dict
        What newcomers must have in common with this rank, by the names that errors give it.
    number : int
        Higher than that of each rank 0 that has kept the door before.

    Raises
    ------
    RendezvousError
        This rank cannot listen there.
    AuthenticationError
        The ranks are on several hosts, and the job has no secret.
    """

    def __init__(self, place: DoorPlace, who: str, same: Message, number: int = 0) -> None:
        self.place = place
        self._same = same
        self.endpoint = place.endpoint(who, number)
        try:
            self._arrivals = Arrivals(self.endpoint.listen(who), self.endpoint, 0)
        except BaseException:
            self.endpoint.close()
            raise
        self._waiting: list[PeerConnection] = []
        """The newcomers, in the order in which they have come."""
        self._said: dict[int, Message] = {}
        """By descriptor: what a newcomer has said last."""
        self._pid = os.getpid()
        _doors.add(self)

    def wait(
        self, wanted: int, wait_s: float, look: Callable[[], None], *, is_limit: bool = False
    ) -> None:
        """Wait until so many newcomers are here, for `wait_s` at most.

        Others that are about to introduce themselves are waited for, unless `wanted` is the limit.
        `look` raises if the wait is in vain.
        """
        start = before = time.monotonic()
        enough_at: float | None = None
        while True:
            look()
            are_coming = self._arrivals.are_coming(0.0, _INTRODUCING_S)
            self._serve(SLICE_S if wait_s or are_coming else 0.0)
            now = time.monotonic()
            are_coming = self._arrivals.are_coming(now - before, _INTRODUCING_S)
            before = now
            has_enough = len(self._waiting) >= wanted
            if not has_enough and now - start < wait_s:
                continue
            enough_at = now if enough_at is None else enough_at
            is_over = not are_coming or now - enough_at > _INTRODUCING_S
            if is_over or (is_limit and has_enough):
                return

    def ask(self, most: int, look: Callable[[], None]) -> list[PeerConnection]:
        """Return the newcomers that answer, in the order in which they have come."""
        asked = self._waiting[: max(most, 0)]
        self.tell(asked, {"ask": True})
        answered = self.hear(asked, "here", ANSWERING_S, look)
        for each in asked:
            if each not in answered:  # stopped: it calls again when it goes on
                self._let_go(each)
        return answered

    def hear(
        self,
        newcomers: Sequence[PeerConnection],
        word: str,
        limit_s: float,
        look: Callable[[], None],
    ) -> list[PeerConnection]:
        """Wait until all of them have said a word or are gone; return who has said it."""
        stop = time.monotonic() + limit_s
        while True:
            here = [each for each in newcomers if each in self._waiting]
            answered = [each for each in here if word in self._said.get(each.fileno(), {})]
            if len(answered) == len(here) or time.monotonic() > stop:
                return answered
            look()
            self._serve(SLICE_S)

    def gone(self, newcomers: Sequence[PeerConnection]) -> list[int]:
        """Return, without waiting, the places in the sequence of newcomers that are gone."""
        self._serve(0.0)
        return [place for place, each in enumerate(newcomers) if each not in self._waiting]

    def tell(self, newcomers: Sequence[PeerConnection], message: Message) -> None:
        """Send newcomers a message; those that are gone, or read nothing, are forgotten."""
        data = frames.encode(message)
        stop = time.monotonic() + _TELLING_S
        for each in newcomers:
            self._said.pop(each.fileno(), None)
            try:
                each.send(data)
                while each.is_sending and time.monotonic() < stop:
                    poll_once(each, each.events)
                    each.flush()
            except (OSError, AuthenticationError):
                self._let_go(each)
            else:
                if each.is_sending:
                    self._let_go(each)

    def dismiss(self, newcomers: Sequence[PeerConnection], message: Message) -> None:
        """Send newcomers the last message for them, by which they are ranks, or are not."""
        self.tell(newcomers, message)
        for each in newcomers:
            self._let_go(each)

    def close(self) -> None:
        """Send everybody away, and release everything. It may be called twice."""
        self._arrivals.close(frames.encode({"again": True}))
        self.dismiss(list(self._waiting), {"out": True})
        self.withdraw()

    def withdraw(self) -> None:
        """Remove what says where the door is; nothing in a forked child, whose parent keeps it."""
        if os.getpid() == self._pid:
            self.endpoint.close()

    def drop(self) -> None:
        """In a forked child: close what belongs to its parent, which nobody could reach else."""
        self._arrivals.drop()
        for each in self._waiting:
            each.close()
        self._waiting = []

    def _let_go(self, newcomer: PeerConnection) -> None:
        if newcomer in self._waiting:
            self._waiting.remove(newcomer)
            self._said.pop(newcomer.fileno(), None)
            newcomer.close()

    def _serve(self, wait_s: float) -> None:
        """Wait a moment for newcomers, and take what they say."""
        poll = select.poll()
        self._arrivals.register(poll)
        for each in self._waiting:
            poll.register(each, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(1000 * wait_s)}
        for each in list(self._waiting):
            if each.fileno() in ready:
                self._hear(each)
        for introduced in self._arrivals.serve(ready):
            self._take_in(introduced)

    def _hear(self, newcomer: PeerConnection) -> None:
        try:
            received = newcomer.receive()
        except (OSError, BadMessageError, AuthenticationError):
            self._let_go(newcomer)
        else:
            if received is not None:
                self._said[newcomer.fileno()] = received[0]

    def _take_in(self, guest: Introduced) -> None:
        said: object = guest.introduction.get("same")
        same = said if isinstance(said, dict) else {}
        wrong = ""
        for name, ours in self._same.items():
            if not wrong and (theirs := same.get(name)) != ours:
                wrong = f"does not belong here: {name} is {str(theirs)[:100]}, and {ours} on rank 0"
        if wrong:
            self._arrivals.refuse(guest, wrong)
        else:
            self._waiting.append(guest.connection)


_doors: weakref.WeakSet[Door] = weakref.WeakSet()


def _withdraw_all() -> None:
    # A program that closes no communicator would leave a file with the secret.
    for door in list(_doors):
        door.withdraw()


atexit.register(_withdraw_all)


def _after_fork() -> None:
    # A child that outlives the door would keep its address taken.
    for door in list(_doors):
        door.drop()


os.register_at_fork(after_in_child=_after_fork)
