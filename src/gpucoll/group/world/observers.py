"""Answers observers: `gpucoll why` on one host learns from that host's leader how the others stand.

A leader listens at an abstract Unix socket. The kernel certifies who connects there: only the same
user, or root, gets an answer. The leader asks the other leaders over the links, each of them starts
`gpucoll why --json` for its own host, and sends back what that prints. The links' thread does all
of it and waits for nothing. While nobody asks, it costs one descriptor.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from gpucoll import config
from gpucoll.group.world.messages import Kind, Message
from gpucoll.rendezvous import frames
from gpucoll.rendezvous.notices import address

CHILD_S = 4.0
"""How long `gpucoll why` may take on another host; 0.5 s on an idle one."""
ANSWERING_S = 5.0
"""How long an observer gets answers."""
MOST_TEXT_BYTES: Final = 8 << 20
MOST_SENT_BYTES: Final = 256 << 10
"""The largest answer over a link: compressed, it has room for some thousand ranks."""
_MOST_OBSERVERS: Final = 4
_MOST_ASKERS: Final = 64
_PAUSE_S: Final = 0.1
"""How long a leader accepts nobody after it could not, or would not, serve somebody."""
_STRANGER: Final = -1
_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred: process, user, group
_PROGRAM: Final = """\
import sys
sys.path = [folder for folder in sys.path if folder]  # no modules from the job's folder
from gpucoll.__main__ import main
sys.exit(main())
"""
_KEPT: Final = (
    *("PATH", "HOME", "USER", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    *("PYTHONPATH", "PYTHONHOME", config.CACHE_DIR),
)
"""The variables that the child inherits: not those that make a process a rank."""


def observers_address(group: str, leader: int) -> bytes:
    """Return the abstract address at which a host's leader, a process, listens for observers."""
    return address(f"{group}/observers/{leader}")


def user_of(end: socket.socket) -> int:
    """Return the user of the process at the other end; -1: this user namespace has none such."""
    raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    return int(user) if frames.is_known(process, user) else _STRANGER


class _Child:
    """A running `gpucoll why --json` on this host's ranks."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.due_s = time.monotonic() + CHILD_S
        self.fd, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.set_blocking(writing, True)
            command = [sys.executable, "-c", _PROGRAM, "why", "--json", "--local"]
            kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
            self.pid = os.posix_spawn(
                sys.executable,
                [*command, str(os.getpid())],
                kept,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, writing, 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setsigmask=(),
                setsigdef=(signal.SIGINT, signal.SIGTERM, signal.SIGPIPE),
            )
        except BaseException:
            os.close(self.fd)
            raise
        finally:
            os.close(writing)

    def read(self) -> bool:
        """Read what it has printed; return whether that is all."""
        while True:
            try:
                part = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return False
            self.data += part
            if not part or len(self.data) > MOST_TEXT_BYTES:
                return True

    def end(self) -> None:
        """End it, if it still runs, without waiting."""
        os.close(self.fd)
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)


class Observers:
    """The observers of one leader, and the other leaders' questions to it.

    Only the links' thread calls its methods, except for `hear` and `close`.

    Parameters
    ----------
    group : str
        What observers know the group by.
    here : int
        This host's number.
    names : sequence of str
        The hosts' names.
    ranks : sequence of sequence of int
        Their ranks.
    tell_all : callable
        `Links.tell_all`.
    """

    def __init__(
        self,
        group: str,
        here: int,
        names: Sequence[str],
        ranks: Sequence[Sequence[int]],
        tell_all: Callable[[Kind, dict[str, Any], bytes], None],
    ) -> None:
        self._here, self._names, self._ranks = here, names, ranks
        self._tell_all = tell_all
        self._inbox: deque[Message] = deque()
        self._asking: dict[int, frames.Connection] = {}
        """By number of the question: this host's observers."""
        self._due_s: dict[int, float] = {}
        self._awaited: dict[int, set[int]] = {}
        """By number of the question: the hosts that have not answered."""
        self._n_asked = 0
        self._askers: list[tuple[int, int]] = []
        """The other hosts' questions, and their numbers there."""
        self._child: _Child | None = None
        self._ended: list[int] = []
        """Children that have ended or are about to."""
        self._process = os.getpid()
        self._accepts_from_s = 0.0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind(observers_address(group, self._process))
            self._listener.listen(_MOST_OBSERVERS)
        except OSError:  # taken by a stranger: nobody can ask
            self._listener.close()

    def events(self) -> Iterator[tuple[int, int]]:
        """Yield the descriptors to poll, and for which events."""
        if self._listener.fileno() >= 0 and not self._pauses:
            yield self._listener.fileno(), select.POLLIN
        for end in self._asking.values():
            yield end.fileno(), select.POLLIN | (select.POLLOUT if end.is_sending else 0)
        if self._child is not None:
            yield self._child.fd, select.POLLIN

    @property
    def rest_s(self) -> float | None:
        """After how many seconds `work` is due although nothing comes; None: never."""
        due_s = [*self._due_s.values(), *([self._child.due_s] if self._child else [])]
        if self._pauses:
            due_s.append(self._accepts_from_s)
        left_s = [max(each - time.monotonic(), 0) for each in due_s]
        return min([*left_s, *([0.05] if self._ended else [])], default=None)

    def hear(self, message: Message) -> None:
        """Note a message of another leader, in any thread; `work` handles it."""
        self._inbox.append(message)

    def work(self) -> None:
        """Do all that can be done without waiting."""
        self._accept()
        while self._inbox:
            message = self._inbox.popleft()
            if message.kind == Kind.LOOK:
                self._be_asked(int(message.facts["asker"]), int(message.facts["asked"]))
            elif int(message.facts["asker"]) == self._here:
                self._hand_over(message)
        self._attend_child()
        for asked, end in list(self._asking.items()):
            self._attend(asked, end)
        self._ended = [pid for pid in self._ended if not _is_reaped(pid)]

    # --- this host's observers --------------------------------------------------------------------

    @property
    def _pauses(self) -> bool:
        """Whether nobody is accepted now. Else strangers could keep the links' thread busy."""
        return time.monotonic() < self._accepts_from_s

    def _accept(self) -> None:
        if self._listener.fileno() < 0 or self._pauses:
            return
        try:
            end, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # nobody, or gone again
            return
        except OSError:  # no descriptor: the socket would stay readable
            self._accepts_from_s = time.monotonic() + _PAUSE_S
            return
        if user_of(end) not in (0, os.geteuid()) or len(self._asking) >= _MOST_OBSERVERS:
            end.close()
            self._accepts_from_s = time.monotonic() + _PAUSE_S
            return
        self._n_asked += 1
        asked = self._n_asked
        self._asking[asked] = frames.Connection(end, 1024, 0)
        self._due_s[asked] = time.monotonic() + ANSWERING_S
        self._awaited[asked] = {*range(len(self._names))} - {self._here}
        hosts = [
            {"name": name, "ranks": [*ranks]}
            for name, ranks in zip(self._names, self._ranks, strict=True)
        ]
        self._send(asked, {"hosts": hosts, "here": self._here})
        self._tell_all(Kind.LOOK, {"asker": self._here, "asked": asked}, b"")

    def _hand_over(self, message: Message) -> None:
        """Hand another host's answer to the observer that has asked."""
        import zlib

        asked, host = int(message.facts["asked"]), int(message.facts["host"])
        if host not in self._awaited.get(asked, ()):
            return
        self._awaited[asked].discard(host)
        try:
            text = zlib.decompressobj().decompress(message.data, MOST_TEXT_BYTES).decode()
        except (zlib.error, UnicodeDecodeError):
            text = ""
        self._send(asked, {"host": host, "text": text})

    def _send(self, asked: int, facts: frames.Message) -> None:
        try:
            self._asking[asked].send(frames.encode(facts))
        except OSError:
            self._drop(asked)

    def _attend(self, asked: int, end: frames.Connection) -> None:
        """Send what an observer still has to get; drop it if it is gone or has everything."""
        try:
            end.flush()
            while end.receive() is not None:
                pass
        except (OSError, frames.BadMessageError):
            self._drop(asked)
            return
        is_done = not self._awaited[asked] and not end.is_sending
        if is_done or time.monotonic() >= self._due_s[asked]:
            self._drop(asked)

    def _drop(self, asked: int) -> None:
        if (end := self._asking.pop(asked, None)) is not None:
            end.close()
        self._due_s.pop(asked, None)
        self._awaited.pop(asked, None)

    # --- other hosts' questions -------------------------------------------------------------------

    def _be_asked(self, asker: int, asked: int) -> None:
        if len(self._askers) < _MOST_ASKERS:
            self._askers.append((asker, asked))
        if self._child is None:
            try:
                self._child = _Child()
            except (OSError, TypeError, ValueError):  # no memory, or no interpreter to start
                self._answer(b"")

    def _attend_child(self) -> None:
        child = self._child
        if child is None:
            return
        is_complete = child.read()
        if is_complete or time.monotonic() >= child.due_s:
            self._child = None
            child.end()
            self._ended.append(child.pid)
            self._answer(bytes(child.data) if is_complete else b"")

    def _answer(self, text: bytes) -> None:
        """Send what the child has printed to all that have asked; empty: it has failed."""
        import zlib

        data = zlib.compress(text, 1)
        if max(len(text), len(data) * MOST_TEXT_BYTES // MOST_SENT_BYTES) > MOST_TEXT_BYTES:
            data = zlib.compress(b"")
        askers, self._askers = self._askers, []
        for asker, asked in askers:
            facts = {"asker": asker, "asked": asked, "host": self._here}
            self._tell_all(Kind.SEEN, facts, data)

    def close(self) -> None:
        """Release everything; in a forked process, only what it has inherited."""
        self._listener.close()
        for asked in list(self._asking):
            self._drop(asked)
        if self._child is not None:
            child, self._child = self._child, None
            if os.getpid() != self._process:
                os.close(child.fd)
                return
            child.end()
            self._ended.append(child.pid)
        if os.getpid() == self._process:
            stop = time.monotonic() + 0.5  # one that was killed ends within a moment
            while self._ended and time.monotonic() < stop:
                self._ended = [pid for pid in self._ended if not _is_reaped(pid)]
                time.sleep(0.001)


def _is_reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except OSError:  # the program has waited for it
        return True
