"""Warnings about tensors that some ranks have submitted and others have not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpucoll import DeadlineError, GpucollError

if TYPE_CHECKING:
    from gpucoll import Communicator
    from gpucoll.integrations.horovod.engine.engine import Engine

__all__ = ["StallCheck"]

_log = logging.getLogger("gpucoll.horovod")
_SHOWN = 5
_ENDING_S = 5.0


class StallCheck:
    """A thread of each rank; they tell each other now and then what has waited for long.

    Parameters
    ----------
    comm : Communicator
        Of all ranks, for these threads alone. They close it.
    engines : dict
        By the number of their process set; may change.
    sets : dict
        The ranks of all process sets; may change.
    warn_s : float
        After how long to warn.
    fail_s : float
        After how long what waits fails, on all ranks; 0: never.
    """

    def __init__(
        self,
        comm: Communicator,
        engines: Mapping[int, Engine],
        sets: Mapping[int, list[int]],
        warn_s: float,
        fail_s: float,
    ) -> None:
        self._comm, self._engines, self._sets = comm, engines, sets
        self._warn_s, self._fail_s = warn_s, fail_s
        limits = [limit for limit in (warn_s, fail_s) if limit > 0]
        self._every_s = min(limits) / 4
        self._stopped = threading.Event()
        self._warned: dict[tuple[int, str], float] = {}
        self._thread = threading.Thread(target=self._run, name="gpucoll-stalls", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._comm.abort()
        self._thread.join(_ENDING_S)
        self._comm.close()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self._look()
            except DeadlineError as error:
                _log.warning("%s", error)  # it names the ranks that are stopped
                return
            except GpucollError:  # a rank has left the job
                return

    def _look(self) -> None:
        """Exchange what is old here, then who has submitted what is old anywhere."""
        timeout_s = 4 * self._every_s + _ENDING_S
        now = time.monotonic()
        old = {
            (number, name): now - since
            for number, engine in [*self._engines.items()]
            for name, since in engine.pending()
            if now - since > self._every_s
        }
        ages: dict[tuple[int, str], float] = {}
        for told in self._comm.all_gather_object(old, timeout_s=timeout_s):
            for what, age in told.items():
                ages[what] = max(age, ages.get(what, 0.0))
        if not ages:
            return
        mine = {
            (number, name)
            for number, engine in [*self._engines.items()]
            for name, _ in engine.pending()
        }
        have = self._comm.all_gather_object(mine & ages.keys(), timeout_s=timeout_s)
        missing = {
            what: [rank for rank in self._sets.get(what[0], ()) if what not in have[rank]]
            for what in ages
        }
        failing = self._warn({what: age for what, age in ages.items() if missing[what]}, missing)
        if failing:
            try:  # every rank knows why before the first one gives up
                self._comm.barrier(timeout_s=timeout_s)
            finally:
                for engine in self._engines_of(failing):
                    engine.abort()

    def _engines_of(self, numbers: set[int]) -> list[Engine]:
        return [engine for number, engine in [*self._engines.items()] if number in numbers]

    def _warn(
        self, ages: dict[tuple[int, str], float], missing: dict[tuple[int, str], list[int]]
    ) -> set[int]:
        """Warn of what has waited for long, or let it fail; return the sets in which it does."""
        now = time.monotonic()
        failing = {number for (number, _), age in ages.items() if 0 < self._fail_s < age}
        told = [
            what
            for what, age in ages.items()
            if what[0] in failing
            or (0 < self._warn_s < age and now - self._warned.get(what, -1e9) > self._warn_s)
        ]
        if not told:
            return failing
        text = self._text(told, missing)
        if failing:
            text += f" This is longer than {self._fail_s:g} seconds: they fail."
        if self._comm.rank == 0:
            _log.warning("%s", text)
        known = {what: since for what, since in self._warned.items() if what in ages}
        self._warned = known | dict.fromkeys(told, now)
        for engine in self._engines_of(failing):
            engine.fail(DeadlineError(text))
        return failing

    def _text(self, told: list[tuple[int, str]], missing: dict[tuple[int, str], list[int]]) -> str:
        lacking: dict[int, list[str]] = {}
        for what in told:
            for rank in missing[what]:
                lacking.setdefault(rank, []).append(what[1])
        lines = [
            "One or more tensors were submitted to be reduced, gathered or broadcasted by subset "
            "of ranks and are waiting for remainder of ranks for more than "
            f"{self._warn_s or self._fail_s:g} seconds. Different ranks submit different tensors, "
            "or a rank is slow.\nMissing ranks:"
        ]
        for rank, names in sorted(lacking.items()):
            more = " ..." if len(names) > _SHOWN else ""
            lines.append(f"{rank}: [{', '.join(names[:_SHOWN])}{more}]")
        return "\n".join(lines)
