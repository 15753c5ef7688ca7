"""Where a communicator's door is, for rank 0 and for newcomers (`gpucoll.rendezvous.door`)."""

from __future__ import annotations

import copy
from typing import NamedTuple

from gpucoll import config
from gpucoll.errors import RendezvousError
from gpucoll.rendezvous.endpoint import Endpoint
from gpucoll.rendezvous.job import checked_name, launchers_job
from gpucoll.rendezvous.meeting_points import MeetingPoint, SharedPoint
from gpucoll.rendezvous.unix_door import UnixDoor
from gpucoll.transport.tcp.credentials import Credentials


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
