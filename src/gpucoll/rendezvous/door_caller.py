"""A newcomer's side of the door at which it waits to become a rank (`gpucoll.rendezvous.door`)."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator
from typing import Final

from gpucoll.errors import (
    AuthenticationError,
    GpucollError,
    RendezvousDeadlineError,
    RendezvousError,
)
from gpucoll.rendezvous import frames
from gpucoll.rendezvous.door_place import DoorPlace
from gpucoll.rendezvous.endpoint import PeerConnection, TurnedAwayError
from gpucoll.rendezvous.frames import INTRODUCTION_BYTES, BadMessageError, Message
from gpucoll.rendezvous.held_signals import HeldSignals
from gpucoll.rendezvous.meeting import SLICE_S, poll_once
from gpucoll.rendezvous.meeting_points import TcpPoint
from gpucoll.transport.tcp.credentials import Credentials

_RETRY_S: Final = 0.005, 0.1
_NEWER_S: Final = 1.0
"""How often a newcomer that waits looks for the door of another rank 0."""
_MOST_TURNED_AWAY: Final = 5
_TURNED_AWAY_S: Final = 10.0
"""How long a known port must turn a newcomer away, too, before this counts as the door's answer:
ranks that are still in `init` there do the same."""


class Caller:
    """A newcomer's side: it calls at the door until rank 0 answers.

    Parameters
    ----------
    place : DoorPlace
        Where the door is.
    same : dict
        See `gpucoll.rendezvous.door.Door`.
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
            try:
                is_ready = poll_once(self._connection, select.POLLIN, 0.0)
                received = self._connection.receive() if is_ready else None
            except (OSError, BadMessageError, AuthenticationError):
                self._news = {"lost": True}
            else:
                self._news = None if received is None else received[0]
        return self._news is not None

    def pause(self) -> None:
        """Wait a moment; raise an interrupt that has come."""
        time.sleep(SLICE_S)
        self._signals.check()

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
            poll_once(connection, connection.events)
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
            poll_once(connection, select.POLLIN)

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
