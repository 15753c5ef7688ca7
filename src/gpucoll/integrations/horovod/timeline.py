"""The timeline: what happened to each tensor, as a file for chrome://tracing or Perfetto."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from gpucoll.track_events import (
    NO_ARGUMENTS,
    PERFETTO_SUFFIXES,
    Arguments,
    ChromeEvents,
    Encoder,
    TrackEvents,
)

if TYPE_CHECKING:
    from gpucoll.integrations.horovod.engine.request import Request

__all__ = ["Timeline"]

_log = logging.getLogger("gpucoll.horovod")

LIMIT_BYTES = 256 << 20
"""A timeline ends here: a job of days would fill its disk, and no viewer opens more."""


class Timeline:
    """Writes the events of one rank's engines.

    Parameters
    ----------
    path : path
        Written anew: as Perfetto's protobuf if it ends in ``.pftrace`` or ``.perfetto-trace``, else
        as the JSON that Horovod writes.
    mark_cycles : bool
        Whether each cycle of negotiation is an event.

    Notes
    -----
    Each tensor has a track (in JSON a "process"): NEGOTIATE_ALLREDUCE lasts from when this rank has
    submitted it until all have, ALLREDUCE until the result is there. Requests of one name in
    several process sets at a time have tracks of their own.
    """

    def __init__(self, path: str | Path, mark_cycles: bool = False) -> None:
        path = Path(path)
        is_for_perfetto = path.name.endswith(PERFETTO_SUFFIXES)
        self._encoder: Encoder = TrackEvents() if is_for_perfetto else ChromeEvents()
        self._file: IO[bytes] | None = path.open("wb")
        self._marks_cycles = mark_cycles
        self._free: dict[str, list[int]] = {}
        self._tracks: dict[int, int] = {}
        self._n_bytes = 0
        self._lock = threading.Lock()
        self._cycles, described = self._encoder.track("cycles")
        self._write(lambda _: self._encoder.start() + described)

    def submitted(self, request: Request) -> None:
        """Note that this rank has submitted a request."""
        self._write(self._begun, request, f"NEGOTIATE_{request.kind.name}")

    def begin(self, batch: Sequence[Request]) -> None:
        """Note that all ranks have, and the call begins."""
        for request in batch:
            shown = {"tensors": len(request.arrays)}
            self._write(self._ended, request)
            self._write(self._begun, request, request.kind.name, shown)

    def end(self, request: Request) -> None:
        """Note that a request is done, or has failed."""
        failed = {} if request.error is None else {"error": str(request.error)}
        self._write(self._ended, request, failed)
        self.flush()

    def cycle(self) -> None:
        """Note that a cycle of negotiation begins."""
        if self._marks_cycles:
            self._write(lambda now_ns: self._encoder.instant(self._cycles, now_ns, "CYCLE_START"))

    def flush(self) -> None:
        """Let readers of the file see what is there."""
        with self._lock, self._ended_by_errors():
            if self._file is not None:
                self._file.flush()

    def close(self) -> None:
        """End the file; what comes later is not written."""
        with self._lock, self._ended_by_errors():
            file, self._file = self._file, None
            if file is not None:
                with file:
                    file.write(self._encoder.finish())

    @contextlib.contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """End the timeline, and not the job, if its disk is full."""
        try:
            yield
        except OSError as error:
            _log.warning("the timeline ends here: %s", error)
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()

    def _begun(
        self, now_ns: int, request: Request, name: str, shown: Arguments = NO_ARGUMENTS
    ) -> bytes:
        """Begin a slice on a track of the request's name that no other request has now."""
        free, described = self._free.setdefault(request.name, []), b""
        if free:
            track = free.pop()
        else:
            track, described = self._encoder.track(request.name)
        self._tracks[id(request)] = track
        return described + self._encoder.begin(track, now_ns, name, shown)

    def _ended(self, now_ns: int, request: Request, shown: Arguments = NO_ARGUMENTS) -> bytes:
        """End the slice of a request, if there is one: a rank that has joined submits none."""
        track = self._tracks.pop(id(request), 0)
        if not track:
            return b""
        self._free[request.name].append(track)
        return self._encoder.end(track, now_ns, shown)

    def _write(self, encode: Callable[..., bytes], *given: object) -> None:
        """Write what ``encode(now_ns, *given)`` returns, unless the timeline has ended."""
        with self._lock, self._ended_by_errors():
            if self._file is None:
                return
            encoded = encode(time.monotonic_ns(), *given)
            self._file.write(encoded)
            self._n_bytes += len(encoded)
        if self._n_bytes > LIMIT_BYTES:
            self.close()
