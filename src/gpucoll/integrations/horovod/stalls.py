"""Warnings about tensors that some ranks have submitted and others have not."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpucoll.integrations.horovod.engine.engine import Engine

__all__ = ["StallCheck"]

_log = logging.getLogger("gpucoll.horovod")
_SHOWN = 5


class StallCheck:
    """A thread that looks now and then whether something waits for long.

    Parameters
    ----------
    engines : dict
        By the number of their process set; may change.
    limit_s : float
        After how long to warn, and how often; 0: never.
    """

    def __init__(self, engines: Mapping[int, Engine], limit_s: float) -> None:
        self._engines, self._limit_s = engines, limit_s
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if limit_s > 0:
            self._thread = threading.Thread(target=self._run, name="gpucoll-stalls", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        warned = 0.0
        while not self._stopped.wait(self._limit_s / 4):
            for engine in [*self._engines.values()]:
                since, now = engine.pending_since(), time.monotonic()
                if since is not None and now - max(since, warned) > self._limit_s:
                    warned = now
                    _log.warning("%s", self._describe(engine))

    def _describe(self, engine: Engine) -> str:
        lacking: dict[int, list[str]] = defaultdict(list)
        for name, ranks in engine.missing().items():
            for rank in ranks:
                lacking[rank].append(name)
        lines = [
            "One or more tensors were submitted to be reduced, gathered or broadcasted by subset "
            "of ranks and are waiting for remainder of ranks for more than "
            f"{self._limit_s:g} seconds. This may indicate that different ranks are trying to "
            "submit different tensors or that only subset of ranks is submitting tensors, which "
            "will cause deadlock. ",
            "Missing ranks:",
        ]
        for rank, names in sorted(lacking.items()):
            more = " ..." if len(names) > _SHOWN else ""
            lines.append(f"{rank}: [{', '.join(names[:_SHOWN])}{more}]")
        return "\n".join(lines)
