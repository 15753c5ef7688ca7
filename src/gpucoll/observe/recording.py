"""Records the calls of a job's ranks for some seconds, within a bound on memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gpucoll.observe.processes import process_of
from gpucoll.observe.segments import Observed
from gpucoll.observe.watch import CALL, Calls, Watch

__all__ = ["LeftOut", "Recording", "record"]

LOOK_S = 0.05
"""A rank may make 2,048 calls meanwhile before it overwrites the first of them."""
_ALIVE_S = 1.0


@dataclass(frozen=True)
class LeftOut:
    """Calls of one communicator that were not recorded: by rank, how many up to a time."""

    place: int
    time_ns: int
    numbers: npt.NDArray[np.int64]


@dataclass
class Recording:
    """What has been recorded.

    Attributes
    ----------
    segments : list of Observed
        The communicators.
    calls : list of array of `CALL`
        By communicator.
    left_out : list of LeftOut
        In the order of their times.
    begun_ns, ended_ns : int
        The time of the recording, of the monotonic clock.
    """

    segments: list[Observed]
    calls: list[npt.NDArray[np.void]] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    begun_ns: int = 0
    ended_ns: int = 0

    @property
    def n_calls(self) -> int:
        """How many calls were recorded."""
        return sum(map(len, self.calls))

    @property
    def n_left_out(self) -> int:
        """How many more there were."""
        return sum(int(each.numbers.sum()) for each in self.left_out)


def record(segments: Sequence[Observed], seconds: float, most_calls: int) -> Recording:
    """Record calls until the time is over, the job has ended, or Ctrl-C.

    Parameters
    ----------
    most_calls : int
        Each needs 88 bytes. If there are more, some of each `LOOK_S` are recorded: the first ones,
        so that calls are recorded of all their ranks.

    Raises
    ------
    SharedMemoryError
        As `Watch`.
    """
    recorder = _Recorder(segments, seconds, most_calls)
    with Watch(segments) as watch:
        try:
            is_over = False
            while not is_over:
                time.sleep(LOOK_S)
                is_over = recorder.is_over()
                recorder.take(watch.read())
        except KeyboardInterrupt:
            recorder.take(watch.read())
    return recorder.recording()


class _Recorder:
    def __init__(self, segments: Sequence[Observed], seconds: float, most_calls: int) -> None:
        self._seconds, self._most_calls = seconds, most_calls
        self._recording = Recording(list(segments), begun_ns=time.monotonic_ns())
        self._parts: list[list[npt.NDArray[np.void]]] = [[] for _ in segments]
        self._n_calls = 0
        self._pids = {pid for segment in segments for pid in segment.pids}
        self._asked_s = time.monotonic()

    def _passed_s(self) -> float:
        return (time.monotonic_ns() - self._recording.begun_ns) / 1e9

    def is_over(self) -> bool:
        if time.monotonic() - self._asked_s > _ALIVE_S:
            self._asked_s = time.monotonic()
            processes = map(process_of, self._pids)
            if all(process is None or process.has_ended for process in processes):
                return True
        return self._passed_s() >= self._seconds

    def take(self, looks: list[Calls]) -> None:
        """Keep as many calls as the time that has passed allows."""
        share = min(self._passed_s() / self._seconds, 1.0)
        room = int(self._most_calls * share) - self._n_calls
        begun = np.concatenate([look.calls["begun_ns"] for look in looks])
        before_ns = np.sort(begun)[room] if len(begun) > room else np.iinfo(np.int64).max
        for place, look in enumerate(looks):
            is_kept = look.calls["begun_ns"] < before_ns
            kept = look.calls[is_kept]
            numbers = np.bincount(look.calls["rank"][~is_kept], minlength=len(look.missed))
            left_out = look.missed + numbers
            if left_out.any():
                now_ns = time.monotonic_ns()
                self._recording.left_out.append(LeftOut(place, now_ns, left_out))
            self._parts[place].append(kept)
            self._n_calls += len(kept)

    def recording(self) -> Recording:
        nothing = np.zeros(0, CALL)
        self._recording.calls = [np.concatenate([nothing, *parts]) for parts in self._parts]
        self._recording.ended_ns = time.monotonic_ns()
        return self._recording
