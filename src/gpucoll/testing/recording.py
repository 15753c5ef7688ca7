"""What a rank writes, kept where it outlives the rank."""

from __future__ import annotations

import os

LIMIT_BYTES = 1 << 20
"""Of what is longer, the end is shown."""


class Recording:
    """A file without a name: written by one process as its output, read by another."""

    def __init__(self, name: str) -> None:
        self.descriptor = os.memfd_create(name)

    def clear(self) -> None:
        """Start anew; the writer goes on from the beginning, because both share one position."""
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        os.ftruncate(self.descriptor, 0)

    def text(self) -> str:
        """Return what was written."""
        size = os.fstat(self.descriptor).st_size
        data = os.pread(self.descriptor, LIMIT_BYTES, max(size - LIMIT_BYTES, 0))
        return data.decode(errors="replace")

    def close(self) -> None:
        """Let go of it."""
        os.close(self.descriptor)
