"""Learn from the launcher which ranks ended before all ranks had met.

The launcher listens at an abstract socket that is named after the job's token. To each connection
it sends a line of JSON for each rank that has ended, and for each that ends later.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Collection

from gpucoll.errors import AuthenticationError
from gpucoll.rendezvous.frames import peer_process
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.meeting import Watch
from gpucoll.rendezvous.notices import notices_address

_MOST_BYTES = 1 << 20


class LauncherWatch(Watch):
    """Watches a meeting with the launcher's notices of ended ranks.

    Parameters
    ----------
    meeting : Job
        The job whose ranks meet.
    token : str
        The job's token, as the launcher set it.
    """

    def __init__(self, meeting: Job, token: str) -> None:
        super().__init__(meeting.rank, meeting.world_size)
        self._token = token
        self._connection: socket.socket | None = None
        self._has_asked = False
        self._data = b""
        self._ended: dict[int, str] = {}

    def check(self, awaited: Collection[int]) -> tuple[int, str] | None:
        """Return an awaited rank that has ended."""
        if not self._has_asked:
            self._has_asked = True
            self._connect()
        self._read()
        for rank in (rank for rank in self._ended if rank in awaited):  # the first that ended
            return rank, f"it {self._ended[rank]} without having come"
        return None

    def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect(notices_address(self._token))
            peer_process(connection)
        except (OSError, AuthenticationError):  # without notices, the deadline ends the meeting
            connection.close()
        else:
            self._connection = connection

    def _read(self) -> None:
        while self._connection is not None:
            try:
                part = self._connection.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                part = b""
            if not part or len(self._data) > _MOST_BYTES:
                self.close()
                return
            *lines, self._data = (self._data + part).split(b"\n")
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            rank, manner = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            return
        if type(rank) is int and isinstance(manner, str):
            self._ended[rank] = manner

    def close(self) -> None:
        """Close the connection to the launcher."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
