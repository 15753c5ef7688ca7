"""Tracebacks of ranks, each written in one piece: ranks that fail together print together."""

from __future__ import annotations

__all__ = ["HOLD_S", "TracebackHold"]

_FIRST_LINE = b"Traceback (most recent call last):"
HOLD_S = 0.5
"""The longest time for which lines of a traceback are held. Python prints one within milliseconds,
and lines that only look like the start of one must not be kept from the user."""


class TracebackHold:
    """Holds the lines of a traceback on one rank's stderr until it is complete."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self.error = b""
        """The last line of the last traceback, which is the error itself."""

    @property
    def is_empty(self) -> bool:
        """Whether no line is held."""
        return not self._held

    def feed(self, lines: list[bytes]) -> list[bytes]:
        """Return the lines that can be written now, from held and new ones."""
        ready: list[bytes] = []
        for line in lines:
            if line.startswith(_FIRST_LINE):
                ready += self.release()
                self._held = [line]
            elif not self._held:
                ready.append(line)
            else:
                self._held.append(line)
                if not line.startswith(b" "):  # the lines above the error are indented
                    self.error = line
                    ready += self.release()
        return ready

    def release(self) -> list[bytes]:
        """Return the held lines, complete or not."""
        held, self._held = self._held, []
        return held
