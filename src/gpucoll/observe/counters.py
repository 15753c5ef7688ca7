"""Numbers about a job that only grow, or tell how it is now: what monitoring systems collect.

`METRICS` is the table of them. `Numbers` counts for one job; `gpucoll.observe.follow` feeds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gpucoll.collectives import Collective
from gpucoll.observe.look import Job, RankLook
from gpucoll.observe.meetings import Meetings
from gpucoll.observe.processes import Process
from gpucoll.observe.watch import Calls
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.spans import SpanKind

__all__ = ["DURATION_BOUNDS_NS", "METRICS", "Durations", "Metric", "Numbers", "Sample"]

Ints = npt.NDArray[np.int64]

DURATION_BOUNDS_NS: Ints = 1000 * 2 ** np.arange(27, dtype=np.int64)
"""Upper bounds of the buckets of durations: powers of two times 1 us, up to 67 s."""
SIZE_BOUNDS: Ints = np.concatenate([[0], 2 ** np.arange(41, dtype=np.int64)])
"""Sizes are rounded up to one of these; larger ones count as the last, 1 TiB."""


class Metric(NamedTuple):
    """One metric, in the conventions of Prometheus."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    """Its labels after ``job_id``, which all have."""


_CALL = ("communicator", "rank", "collective", "device")
_RANK = ("communicator", "rank")

METRICS = {
    each.name: each
    for each in (
        Metric(
            "gpucoll_calls_total",
            "counter",
            "Collectives and messages that a rank has ended. Those that the rank had overwritten "
            'before they were read have collective="unknown".',
            _CALL,
        ),
        Metric(
            "gpucoll_input_bytes_total",
            "counter",
            "Bytes of the inputs of calls; of a receive, the bytes that came.",
            _CALL,
        ),
        Metric(
            "gpucoll_call_duration_seconds",
            "histogram",
            "How long calls took, on all ranks; by the input's size, rounded up to a power of two.",
            ("collective", "device", "size_bytes"),
        ),
        Metric(
            "gpucoll_wait_seconds_total",
            "counter",
            "How long a rank waited in collectives for the rank of this host that came last.",
            _RANK,
        ),
        Metric(
            "gpucoll_held_up_seconds_total",
            "counter",
            "How long a rank alone made the others wait: from when the last but one came.",
            _RANK,
        ),
        Metric(
            "gpucoll_last_arrivals_total",
            "counter",
            "Collectives to which a rank came last of the ranks of this host.",
            _RANK,
        ),
        Metric(
            "gpucoll_mismatches_total",
            "counter",
            "Collectives in which the ranks' calls differed, and after which they could go on.",
        ),
        Metric(
            "gpucoll_aborts_total",
            "counter",
            "Communicators that broke, by reason: deadline, lost, mismatch, interrupted, "
            "requested, other.",
            ("reason",),
        ),
        Metric(
            "gpucoll_rank_errors_total",
            "counter",
            "Ranks that closed a communicator because of an exception.",
        ),
        Metric("gpucoll_shrinks_total", "counter", "Communicators that survivors replaced."),
        Metric("gpucoll_grows_total", "counter", "Communicators that grew."),
        Metric(
            "gpucoll_ranks",
            "gauge",
            "Processes of the job on this host, by state: outside (of gpucoll), in_call, waiting "
            "(in a call, for at least 20 ms), stopped, ended.",
            ("state",),
        ),
        Metric(
            "gpucoll_rank_waiting_seconds",
            "gauge",
            "For how long a rank has been waiting in its present call; 0: it does not wait.",
            _RANK,
        ),
        Metric(
            "gpucoll_job_stuck",
            "gauge",
            "1 if ranks have waited for 2 s and nothing moves (see gpucoll why), otherwise 0.",
        ),
        Metric("gpucoll_job_info", "gauge", "1; the program that the job runs.", ("program",)),
        Metric(
            "gpucoll_communicator_ranks",
            "gauge",
            "Ranks of an open communicator, with those of other hosts; its name if it has one; its "
            "group, if it spans hosts: the same on all of them.",
            ("communicator", "name", "group"),
        ),
        Metric(
            "gpucoll_process_cpu_seconds_total",
            "counter",
            "CPU time of a rank's process. A process that takes a rank over adds its own.",
            ("rank",),
        ),
        Metric(
            "gpucoll_process_resident_memory_bytes",
            "gauge",
            "Memory of a rank's process.",
            ("rank",),
        ),
        Metric(
            "gpucoll_process_swap_bytes",
            "gauge",
            "Memory of a rank's process that was moved to a swap device.",
            ("rank",),
        ),
    )
}
"""All metrics by name."""

UNKNOWN = "unknown"
_MESSAGES = {SpanKind.SEND: Collective.SEND, SpanKind.RECV: Collective.RECV}
STATES = ("outside", "in_call", "waiting", "stopped", "ended")
_REASONS = {
    "deadline": (
        *(Abort.DEADLINE, Abort.MESSAGE_DEADLINE, Abort.ENQUEUED_DEADLINE),
        Abort.ENQUEUED_MESSAGE,
    ),
    "lost": (Abort.LOST, Abort.ENQUEUED_LOST),
    "mismatch": (Abort.MISMATCH, Abort.ENQUEUED_MISMATCH),
    "interrupted": (Abort.INTERRUPTED,),
    "requested": (Abort.REQUESTED,),
    "other": (),
}


@dataclass
class Durations:
    """A histogram of durations.

    Attributes
    ----------
    counts : array of int64
        The calls up to each of `DURATION_BOUNDS_NS` and above the bound before; then longer ones.
    seconds : float
        Their sum.
    """

    counts: Ints = field(default_factory=lambda: np.zeros(len(DURATION_BOUNDS_NS) + 1, np.int64))
    seconds: float = 0.0


class Sample(NamedTuple):
    """The value of a metric for some labels, which are in the order of `label_names`."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | Durations

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the labels."""
        return ("job_id", *self.metric.labels)


class Numbers:
    """What is known of one job.

    Parameters
    ----------
    job_id : str
        Tells it from the other jobs of this host.
    """

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self._counters = Counter[tuple[str, tuple[str, ...]]]()
        self._gauges: dict[tuple[str, tuple[str, ...]], float] = {}
        self._durations: dict[tuple[str, ...], Durations] = {}
        # A counter that exists only from its first event on shows no increase at that event.
        for name in ("mismatches", "rank_errors", "shrinks", "grows"):
            self.add(f"gpucoll_{name}_total", 0)
        for reason in _REASONS:
            self.add("gpucoll_aborts_total", 0, reason)

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add to a counter."""
        self._counters[name, labels] += value  # type: ignore[assignment]

    def add_abort(self, code: int) -> None:
        """Count a communicator that broke, by its code in the abort word."""
        found = (reason for reason, codes in _REASONS.items() if code in codes)
        self.add("gpucoll_aborts_total", 1, next(found, "other"))

    def add_calls(self, communicator: str, ranks: Sequence[str], found: Calls) -> None:
        """Count calls of a communicator whose ranks have these numbers.

        Parts of calls between hosts are not counted: those calls are there as a whole.
        """
        for number, missed in zip(ranks, found.missed.tolist(), strict=True):
            if missed:
                self.add("gpucoll_calls_total", missed, communicator, number, UNKNOWN, UNKNOWN)
        calls = found.calls[found.calls["kind"] != SpanKind.PART]
        is_gpu, what = calls["kind"] == SpanKind.GPU, calls["collective"]
        for kind, message in _MESSAGES.items():
            what = np.where(calls["kind"] == kind, int(message), what)
        keys, places = _grouped(calls["rank"], what, is_gpu)
        counts = np.bincount(places, minlength=len(keys))
        sizes = np.bincount(places, np.maximum(calls["size_bytes"], 0), len(keys))
        rows = zip(keys, counts.tolist(), sizes.tolist(), strict=True)
        for (rank, collective, gpu), count, size in rows:
            labels = (communicator, ranks[rank], _name_of(collective), _device(gpu))
            self.add("gpucoll_calls_total", count, *labels)
            self.add("gpucoll_input_bytes_total", size, *labels)
        self._add_durations(calls, what, is_gpu)

    def _add_durations(
        self, calls: npt.NDArray[np.void], what: Ints, is_gpu: npt.NDArray[np.bool_]
    ) -> None:
        size = np.searchsorted(SIZE_BOUNDS[:-1], calls["size_bytes"])
        keys, places = _grouped(what, is_gpu, size)
        taken_ns = np.maximum(calls["ended_ns"] - calls["begun_ns"], 0)
        buckets = len(DURATION_BOUNDS_NS) + 1
        bucket = np.searchsorted(DURATION_BOUNDS_NS, taken_ns)
        counts = np.bincount(places * buckets + bucket, minlength=len(keys) * buckets)
        sums_ns = np.bincount(places, taken_ns, len(keys))
        for number, (collective, gpu, place) in enumerate(keys):
            labels = (_name_of(collective), _device(gpu), str(SIZE_BOUNDS[place]))
            one = self._durations.setdefault(labels, Durations())
            # A new object: who holds the sample of before goes on reading that one.
            added = counts[number * buckets : (number + 1) * buckets]
            seconds = one.seconds + float(sums_ns[number]) / 1e9
            self._durations[labels] = Durations(one.counts + added, seconds)

    def add_meetings(self, communicator: str, ranks: Sequence[str], found: Meetings) -> None:
        """Count the waits in collectives in which all ranks have been."""
        last = np.bincount(found.last, minlength=len(ranks))
        if len(ranks) == 1:  # nobody is late
            last[:] = 0
        waited, held_up = found.waited_ns.sum(axis=0), found.held_up_ns.sum(axis=0)
        for place, rank in enumerate(ranks):
            self.add("gpucoll_wait_seconds_total", waited[place] / 1e9, communicator, rank)
            self.add("gpucoll_held_up_seconds_total", held_up[place] / 1e9, communicator, rank)
            self.add("gpucoll_last_arrivals_total", int(last[place]), communicator, rank)

    def set_gauges(self, job: Job, communicators: Sequence[str], is_stuck: bool) -> None:
        """Replace the numbers that tell how the job is now.

        Parameters
        ----------
        job : Job
            A look at it.
        communicators : sequence of str
            The labels of its communicators, in their order.
        is_stuck : bool
            Whether ranks of it wait for long and nothing moves.
        """
        self._gauges = {("gpucoll_job_stuck", ()): float(is_stuck)}
        by_pid: dict[int, list[RankLook]] = {}
        for one in job.ranks:
            by_pid.setdefault(one.pid, []).append(one)
            key = "gpucoll_rank_waiting_seconds", (communicators[one.communicator], str(one.rank))
            self._gauges[key] = max(one.since_s or 0.0, self._gauges.get(key, 0.0))
        states = Counter(_state_of(job.processes[pid], looks) for pid, looks in by_pid.items())
        for state in STATES:
            self._gauges["gpucoll_ranks", (state,)] = states[state]
        for pid, process in job.processes.items():
            if process is not None:
                rank = (str(job.number(pid)),)
                for name, size_bytes in (
                    ("gpucoll_process_resident_memory_bytes", process.rss_bytes),
                    ("gpucoll_process_swap_bytes", process.swap_bytes),
                ):  # ranks of different communicators may have the same number
                    self._gauges[name, rank] = self._gauges.get((name, rank), 0) + size_bytes

    def set_gauge(self, name: str, value: float, *labels: str) -> None:
        """Set one number that tells how the job is now, until the next `set_gauges`."""
        self._gauges[name, labels] = value

    def clear_gauges(self) -> None:
        """Forget how the job is now: it has ended."""
        self._gauges = {}

    def samples(self) -> Iterator[Sample]:
        """Yield all values."""
        for values in (self._counters, self._gauges):
            for (name, labels), value in values.items():
                yield Sample(METRICS[name], (self.job_id, *labels), float(value))
        metric = METRICS["gpucoll_call_duration_seconds"]
        for labels, durations in self._durations.items():
            yield Sample(metric, (self.job_id, *labels), durations)


def _grouped(*columns: npt.NDArray[Any]) -> tuple[list[list[int]], Ints]:
    """Return the different rows of some columns, and for each row which of these it is."""
    rows = np.stack([column.astype(np.int64) for column in columns], axis=1)
    code = rows[:, 0]
    for column in range(1, rows.shape[1]):
        code = code << 16 | rows[:, column]
    _, first, places = np.unique(code, return_index=True, return_inverse=True)
    return rows[first].tolist(), places


def _name_of(collective: int) -> str:
    try:
        return Collective(collective).spelled
    except ValueError:  # not a rank's making
        return UNKNOWN


def _device(is_gpu: int) -> str:
    return "gpu" if is_gpu else "host"


def _state_of(process: Process | None, looks: list[RankLook]) -> str:
    if process is None or process.has_ended:
        return "ended"
    if process.is_stopped:
        return "stopped"
    if any(one.since_s is not None for one in looks):
        return "waiting"
    return "in_call" if any(one.is_in_call for one in looks) else "outside"
