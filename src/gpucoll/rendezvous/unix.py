"""The ranks of one host meet at an abstract Unix socket: no file, no port, no secret.

The kernel certifies the other end's user (SO_PEERCRED), in both directions.
"""

from __future__ import annotations

import socket

from gpucoll.errors import AuthenticationError, RendezvousError
from gpucoll.rendezvous import frames
from gpucoll.rendezvous.frames import INTRODUCTION_BYTES, Connection
from gpucoll.rendezvous.job import HAVE_NAMES, Job
from gpucoll.rendezvous.notices import address

_BACKLOG = 4096  # large, so that strangers cannot keep ranks out; the kernel may reduce it


class UnixEndpoint:
    """The abstract socket that is named after a job's token.

    Parameters
    ----------
    job : Job
        The job whose ranks meet.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._address = address(job.token)

    def listen(self, who: str) -> socket.socket:
        """Return rank 0's listening socket."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self._address)
        except OSError as error:
            listener.close()
            raise RendezvousError(
                f"{who} cannot take the job's socket: {error.strerror}{self._holder()}. Is "
                f"another job running with the same token ({self._job.origin})? If only some ranks "
                f"of one job meet, {HAVE_NAMES}"
            ) from error
        listener.listen(_BACKLOG)
        return listener

    def accept(self, end: socket.socket, n_fds: int) -> Connection:
        """Return the connection of a process, which must be this user's."""
        process = frames.peer_process(end)
        peer = f"process {process}" if process else ""
        return Connection(end, INTRODUCTION_BYTES, n_fds, peer)

    def connect(self, most_bytes: int, most_fds: int) -> Connection | None:
        """Return a connection to rank 0."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            end.connect(self._address)
            peer = f"process {frames.peer_process(end)}"
            return Connection(end, most_bytes, most_fds, peer)
        except (ConnectionRefusedError, BlockingIOError):
            end.close()
            return None
        except BaseException:
            end.close()
            raise

    def trouble(self) -> str:
        """Return nothing: the only trouble can be that the address does not exist yet."""
        return ""

    def close(self) -> None:
        """Do nothing: sockets belong to the code that received them."""

    def _holder(self) -> str:
        """Return which process has the job's socket, if it can be found out."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as asking:
            try:
                asking.connect(self._address)
                return f" by process {frames.peer_process(asking)}"
            except AuthenticationError as error:
                return f": {error}"
            except OSError:
                return ""
