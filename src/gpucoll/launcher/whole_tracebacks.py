"""A rank's traceback is written in one piece: ranks that fail at once write theirs at once, too."""

from __future__ import annotations

__all__ = ["HOLD_S", "TracebackHold"]

_FIRST_LINE = b"Traceback (most recent call last):"
HOLD_S = 0.5
"""How long the lines of one are kept at most. Python writes one within milliseconds; what only
looks like the beginning of one must not be kept from the user."""


class TracebackHold:
    """Keeps the lines of one rank's stderr that belong to a traceback until it is complete."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self.error = b""
        """The last line of the last traceback: the error itself."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        return not self._held

    def feed(self, lines: list[bytes]) -> list[bytes]:
        """Return the lines that can be written now, of those kept before and of these."""
        ready: list[bytes] = []
        for line in lines:
            if line.startswith(_FIRST_LINE):
                ready += self.release()
                self._held = [line]
            elif not self._held:
                ready.append(line)
            else:
                self._held.append(line)
                if not line.startswith(b" "):  # as the lines above the error do
                    self.error = line
                    ready += self.release()
        return ready

    def release(self) -> list[bytes]:
        """Return the lines that are kept, complete or not."""
        held, self._held = self._held, []
        return held
