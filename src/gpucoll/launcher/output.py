"""Relay of the ranks' output to the launcher's streams, in whole lines with their ranks.

On a terminal, the last line may be unfinished: a prompt, or a progress bar that is redrawn with
carriage returns. It is erased before anything else is written. A file or pipe cannot be erased, so
there a line appears when it is finished, in the state that a terminal would show last.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys

from gpucoll.launcher.rank_process import STDERR, STDOUT
from gpucoll.launcher.whole_tracebacks import TracebackHold
from gpucoll.terminal import ERASE_LINE, columns, is_terminal

__all__ = ["LineAssembler", "OutputRelay", "PrintedOutput"]

LONGEST_LINE_BYTES = 1 << 20
"""Longer lines are broken, so that the launcher does not buffer a line that never ends."""

WIPE = ERASE_LINE.encode()


class LineAssembler:
    """Splits one rank's stream into lines, as a terminal would show them."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, without line ends."""
        *lines, rest = (self._pending + data).split(b"\n")
        self._pending = last_drawn(rest, keep_return=True)
        if len(self._pending) > LONGEST_LINE_BYTES:
            lines.append(self._pending)
            self._pending = b""
        return [last_drawn(line) for line in lines]

    def finish(self) -> list[bytes]:
        """Return the last line, if the stream has ended in the middle of it."""
        rest, self._pending = self.unfinished, b""
        return [rest] if rest else []

    @property
    def unfinished(self) -> bytes:
        """The contents of the unfinished line."""
        return last_drawn(self._pending)


def last_drawn(line: bytes, *, keep_return: bool = False) -> bytes:
    """Return what remains of a line after its carriage returns, each of which restarts it."""
    if b"\r" not in line:
        return line
    text = line.rstrip(b"\r")  # nothing has overwritten the last one yet, or it belongs to "\r\n"
    drawn = text[text.rfind(b"\r") + 1 :]
    return drawn + b"\r" if keep_return and text != line else drawn


class OutputRelay:
    """Writes the ranks' lines to the launcher's stdout and stderr.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    prefix : bool
        Whether each line begins with ``[rank] ``.
    first : int
        The lowest rank.
    """

    def __init__(self, ranks: int, *, prefix: bool, first: int = 0) -> None:
        self._has_prefix = prefix
        self._assemblers: dict[tuple[int, int], LineAssembler] = {}
        self._holds: dict[int, TracebackHold] = {}
        self._prefixes: dict[int, bytes] = {}
        for rank in range(first, first + ranks):
            self.admit(rank)
        self._last_note = ""
        self._terminals = {stream: is_terminal(stream) for stream in (STDOUT, STDERR)}
        self._unfinished: dict[tuple[int, int], None] = {}
        """(rank, stream) of unfinished lines on terminals, ordered by their last write."""
        self._drawn_on: int | None = None

    def admit(self, rank: int) -> None:
        """Relay the output of another rank, too."""
        for stream in (STDOUT, STDERR):
            self._assemblers[rank, stream] = LineAssembler()
        self._holds[rank] = TracebackHold()
        self._prefixes[rank] = b"[%d] " % rank if self._has_prefix else b""

    def feed(self, rank: int, stream: int, data: bytes) -> list[bytes]:
        """Take a piece of a rank's output, or b"" at its end; write the lines that it completes.

        Returns
        -------
        list of bytes
            The lines, without prefixes and line ends.

        Raises
        ------
        BrokenPipeError
            The reader of the launcher's stream has closed it.
        """
        assembler = self._assemblers[rank, stream]
        lines = assembler.feed(data) if data else assembler.finish()
        if self._terminals[stream]:
            self._unfinished.pop((rank, stream), None)
            if assembler.unfinished:
                self._unfinished[rank, stream] = None
        ready = lines
        if stream == STDERR:
            ready = self._holds[rank].feed(lines) + ([] if data else self._holds[rank].release())
        self._write_lines(rank, stream, ready)
        return lines

    def _write_lines(self, rank: int, stream: int, lines: list[bytes]) -> None:
        if lines:
            prefix = self._prefixes[rank]
            self._write(stream, b"".join(prefix + line + b"\n" for line in lines))

    @property
    def holds_tracebacks(self) -> bool:
        """Whether lines are held until a rank's traceback is complete."""
        return not all(hold.is_empty for hold in self._holds.values())

    def release_tracebacks(self) -> None:
        """Write the held lines, even if incomplete; raises OSError like `feed`."""
        for rank, hold in self._holds.items():
            self._write_lines(rank, STDERR, hold.release())

    def rename(self, rank: int, label: str) -> None:
        """Prefix a rank's lines with another label from here on: its process is another one."""
        if self._prefixes[rank]:
            self._prefixes[rank] = b"[%s] " % label.encode()
        self._holds[rank] = TracebackHold()

    def error_of(self, rank: int) -> str:
        """Return the error at the end of a rank's last traceback; empty if there is none."""
        return self._holds[rank].error.decode(errors="replace")

    def note(self, text: str) -> None:
        """Write one of the launcher's own lines to stderr."""
        try:
            self._write(STDERR, f"gpucoll-run: {text}\n".encode(errors="backslashreplace"))
        except OSError:
            pass  # there is no stream left to report on
        self._last_note = text

    @property
    def last_note(self) -> str:
        """The launcher's last line; empty if a rank has written a line since."""
        return self._last_note

    @property
    def has_unfinished(self) -> bool:
        """Whether there is an unfinished line to show on a terminal."""
        return bool(self._unfinished)

    def draw_unfinished(self) -> None:
        """Show the most recently written unfinished line, if on a terminal."""
        if self._unfinished:
            rank, stream = next(reversed(self._unfinished))
            line = self._prefixes[rank] + self._assemblers[rank, stream].unfinished
            try:
                self._write(stream, fitted(line))
            except OSError:  # the terminal is gone: the next whole line will fail, too
                self._unfinished.clear()
                return
            self._drawn_on = stream

    def finish(self) -> None:
        """Erase the unfinished line if it is shown."""
        drawn_on, self._drawn_on = self._drawn_on, None
        if drawn_on is not None:
            with contextlib.suppress(OSError):
                write_all(drawn_on, WIPE)

    def _write(self, stream: int, data: bytes) -> None:
        self._last_note = ""
        if self._terminals[stream]:
            self.finish()
        write_all(stream, data)


class PrintedOutput:
    """Writes the ranks' output to the caller's sys.stdout and sys.stderr.

    It does not use descriptors 1 and 2, because notebooks, and tests that capture output, have
    other streams.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    prefix : bool
        Whether each line begins with ``[rank] ``.
    """

    def __init__(self, ranks: int, *, prefix: bool) -> None:
        self._prefix = prefix
        self._assemblers = {
            (rank, stream): LineAssembler() for rank in range(ranks) for stream in (STDOUT, STDERR)
        }

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Take a piece of a rank's output; empty data marks the end."""
        assembler = self._assemblers[rank, stream]
        lines = assembler.feed(data) if data else assembler.finish()
        target = sys.stdout if stream == STDOUT else sys.stderr
        if not lines or target is None:
            return
        start = f"[{rank}] " if self._prefix else ""
        text = "".join(f"{start}{line.decode(errors='replace')}\n" for line in lines)
        try:
            target.write(text)
        except UnicodeEncodeError:
            encoding = target.encoding or "ascii"
            target.write(text.encode(encoding, "backslashreplace").decode(encoding))
        target.flush()


def fitted(line: bytes) -> bytes:
    """Shorten a line to the terminal's width, as erasing misses the start of a wrapped line."""
    width = columns() - 1
    if b"\x1b" in line:  # escape sequences take no width, and must not be cut
        return line
    return line.decode(errors="replace")[:width].encode()


def write_all(descriptor: int, data: bytes) -> None:
    """Write all data, even if another process that shares the stream has made it non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
