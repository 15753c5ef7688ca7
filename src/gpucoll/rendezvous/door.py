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
import contextlib
import copy
import os
import select
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from gpucoll import config
from gpucoll.errors import (
    AuthenticationError,
    GpucollError,
    RendezvousDeadlineError,
    RendezvousError,
)
from gpucoll.rendezvous import frames
from gpucoll.rendezvous.arrivals import Arrivals, Introduced
from gpucoll.rendezvous.endpoint import Endpoint, PeerConnection, TurnedAwayError
from gpucoll.rendezvous.frames import INTRODUCTION_BYTES, BadMessageError, Message
from gpucoll.rendezvous.held_signals import HeldSignals
from gpucoll.rendezvous.job import checked_name, launchers_job
from gpucoll.rendezvous.meeting import SLICE_S
from gpucoll.rendezvous.meeting_points import MeetingPoint, TcpPoint
from gpucoll.rendezvous.unix_door import UnixDoor
from gpucoll.transport.tcp.credentials import Credentials

ANSWERING_S: Final = 1.0
"""How long a newcomer may take to say that it is there; a stopped one does not."""
_INTRODUCING_S: Final = 0.5
"""How long `Door.wait` waits for each newcomer that has connected and not introduced itself."""
_TELLING_S: Final = 0.2
"""How long newcomers may leave a message unread that their connections have no room for."""
ENTERING_S: Final = _INTRODUCING_S + ANSWERING_S + _TELLING_S + 0.5
"""How long the door may keep rank 0 beyond the time for which it waits for newcomers."""
_RETRY_S: Final = 0.005, 0.1
_NEWER_S: Final = 1.0
"""How often a newcomer that waits looks for the door of another rank 0."""
_MOST_TURNED_AWAY: Final = 5
_TURNED_AWAY_S: Final = 10.0
"""How long a known port must turn a newcomer away, too, before this counts as the door's answer:
ranks that are still in `init` there do the same."""


class DoorPlace(NamedTuple):
    """Where a communicator's door is; the same on its ranks and on newcomers.

    Attributes
    ----------
    point : MeetingPoint or None
        How ranks on several hosts find it; None: all ranks, newcomers too, are on one host.
    token : str
        On one host: the word by which newcomers find it.
    title : str
        What tells it apart from all other meetings of the job.
    """

    point: MeetingPoint | None
    token: str
    title: str

    @property
    def text(self) -> str:
        """The place, for messages."""
        return "this host" if self.point is None else self.point.text

    @property
    def key(self) -> tuple[str, str, str]:
        """What two places have in common if they are one."""
        return self.text, self.token, self.title

    def endpoint(self, who: str, number: int = 0) -> Endpoint:
        """Return the endpoint at which rank 0 listens, and newcomers call.

        `number` is higher for each rank 0 that follows another one.
        """
        if self.point is None:
            return UnixDoor(self.token, self.title, number)
        from gpucoll.rendezvous.meeting_store import given_secret
        from gpucoll.rendezvous.tcp import TcpEndpoint

        return TcpEndpoint(self.point, given_secret(self.point), self.title, who)

    def newest(self) -> object:
        """Return what tells the newest door here from earlier ones; None: nothing does."""
        if self.point is None:
            return UnixDoor(self.token, self.title).newest()
        from gpucoll.rendezvous.meeting_points import SharedPoint

        # A copy: what it finds is of no concern to the connection that is there.
        return copy.copy(self.point).find() if isinstance(self.point, SharedPoint) else None

    def credentials(self, who: str) -> Credentials:
        """Return, on a rank that does not keep the door, by what its job authenticates itself."""
        from gpucoll.rendezvous.tcp import TcpEndpoint

        assert self.point is not None
        if self.point.find() is None:
            raise RendezvousError(
                f"{who} cannot read the meeting point {self.text} that rank 0 has written. "
                f"{self.point.trouble}"
            )
        endpoint = self.endpoint(who)
        assert isinstance(endpoint, TcpEndpoint)
        return endpoint.credentials


def find_door(meet: object, name: str | None) -> DoorPlace:
    """Return where a communicator's newcomers wait.

    Parameters
    ----------
    meet : str, store or None
        As for `gpucoll.init`. Default: ``GPUCOLL_MEET``, or the launcher's.
    name : str, optional
        Tells the communicator apart from others of the job that grow at the same place.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        One of them is invalid.
    RendezvousError
        Nothing says where.
    """
    name = checked_name(name)
    title = f"grow {name}" if name else "grow"
    word = f"grow-{name}" if name else "grow"
    where = "meet" if meet is not None else config.MEET
    if (given := meet if meet is not None else config.variable(config.MEET) or None) is not None:
        from gpucoll.rendezvous.meet_argument import parse_meet

        return DoorPlace(parse_meet(given, word, where), "", title)
    token, point = launchers_job(word)
    if point is not None or token:
        return DoorPlace(point, f"{token}\0{title}", title)
    raise RendezvousError(
        'nothing says where newcomers wait: give grow and join the same meet="tcp://HOST:PORT" of '
        f'rank 0\'s host, or meet="file:///PATH"; or, on one host, set {config.JOB} to the same '
        "word in all these processes"
    )


class Waiting(NamedTuple):
    """A newcomer at the door."""

    connection: PeerConnection
    introduction: Message


class Door:
    """Rank 0's side.

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
        self._waiting: list[Waiting] = []
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

    def ask(self, most: int, look: Callable[[], None]) -> list[Waiting]:
        """Return the newcomers that answer, in the order in which they have come."""
        asked = self._waiting[: max(most, 0)]
        self.tell(asked, {"ask": True})
        answered = self.hear(asked, "here", ANSWERING_S, look)
        for each in asked:
            if each not in answered:  # stopped: it calls again when it goes on
                self._let_go(each)
        return answered

    def hear(
        self, newcomers: Sequence[Waiting], word: str, limit_s: float, look: Callable[[], None]
    ) -> list[Waiting]:
        """Wait until all of them have said a word or are gone; return who has said it."""
        stop = time.monotonic() + limit_s
        while True:
            here = [each for each in newcomers if each in self._waiting]
            answered = [each for each in here if word in self._said.get(_fd(each), {})]
            if len(answered) == len(here) or time.monotonic() > stop:
                return answered
            look()
            self._serve(SLICE_S)

    def gone(self, newcomers: Sequence[Waiting]) -> list[int]:
        """Return, without waiting, the places in the sequence of newcomers that are gone."""
        self._serve(0.0)
        return [place for place, each in enumerate(newcomers) if each not in self._waiting]

    def tell(self, newcomers: Sequence[Waiting], message: Message) -> None:
        """Send newcomers a message; those that are gone, or read nothing, are forgotten."""
        data = frames.encode(message)
        stop = time.monotonic() + _TELLING_S
        for each in newcomers:
            self._said.pop(_fd(each), None)
            try:
                each.connection.send(data)
                while each.connection.is_sending and time.monotonic() < stop:
                    _poll(each.connection, each.connection.events)
                    each.connection.flush()
            except (OSError, AuthenticationError):
                self._let_go(each)
            else:
                if each.connection.is_sending:
                    self._let_go(each)

    def dismiss(self, newcomers: Sequence[Waiting], message: Message) -> None:
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
            each.connection.close()
        self._waiting = []

    def _let_go(self, newcomer: Waiting) -> None:
        if newcomer in self._waiting:
            self._waiting.remove(newcomer)
            self._said.pop(_fd(newcomer), None)
            newcomer.connection.close()

    def _serve(self, wait_s: float) -> None:
        """Wait a moment for newcomers, and take what they say."""
        poll = select.poll()
        self._arrivals.register(poll)
        for each in self._waiting:
            poll.register(each.connection, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(1000 * wait_s)}
        for each in list(self._waiting):
            if each.connection.fileno() in ready:
                self._hear(each)
        for introduced in self._arrivals.serve(ready):
            self._take_in(introduced)

    def _hear(self, newcomer: Waiting) -> None:
        try:
            received = newcomer.connection.receive()
        except (OSError, BadMessageError, AuthenticationError):
            self._let_go(newcomer)
        else:
            if received is not None:
                self._said[_fd(newcomer)] = received[0]

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
            self._waiting.append(Waiting(guest.connection, guest.introduction))


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


class Caller:
    """A newcomer's side: it calls at the door until rank 0 answers.

    Parameters
    ----------
    place : DoorPlace
        Where the door is.
    same : dict
        See `Door`.
    timeout_s : float
        How long to call and to wait.
    signals : HeldSignals
        Interrupts, which are raised between two waits.
    """

    def __init__(
        self, place: DoorPlace, same: Message, timeout_s: float, signals: HeldSignals
    ) -> None:
        self._place, self._signals = place, signals
        self._endpoint = place.endpoint("a process that joins")
        self._introduction = frames.encode({"pid": os.getpid(), "same": same})
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self.last_failure = ""
        """Why the last meeting failed, for the error at the deadline."""
        self._connection: PeerConnection | None = None
        self._turned_away = 0
        self._turned_away_at, self._why_turned_away = 0.0, ""
        self._has_called = False
        self._where: object = None
        self._look_at = 0.0
        self._news: Message | None = None
        """A message that came while this process did something else."""

    def next_message(self) -> Message:
        """Return rank 0's next message; call again first if the door was closed.

        ``{"lost": True}``: rank 0 is gone, or has closed the door.

        Raises
        ------
        RendezvousDeadlineError
            Nobody has let this process in in time.
        RendezvousError, AuthenticationError
            Rank 0 has turned this process away.
        """
        while True:
            try:
                if self._connection is None:
                    self._call()
                message, self._news = self._news or self._receive(), None
            except TurnedAwayError as error:
                self.hang_up()
                self._take_refusal(str(error))
            except GpucollError:  # a deadline is an OSError, too
                raise
            except (OSError, BadMessageError):
                self.hang_up()
                return {"lost": True}
            else:
                if "error" in message:
                    raise RendezvousError(
                        f"rank 0 at {self._place.text} did not let this process join: "
                        f"{message['error']}"
                    )
                if "again" not in message and "lost" not in message:
                    return message
                self.hang_up()
                return {"lost": True}

    def _take_refusal(self, text: str) -> None:
        """Raise if this process is turned away for too long: it may have met another meeting."""
        now = time.monotonic()
        self._turned_away_at = self._turned_away_at if self._turned_away else now
        self._turned_away += 1
        self._why_turned_away = text
        others_s = _TURNED_AWAY_S if isinstance(self._place.point, TcpPoint) else 0.0
        if self._turned_away >= _MOST_TURNED_AWAY and now - self._turned_away_at >= others_s:
            raise self._turned_away_error()

    def _turned_away_error(self) -> AuthenticationError:
        return AuthenticationError(
            f"a process in join was turned away at {self._place.text}: rank 0 "
            f"{self._why_turned_away}. Or the ranks are still in init there"
        )

    def has_news(self) -> bool:
        """Return, without waiting, whether rank 0 says something, or is gone."""
        if self._news is None and self._connection is not None:
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            if poll.poll(0):
                try:
                    received = self._connection.receive()
                except (OSError, BadMessageError, AuthenticationError):
                    self._news = {"lost": True}
                else:
                    self._news = None if received is None else received[0]
        return self._news is not None

    def say(self, message: Message) -> None:
        """Send rank 0 a message; if it is gone, `next_message` finds that out."""
        if self._connection is not None:
            with contextlib.suppress(ConnectionError, AuthenticationError):
                self._send(self._connection, frames.encode(message))

    def credentials(self) -> Credentials:
        """Return by what the job's ranks on several hosts authenticate each other."""
        from gpucoll.rendezvous.tcp import TcpEndpoint

        assert isinstance(self._endpoint, TcpEndpoint)
        return self._endpoint.credentials

    def hang_up(self) -> None:
        """Close the connection; the next message takes a new one."""
        self._news = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Release everything."""
        self.hang_up()
        self._endpoint.close()

    def _call(self) -> None:
        pause_s, longest_s = _RETRY_S
        if self._has_called:  # a door that closes at once must not keep this process busy
            self._look(f"{self._place.text} was closed to it again and again")
            time.sleep(longest_s)
        self._has_called = True
        while (connection := self._endpoint.connect(INTRODUCTION_BYTES, 0)) is None:
            trouble = self._endpoint.trouble().rstrip(".")
            self._look(f"nobody let it in at {self._place.text}{trouble and '.'}{trouble}")
            time.sleep(pause_s)  # nothing announces that an address appears
            pause_s = min(2 * pause_s, longest_s)
        self._connection = connection
        self._where, self._look_at = self._place.newest(), time.monotonic() + _NEWER_S
        self._send(connection, self._introduction)

    def _send(self, connection: PeerConnection, data: bytes) -> None:
        with _naming(connection):
            connection.send(data)
        while connection.is_sending:
            self._look(f"rank 0 at {self._place.text} did not answer it")
            _poll(connection, connection.events)
            with _naming(connection):
                connection.flush()

    def _receive(self) -> Message:
        connection = self._connection
        assert connection is not None
        while True:
            with _naming(connection):
                received = connection.receive()
            if received is not None:
                self._turned_away = 0
                return received[0]
            self._look(f"rank 0 at {self._place.text} has not let it in")
            _poll(connection, select.POLLIN)

    def _look_for_newer(self) -> None:
        """Raise ConnectionError if another rank 0 keeps a door now: the first one is stopped."""
        if self._connection is None or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _NEWER_S
        if (where := self._place.newest()) is not None and where != self._where:
            raise ConnectionError("another rank 0 keeps the door")

    def _look(self, what: str) -> None:
        self._signals.check()
        self._look_for_newer()
        if time.monotonic() > self._deadline:
            if self._turned_away:
                raise self._turned_away_error()
            last = f"The last meeting failed: {self.last_failure}. " if self.last_failure else ""
            raise RendezvousDeadlineError(
                f"a process waited {self._timeout_s:g} s in join: {what}. {last}Do the ranks call "
                "grow, with the same meet and name, and with a large enough at_most?"
            )


@contextlib.contextmanager
def _naming(connection: PeerConnection) -> Iterator[None]:
    """Name the other end in errors that speak of it."""
    try:
        yield
    except TurnedAwayError:
        raise
    except AuthenticationError as error:
        raise AuthenticationError(f"a process in join: {connection.peer} {error}") from None


def _fd(newcomer: Waiting) -> int:
    return newcomer.connection.fileno()


def _poll(connection: PeerConnection, events: int) -> None:
    poll = select.poll()
    poll.register(connection, events)
    poll.poll(1000 * SLICE_S)
