"""Output of a rank, kept in a file that outlives the rank."""

from __future__ import annotations

import os

LIMIT_BYTES = 1 << 20
"""Of longer output, only the end is shown."""


class Recording:
    """An anonymous file that one process writes as its output and another one reads."""

    def __init__(self, name: str) -> None:
        self.descriptor = os.memfd_create(name)

    def clear(self) -> None:
        """Empty the file. The writer continues at its start, because both share one position."""
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        os.ftruncate(self.descriptor, 0)

    def text(self) -> str:
        """Return what was written."""
        size = os.fstat(self.descriptor).st_size
        data = os.pread(self.descriptor, LIMIT_BYTES, max(size - LIMIT_BYTES, 0))
        return data.decode(errors="replace")

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)
