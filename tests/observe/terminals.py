"""A terminal in which a test runs a program: its screen as text, and keys."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence

import pyte

LIMIT_S = 40.0


class Terminal:
    """Runs a program with a pseudo terminal as its standard input, output and error."""

    def __init__(self, command: Sequence[str], width: int = 80, height: int = 24, **env: str):
        self.screen = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self.screen)
        self._own, theirs = os.openpty()
        self._resize(theirs)
        self.before = termios.tcgetattr(theirs)
        self.raw = b""
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", **env},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._theirs = theirs

    def _resize(self, fd: int) -> None:
        size = struct.pack("HHHH", self.screen.lines, self.screen.columns, 0, 0)
        fcntl.ioctl(fd, termios.TIOCSWINSZ, size)

    def resize(self, width: int, height: int) -> None:
        """Give the terminal another size, as a window manager does."""
        self.screen.resize(height, width)
        self._resize(self._own)

    def read(self, timeout_s: float = 0.0) -> None:
        """Draw what the program has written."""
        while select.select([self._own], [], [], timeout_s)[0]:
            timeout_s = 0.0
            written = os.read(self._own, 1 << 16)
            self.raw += written
            self._stream.feed(written)

    @property
    def lines(self) -> list[str]:
        """The screen's lines, without spaces at their ends."""
        return [line.rstrip() for line in self.screen.display]

    def until(self, *texts: str, limit_s: float = LIMIT_S) -> list[str]:
        """Wait until the screen shows all of these; return its lines."""
        deadline_s = time.monotonic() + limit_s
        while not all(text in "\n".join(self.lines) for text in texts):
            assert time.monotonic() < deadline_s, "\n".join([*texts, "not in:", *self.lines])
            assert self.process.poll() is None or select.select([self._own], [], [], 0)[0], (
                "\n".join(["it has ended:", *self.lines])
            )
            self.read(0.1)
        return self.lines

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._own, keys.encode())

    def end(self, sent: signal.Signals | None = None) -> int:
        """Wait for the program to end, maybe by a signal; return its exit code."""
        if sent is not None:
            self.process.send_signal(sent)
        code = self.process.wait(LIMIT_S)
        self.read()
        return code

    @property
    def is_restored(self) -> bool:
        """Whether echo and the cursor are on, and the main screen is shown."""
        is_same = termios.tcgetattr(self._theirs) == self.before
        is_main = self.raw.rfind(b"\x1b[?1049l") > self.raw.rfind(b"\x1b[?1049h")
        return is_same and is_main and not self.screen.cursor.hidden

    def close(self) -> None:
        """Kill the program if it runs, and close the terminal."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._own)
        os.close(self._theirs)
