"""The loop of a rank: it makes the calls that its owner requests."""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

TRACE_SIGNAL = signal.SIGRTMAX
"""The signal that makes a rank write a traceback of each thread; tests must not use it."""


@dataclass(frozen=True)
class Request:
    """A call to make: ``function(rank, *args)``."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Reply:
    """The outcome of a call."""

    result: Any = None
    error: BaseException | None = None
    trace: str = ""


class RankLoop:
    """Serves one rank's calls.

    Attributes
    ----------
    rank : int
        The rank's number in its pool.
    world_size : int
        The number of ranks that were forked together with this one.
    token : str
        A token that these ranks share.
    session : Any
        State that a call leaves for later calls.
    """

    session: Any = None

    def __init__(self, link: socket.socket, rank: int, world_size: int, token: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.token = token
        _, descriptors, _, _ = socket.recv_fds(link, 1, 3)
        os.dup2(descriptors[0], 1)
        os.dup2(descriptors[1], 2)
        os.close(descriptors[0])
        os.close(descriptors[1])
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # Buffer by lines, even under python -u: a crash loses no line, and lines of ranks
                # do not mix.
                stream.reconfigure(line_buffering=True, write_through=False)
        self._trace = descriptors[2]
        self._connection = Connection(link.detach())
        self.watch()

    def watch(self) -> None:
        """Make crashes, and tracebacks on request, go to a file that outlives the rank."""
        faulthandler.enable(self._trace)
        faulthandler.register(TRACE_SIGNAL, self._trace)

    def serve(self) -> None:
        """Answer requests until the other end closes the connection."""
        while True:
            try:
                data = self._connection.recv_bytes()
            except (EOFError, ConnectionResetError):
                return
            self.tell(self._answer(data))

    def tell(self, reply: Reply) -> None:
        """Send a reply, unless the owner is gone."""
        try:
            data = cloudpickle.dumps(reply)
        except Exception:  # a result or error that cannot be pickled: send its text
            data = pickle.dumps(Reply(error=RuntimeError(traceback.format_exc())))
        try:
            self._connection.send_bytes(data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def _answer(self, data: bytes) -> Reply:
        try:
            request: Request = cloudpickle.loads(data)
            return Reply(request.function(self, *request.args))
        except SystemExit:
            raise
        except BaseException as error:
            return Reply(error=error, trace=traceback.format_exc())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
