"""The timeline: what happened to each tensor, as a file for chrome://tracing and Perfetto."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

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
        Written anew.
    mark_cycles : bool
        Whether each cycle of negotiation is an event.

    Notes
    -----
    Each tensor is a "process" of the viewer: NEGOTIATE_ALLREDUCE lasts from when this rank has
    submitted it until all have, ALLREDUCE until the result is there. Times are in microseconds.
    """

    def __init__(self, path: str | Path, mark_cycles: bool = False) -> None:
        self._file: IO[str] | None = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
        self._marks_cycles = mark_cycles
        self._begin = time.perf_counter()
        self._numbers: dict[str, int] = {}
        self._n_bytes = 0
        self._lock = threading.Lock()
        self._write_text("[\n")
        self._write({"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "cycles"}})

    def submitted(self, request: Request) -> None:
        """Note that this rank has submitted a request."""
        self._event("B", request.name, f"NEGOTIATE_{request.kind.name}")

    def begin(self, batch: Sequence[Request]) -> None:
        """Note that all ranks have, and the call begins."""
        for request in batch:
            self._event("E", request.name)
            self._event("B", request.name, request.kind.name, tensors=len(request.arrays))

    def end(self, request: Request) -> None:
        """Note that a request is done, or has failed."""
        failed = {} if request.error is None else {"error": str(request.error)}
        self._event("E", request.name, **failed)
        self.flush()

    def cycle(self) -> None:
        """Note that a cycle of negotiation begins."""
        if self._marks_cycles:
            self._write(
                {"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": self._now()}
            )

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
                    file.write("{}]\n")

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

    def _now(self) -> int:
        return int((time.perf_counter() - self._begin) * 1e6)

    def _event(self, phase: str, tensor: str, name: str = "", **arguments: Any) -> None:
        with self._lock:
            if self._file is None:
                return
            number = self._numbers.get(tensor)
            is_new = number is None
            if number is None:
                number = self._numbers[tensor] = len(self._numbers) + 1
        if is_new:
            known = {"name": "process_name", "ph": "M", "pid": number, "args": {"name": tensor}}
            self._write(known)
        event: dict[str, Any] = {"ph": phase, "pid": number, "tid": 0, "ts": self._now()}
        if name:
            event["name"] = name
        if arguments:
            event["args"] = arguments
        self._write(event)

    def _write(self, event: dict[str, Any]) -> None:
        text = json.dumps(event, separators=(",", ":"))
        self._write_text(f"{text},\n")

    def _write_text(self, text: str) -> None:
        with self._lock, self._ended_by_errors():
            if self._file is None:
                return
            self._file.write(text)
            self._n_bytes += len(text)
        if self._n_bytes > LIMIT_BYTES:
            self.close()
