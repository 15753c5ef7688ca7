"""What the ranks print: made into whole lines, each with its rank, on the launcher's own streams.

On a terminal the last line may be one that a rank has not finished: a prompt, or a progress bar
that is redrawn with carriage returns. It is wiped before anything else is written. In a file or
pipe there is no wiping, so a line appears when it is finished, in the state that a terminal would
show last.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys

from gpucoll.launcher.rank_process import STDERR, STDOUT
from gpucoll.launcher.terminal import columns
from gpucoll.launcher.whole_tracebacks import TracebackHold

__all__ = ["LineAssembler", "OutputRelay", "PrintedOutput"]

LONGEST_LINE_BYTES = 1 << 20
"""A longer line is broken: the launcher must not collect what never ends."""

WIPE = b"\r\x1b[K"  # to the line's start, then erase to its end (ECMA-48)


class LineAssembler:
    """Turns pieces of one rank's stream into lines, as a terminal would leave them."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, without their ends."""
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
        """What stands on the line that has not ended."""
        return last_drawn(self._pending)


def last_drawn(line: bytes, *, keep_return: bool = False) -> bytes:
    """Return what is left on a line after its carriage returns, each of which starts it anew."""
    if b"\r" not in line:
        return line
    text = line.rstrip(b"\r")  # the last one has not been written over yet, or belongs to "\r\n"
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
        streams, numbers = (STDOUT, STDERR), range(first, first + ranks)
        self._assemblers = {
            (rank, stream): LineAssembler() for rank in numbers for stream in streams
        }
        self._holds = {rank: TracebackHold() for rank in numbers}
        self._prefixes = {rank: b"[%d] " % rank if prefix else b"" for rank in numbers}
        self._last_note = ""
        self._terminals = {stream: is_terminal(stream) for stream in streams}
        self._unfinished: dict[tuple[int, int], None] = {}
        """(rank, stream) of unfinished lines on terminals; the one written to last is the last."""
        self._drawn_on: int | None = None

    def feed(self, rank: int, stream: int, data: bytes) -> list[bytes]:
        """Take a piece of a rank's output and write the lines it completes; empty data is the end.

        Returns
        -------
        list of bytes
            The lines, without prefixes and line ends.

        Raises
        ------
        BrokenPipeError
            Nobody reads the launcher's stream any more.
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
        """Whether lines are kept until a rank's traceback is complete."""
        return not all(hold.is_empty for hold in self._holds.values())

    def release_tracebacks(self) -> None:
        """Write what is kept, complete or not; OSError as from `feed`."""
        for rank, hold in self._holds.items():
            self._write_lines(rank, STDERR, hold.release())

    def error_of(self, rank: int) -> str:
        """Return the error with which the last traceback of a rank ended; empty without one."""
        return self._holds[rank].error.decode(errors="replace")

    def note(self, text: str) -> None:
        """Write a line of the launcher's own to stderr."""
        try:
            self._write(STDERR, f"gpucoll-run: {text}\n".encode(errors="backslashreplace"))
        except OSError:
            pass  # nobody can be told that nobody can be told
        self._last_note = text

    @property
    def last_note(self) -> str:
        """The launcher's last line; empty where a rank has written another since."""
        return self._last_note

    @property
    def has_unfinished(self) -> bool:
        """Whether there is an unfinished line that a terminal could show."""
        return bool(self._unfinished)

    def draw_unfinished(self) -> None:
        """Show, on a terminal, the unfinished line that was written to last."""
        if self._unfinished:
            rank, stream = next(reversed(self._unfinished))
            line = self._prefixes[rank] + self._assemblers[rank, stream].unfinished
            try:
                self._write(stream, fitted(line))
            except OSError:  # the terminal is gone: the next whole line will meet that too
                self._unfinished.clear()
                return
            self._drawn_on = stream

    def finish(self) -> None:
        """Wipe an unfinished line that is still shown."""
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
    """Writes what ranks print to the caller's sys.stdout and sys.stderr.

    Not to descriptors 1 and 2: a notebook, or a test that captures output, has other streams.

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
        """Take a piece of a rank's output; empty data is the end."""
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


def is_terminal(descriptor: int) -> bool:
    """Return whether lines on it can be wiped."""
    try:
        return os.isatty(descriptor) and os.environ.get("TERM", "dumb") != "dumb"
    except OSError:
        return False


def fitted(line: bytes) -> bytes:
    """Shorten a line to the terminal's width: wiping would miss the start of a line that wraps."""
    width = columns() - 1
    if b"\x1b" in line:  # escape sequences take no room, and must not be cut
        return line
    return line.decode(errors="replace")[:width].encode()


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything, even to a stream that somebody who shares it has made non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
