"""From the calls of a communicator's ranks to numbers: how many, how much, how long, for whom.

Each look gives a `Sample`. What is shown is the mean of the samples of the last seconds. Shares are
of time: a rank that is in calls all the time has the share 1, also if its calls overlap, and a call
that is not over counts up to now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gpucoll.collectives import Collective
from gpucoll.observe.meetings import Register
from gpucoll.observe.watch import CALL, Calls
from gpucoll.transport.shared.spans import SpanKind

__all__ = ["KEPT_S", "Pending", "Rates", "Sample", "called", "mean_of", "times_by_call"]

Floats = npt.NDArray[np.float64]
Times = npt.NDArray[np.int64]

KEPT_S = 10.0
"""For how long samples and calls are kept."""
MOST_CALLS = 16_384
"""So many calls of a look are put together; of more calls, the newest. This bounds the time."""
_RECENT_CALLS = 4 * MOST_CALLS


@dataclass(frozen=True)
class Pending:
    """What ranks are in at the moment of a look; by rank, since when; 0: they are not.

    Attributes
    ----------
    in_call, waiting, awaited : array of int64
        The rank is in a call; it waits there for ranks that have not come; others wait for it.
    """

    in_call: Times
    waiting: Times
    awaited: Times


@dataclass(frozen=True)
class Sample:
    """What the ranks of a communicator did between two looks; arrays are by rank.

    Attributes
    ----------
    ended_ns, seconds : int, float
        When the second look was, and how long after the first one.
    calls : array of float64
        The number of calls that ended.
    size_bytes : array of float64
        The sum of their inputs.
    in_calls, waiting, held_up : array of float64
        Shares of the time in which the rank was in calls, waited for the last rank, and was the one
        that others waited for.
    is_sampled : bool
        Whether some calls are only counted: then all but `calls` is of the others.
    """

    ended_ns: int
    seconds: float
    calls: Floats
    size_bytes: Floats
    in_calls: Floats
    waiting: Floats
    held_up: Floats
    is_sampled: bool = False


def mean_of(samples: Iterable[Sample], n_ranks: int, since_ns: int = 0) -> Sample:
    """Return the samples that ended after a moment as one; all zero if there is none."""
    chosen = [each for each in samples if each.ended_ns > since_ns]
    seconds = sum(each.seconds for each in chosen)
    zero = np.zeros(n_ranks)

    def share(name: str) -> Floats:
        parts = (getattr(each, name) * each.seconds for each in chosen)
        return sum(parts, zero) / (seconds or 1.0)

    return Sample(
        max((each.ended_ns for each in chosen), default=0),
        seconds,
        sum((each.calls for each in chosen), zero),
        sum((each.size_bytes for each in chosen), zero),
        share("in_calls"),
        share("waiting"),
        share("held_up"),
        any(each.is_sampled for each in chosen),
    )


@dataclass
class Rates:
    """Turns the looks at one communicator into samples, and keeps those of the last seconds.

    Attributes
    ----------
    n_ranks : int
        Its ranks on this host.
    looked_ns : int
        When it was looked at last.
    samples : deque of Sample
        The oldest first.
    last : void of `CALL` or None
        The call that ended last.
    """

    n_ranks: int
    looked_ns: int
    samples: deque[Sample] = field(default_factory=deque)
    last: np.void | None = None

    def __post_init__(self) -> None:
        self._register = Register(self.n_ranks)
        self._recent: deque[npt.NDArray[np.void]] = deque()

    def add(self, found: Calls, pending: Pending, now_ns: int, kept_s: float = KEPT_S) -> Sample:
        """Take a look: the calls that ended since the one before, and what ranks are in now."""
        calls, window = _newest(found, (self.looked_ns, now_ns))
        sample = self._sample(found, calls, pending, window, now_ns)
        self.looked_ns = now_ns
        self.samples.append(sample)
        while self.samples[0].ended_ns <= now_ns - kept_s * 1e9:
            self.samples.popleft()
        self._remember(calls)
        return sample

    def _sample(
        self,
        found: Calls,
        calls: npt.NDArray[np.void],
        pending: Pending,
        window: tuple[int, int],
        now_ns: int,
    ) -> Sample:
        passed_ns = max(now_ns - self.looked_ns, 1)
        is_sampled = window != (self.looked_ns, now_ns)
        if is_sampled:  # what the register has kept will never be complete
            self._register = Register(self.n_ranks)
        meetings = self._register.add(Calls(found.segment, calls, found.missed))

        def share(rank: Times, begun: Times, ended: Times, since: Times) -> Floats:
            if not is_sampled:
                return self._share(rank, begun, ended, since, window)
            known = self._share(rank, begun, ended, np.zeros_like(since), window)
            left = np.where(since, now_ns - np.maximum(since, self.looked_ns), 0) / passed_ns
            return left + known * (1 - left)  # before, it went on as in the calls that are known

        met, held_up = meetings.calls, meetings.held_up_ns
        begun = met["begun_ns"]
        last_ns = begun.max(axis=1, keepdims=True, initial=0)
        own = calls[(calls["kind"] != SpanKind.PART) & (calls["kind"] != SpanKind.GPU)]
        return Sample(
            now_ns,
            passed_ns / 1e9,
            *self._counts(found),
            share(own["rank"], own["begun_ns"], own["ended_ns"], pending.in_call),
            share(met["rank"], begun, begun + meetings.waited_ns, pending.waiting),
            share(met["rank"], last_ns - held_up, last_ns, pending.awaited),
            is_sampled,
        )

    def _counts(self, found: Calls) -> tuple[Floats, Floats]:
        """Return by rank the number of calls and the bytes of their inputs.

        Of calls that are only counted, as many are parts of others as among those that are seen.
        """
        rank, is_whole = found.calls["rank"], found.calls["kind"] != SpanKind.PART
        is_input = is_whole & (found.calls["kind"] != SpanKind.RECV)
        seen, whole, size_bytes = (
            np.bincount(rank, weights, self.n_ranks)
            for weights in (np.ones(len(rank)), is_whole, is_input * found.calls["size_bytes"])
        )
        scale = (seen + found.missed) / np.maximum(seen, 1)
        return whole * scale, size_bytes * scale

    def _share(
        self, rank: Times, begun: Times, ended: Times, since: Times, window: tuple[int, int]
    ) -> Floats:
        """Return, by rank, the share of a window that calls cover, and what is pending since.

        `begun` and `ended` are broadcast to the shape of `rank`.
        """
        start_ns, now_ns = window
        length = max(now_ns - start_ns, 1)
        begun, ended = (np.broadcast_to(each, rank.shape).ravel() for each in (begun, ended))
        pending = np.flatnonzero(since)
        rank = np.concatenate([rank.ravel(), pending])
        begun = np.concatenate([begun, since[pending]])
        ended = np.concatenate([ended, np.full(len(pending), now_ns)])
        # One line of time with a stretch for each rank: all unions are found at once.
        stretch = rank * (length + 1) - start_ns
        begun = np.clip(begun, start_ns, now_ns) + stretch
        ended = np.clip(ended, start_ns, now_ns) + stretch
        order = np.argsort(begun)
        rank, begun, ended = rank[order], begun[order], ended[order]
        before = np.concatenate([[np.iinfo(np.int64).min], np.maximum.accumulate(ended)[:-1]])
        covered = np.maximum(ended - np.maximum(begun, before[: len(ended)]), 0)
        return np.bincount(rank, covered, self.n_ranks) / length

    def _remember(self, calls: npt.NDArray[np.void]) -> None:
        """Keep the newest calls, for `recent`."""
        if not len(calls):
            return
        self.last = calls[calls["ended_ns"].argmax()]
        self._recent.append(calls)
        while sum(map(len, self._recent)) > _RECENT_CALLS:
            self._recent.popleft()

    def recent(self, rank: int) -> npt.NDArray[np.void]:
        """Return the calls of a rank that are known still, the oldest first."""
        kept = [calls[calls["rank"] == rank] for calls in self._recent]
        return np.concatenate([np.zeros(0, CALL), *kept])


def _newest(found: Calls, window: tuple[int, int]) -> tuple[npt.NDArray[np.void], tuple[int, int]]:
    """Return at most `MOST_CALLS`, and the time in which they are all calls that there were.

    That is less than the window if ranks have overwritten calls, or if there are more. It then ends
    when one of the ranks ended its last call: ranks are read one after the other.
    """
    calls = found.calls
    if not np.any(found.missed) and len(calls) <= MOST_CALLS:
        return calls, window
    by_rank = [calls[calls["rank"] == rank] for rank in range(len(found.missed))]
    start_ns, end_ns = window
    for own, missed in zip(by_rank, found.missed, strict=True):
        if len(own):
            start_ns = max(start_ns, int(own["begun_ns"].min()) if missed else 0)
            end_ns = min(end_ns, int(own["ended_ns"].max()))
    if len(calls) > MOST_CALLS:
        ended = calls["ended_ns"]
        start_ns = max(start_ns, int(np.partition(ended, -MOST_CALLS)[-MOST_CALLS]))
        calls = calls[ended >= start_ns]
    if end_ns <= start_ns:  # one of them has long stopped to make calls
        end_ns = max(int(calls["ended_ns"].max(initial=0)), start_ns + 1)
    return calls, (start_ns, end_ns)


# --- the calls of one rank ------------------------------------------------------------------------


@dataclass(frozen=True)
class CallTimes:
    """Calls of one collective and size; times are in seconds."""

    name: str
    size_bytes: int
    count: int
    p50_s: float
    p99_s: float


def times_by_call(calls: npt.NDArray[np.void]) -> list[CallTimes]:
    """Return how long calls took, by collective and size; those that took the most time first."""
    calls = calls[calls["kind"] != SpanKind.PART]
    kinds, group = np.unique(calls[["kind", "collective", "size_bytes"]], return_inverse=True)
    seconds = (calls["ended_ns"] - calls["begun_ns"]) / 1e9
    found = []
    for place, (kind, collective, size_bytes) in enumerate(kinds.tolist()):
        times = seconds[group == place]
        p50_s, p99_s = np.percentile(times, [50, 99])
        found.append(
            (times.sum(), CallTimes(called(kind, collective), size_bytes, len(times), p50_s, p99_s))
        )
    return [each for _, each in sorted(found, key=lambda item: -item[0])]


def called(kind: int, collective: int) -> str:
    """Return the name of a call, as the method is spelled."""
    if kind in (SpanKind.SEND, SpanKind.RECV):
        return SpanKind(kind).name.lower()
    try:
        return Collective(collective).spelled
    except ValueError:
        return f"call {collective}"
