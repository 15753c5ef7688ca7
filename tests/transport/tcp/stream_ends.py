"""Connected ends in one process, a thread for each, and what a schedule means, in plain Python."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from gpucoll.kernels.cpu.addresses import element_bytes, parts_per_element, reduce_kernel
from gpucoll.transport.tcp.secure_streams import SecureStreams
from gpucoll.transport.tcp.stream_words import MAGIC
from gpucoll.transport.tcp.streams import (
    Outcome,
    Reduction,
    Row,
    Streams,
    StreamStatus,
    deadline_after,
)

HEADER = (7, 3, -12345678901234567)
HEADER_SENT = np.array([MAGIC, *HEADER], "<i8").tobytes()
LIMIT_S = 30.0
SMALL = 4096
"""A small socket buffer: the kernel makes a few KiB of it."""


def socket_pair(kind: str, buffer_bytes: int = 0) -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that do not block: "unix", or "tcp" over the loopback."""
    if kind == "unix":
        pair = socket.socketpair()
    else:
        with socket.socket() as listener:
            if buffer_bytes:  # what is accepted inherits it
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            first = socket.create_connection(listener.getsockname())
            pair = first, listener.accept()[0]
    for one in pair:
        one.setblocking(False)
        if kind == "tcp":
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if buffer_bytes:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    return pair


def encrypted(
    pair: tuple[socket.socket, socket.socket], contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """Return two connected sockets with TLS over them; contexts of a server and a client."""
    server, client = (
        context.wrap_socket(one, server_side=place == 0, do_handshake_on_connect=False)
        for place, (one, context) in enumerate(zip(pair, contexts, strict=True))
    )
    deadline, open_ends = time.monotonic() + LIMIT_S, [client, server]
    while open_ends:
        assert time.monotonic() < deadline, "no handshake"
        for one in list(open_ends):
            try:
                one.do_handshake()
                open_ends.remove(one)
            except ssl.SSLWantReadError:
                pass
    return server, client


class Ends:
    """As many ends, each connected to every other; rows name peers by their rank."""

    def __init__(
        self,
        count: int,
        kind: str = "unix",
        buffer_bytes: int = 0,
        contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
        secure: bool = False,
    ) -> None:
        self.count = count
        self.sockets: list[dict[int, socket.socket]] = [{} for _ in range(count)]
        for first in range(count):
            for second in range(first):
                pair = socket_pair(kind, buffer_bytes)
                if contexts is not None:
                    pair = encrypted(pair, contexts)
                self.sockets[first][second], self.sockets[second][first] = pair
        ordered = [[held[peer] for peer in sorted(held)] for held in self.sockets]
        self.streams: list[Streams]
        if secure or contexts is not None:
            self.streams = [SecureStreams(links) for links in ordered]
        else:
            self.streams = [Streams([link.fileno() for link in links]) for links in ordered]

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        for held in self.sockets:
            for one in held.values():
                one.close()

    def link(self, rank: int, peer: int) -> int:
        return sorted(self.sockets[rank]).index(peer)

    def rows(self, rank: int, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """Return a table whose peers are links; all rows are of one section, without a gate."""
        table = np.array([[*row, 0, len(rows), 0][: Row.n_words] for row in rows], np.int64)
        table = table.reshape(-1, Row.n_words)
        for column in (Row.send_peer, Row.receive_peer):
            for row in table:
                if row[column] >= 0:
                    row[column] = self.link(rank, int(row[column]))
        return table

    def run_one(self, rank: int, rows, array: np.ndarray, **options) -> Outcome:
        options.setdefault("deadline_ns", deadline_after(LIMIT_S))
        options.setdefault("header", HEADER)
        table = self.rows(rank, rows)
        return self.streams[rank].run(table, array.ctypes.data, array.nbytes, **options)

    def run(self, rows, arrays, **options) -> list[Outcome | None]:
        """Run each end's rows over its array, all at the same time."""
        outcomes: list[Outcome | None] = [None] * self.count

        def run_one(rank: int) -> None:
            outcomes[rank] = self.run_one(rank, rows[rank], arrays[rank], **options)

        threads = [threading.Thread(target=run_one, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    def complete(self, rows, arrays, **options) -> None:
        options.setdefault("slice_ns", 2 * int(LIMIT_S * 1e9))  # so `poll` must wake by itself
        outcomes = self.run(rows, arrays, **options)
        assert outcomes == [Outcome(StreamStatus.DONE)] * self.count
        self.expect_silence()

    def expect_silence(self) -> None:
        """Nothing was sent that nobody has received."""
        for held in self.sockets:
            for one in held.values():
                try:
                    left = one.recv(1)
                except (BlockingIOError, ssl.SSLWantReadError):
                    continue
                raise AssertionError(f"{left!r} is left in a connection")


def reduction(dtype: str, operation: str = "sum") -> Reduction:
    parts = parts_per_element(dtype)
    size_bytes = element_bytes(dtype)
    return Reduction(reduce_kernel(dtype, operation), size_bytes, parts)


# --- what rows mean -----------------------------------------------------------------------------


def modelled(rows, arrays, combine=None) -> list[np.ndarray]:
    """Return what schedules make of arrays: step by step, with everything that is sent copied.

    ``combine(left, right)`` returns the bytes of two operands' combination.
    """
    memories = [array.view(np.uint8).reshape(-1).copy() for array in arrays]
    under_way: dict[tuple[int, int], deque[np.ndarray]] = {}
    ends = [
        _model_of_end(rank, rows[rank], memories, under_way, combine) for rank in range(len(rows))
    ]
    open_ends = set(range(len(rows)))
    while open_ends:
        moved = False
        for rank in sorted(open_ends):
            for came in ends[rank]:
                moved = moved or came
                if not came:
                    break
            else:
                open_ends.discard(rank)
                moved = True
        assert moved, "the model of a schedule does not end"
    return [memory.view(array.dtype) for memory, array in zip(memories, arrays, strict=True)]


def _model_of_end(rank, rows, memories, under_way, combine) -> Iterator[bool]:
    """Yield False where this end has to wait, True where it has sent or received."""
    memory = memories[rank]

    def send(row) -> None:
        start = row[Row.send_offset]
        message = memory[start : start + row[Row.send_bytes]].copy()
        under_way.setdefault((rank, row[Row.send_peer]), deque()).append(message)

    for step in sorted({row[Row.step] for row in rows}):
        of_step = [row for row in rows if row[Row.step] == step]
        for row in of_step:
            if row[Row.send_peer] >= 0:
                send(row)
                yield True
        for row in of_step:
            if row[Row.receive_peer] < 0:
                continue
            messages = under_way.setdefault((row[Row.receive_peer], rank), deque())
            while not messages:
                yield False
            theirs = messages.popleft()
            assert len(theirs) == row[Row.receive_bytes]
            start = row[Row.receive_offset]
            place = memory[start : start + len(theirs)]
            if row[Row.reduces]:
                operands = (theirs, place) if row[Row.theirs_first] else (place, theirs)
                place[:] = combine(*operands)
            else:
                place[:] = theirs
            yield True


def combined_as(dtype: str, function):
    """Return `combine` of `modelled` for arrays of a dtype."""

    def combine(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        of = np.dtype(dtype)
        return function(left.copy().view(of), right.copy().view(of)).view(np.uint8)

    return combine
