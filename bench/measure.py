"""The measurement: for each size check, calibrate, then sample all cases in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from gpucoll.bench.arguments import Options
from gpucoll.bench.collectives import item_bytes
from gpucoll.bench.estimates import Samples
from gpucoll.bench.groups import Group, GroupError
from gpucoll.bench.progress import Progress
from gpucoll.bench.results import LEAST_SINGLE_CALLS, LIMITS, Measurement, Results, Row
from gpucoll.bench.summary import SIDE_TITLES, size_text

__all__ = ["Bench", "Report", "seconds_of_samples"]

PILOT_S = 0.003
LEAST_REPS = 3
UNCHECKED = (*LIMITS, "work")
MOST_REPS = 20_000
MOST_SINGLE_CALLS = 9_000
MOST_SINGLE_CALLS_S = 2.0
"""Time for all single calls of a case at one size."""

Report = Callable[[list[Row], Row | None], None]
"""Receives the rows of one size, and the memory limit if it was measured."""


@dataclass
class Case:
    """One library's call, in place or out of place, at the current size."""

    group: Group
    name: str
    reps: int = LEAST_REPS
    wrong: int | None = None
    path: str = ""
    rounds_us: list[list[float]] = field(default_factory=list)
    cpu_us: list[list[float]] = field(default_factory=list)
    single_us: list[Samples] | None = None

    @property
    def variant(self) -> str:
        """The variant of the library, as in `rank.library.Call`."""
        return self.name.partition("/")[0]

    @property
    def title(self) -> str:
        """The library and the case, for people: ``gpucoll symmetric, in place``."""
        side = SIDE_TITLES[self.name.partition("/")[2]]
        variant = "" if self.variant == "private" else f" {self.variant}"
        return f"{self.group.name}{variant}, {side}"

    @property
    def call_s(self) -> float:
        """The slowest rank's seconds per call in the last sample."""
        return max(self.rounds_us[-1]) / 1e6

    def measurement(self) -> Measurement:
        """Return the samples, by rank and round."""
        single_us = None
        if self.single_us is not None:
            single_us = np.concatenate([np.empty(0), *self.single_us])
        samples, cpu_us = np.array(self.rounds_us).T, np.array(self.cpu_us).T
        return Measurement(samples, self.reps, self.wrong, self.path, cpu_us, single_us)


class Bench:
    """Measures one collective of gpucoll and its peers as the options say.

    Parameters
    ----------
    options : Options
        The options, with the current collective.
    own : Group
        gpucoll's ranks; if they fail, the run fails.
    peers : list of Group
        The other libraries; one that fails is ended and removed from the list.
    results : Results
        Collects the results.
    report : callable
        Called with the rows of each size as soon as they are complete.
    complain : callable
        Called with a line about a peer that failed.
    note : callable
        Called with a line about something that has no results.
    progress : Progress
        Told of each step, round and case.
    """

    def __init__(
        self,
        options: Options,
        own: Group,
        peers: list[Group],
        results: Results,
        report: Report,
        complain: Callable[[str], None],
        note: Callable[[str], None],
        progress: Progress,
    ) -> None:
        self.options = options
        self.own = own
        self.peers = peers
        self.results = results
        self.report = report
        self.complain = complain
        self.note = note
        self.progress = progress
        self.what = ""

    def run(self) -> None:
        """Measure every size of every dtype and reduction."""
        for step in self.options.steps(self.own.ranks):
            self.measure_size(*step)

    def measure_size(self, dtype: str, redop: str, count: int) -> None:
        """Measure every library at one size, and report the results."""
        self.what = self.title(dtype, redop, count)
        self.progress.begin(self.what, self.options.rounds)
        cases: list[Case] = []
        for group in [self.own, *self.peers]:
            self.progress.show(f"{group.name}, checking")
            with self.tolerating(group):
                cases += self.prepare(group, dtype, redop, count)
        for number in range(self.options.rounds):
            self.progress.end_round(number)
            for position in range(len(cases)):
                # Each round starts with another case, because a case affects its successor through
                # the caches.
                case = cases[(position + number) % len(cases)]
                if self.alive(case.group):
                    self.progress.show(case.title)
                    with self.tolerating(case.group):
                        self.keep_sample(case)
        if self.options.percentiles and not self.options.traits.checks_itself:
            self.time_single_calls([case for case in cases if case.variant not in LIMITS])
        cases = [case for case in cases if self.alive(case.group)]
        rows = self.rows(cases, dtype, redop, count)
        limit = next((row for row in rows if row.library in LIMITS), None)
        rows = [row for row in rows if row is not limit]
        self.results.rows += rows
        self.results.limits += [limit] if limit else []
        self.progress.end([case.call_s for case in cases])
        if not rows:
            self.note(f"{self.options.collective} of {dtype}, {redop}: no library here has it")
        self.report(rows, limit)
        for group in [self.own, *self.peers]:
            with self.tolerating(group):
                group.call("release", self.options.timeout_s)

    def title(self, dtype: str, redop: str, count: int) -> str:
        """Return what is measured at one size: ``all_reduce float32 sum 64 KiB``."""
        words = [self.options.collective, *(word for word in (dtype, redop) if word != "none")]
        if self.options.traits.has_data:
            size = size_text(count * item_bytes(dtype))
            words.append(f"{size}B" if size.endswith("i") else f"{size} B")
        return " ".join(words)

    def prepare(self, group: Group, dtype: str, redop: str, count: int) -> list[Case]:
        """Allocate the arrays, check the results, and choose the number of calls in a sample."""
        answers = group.call(
            "prepare",
            self.options.timeout_s,
            collective=self.options.collective,
            dtype=dtype,
            redop=redop,
            root=self.options.root,
            count=count,
            variants=self.options.variants if group is self.own else self.options.peer_variants,
            list_length=self.options.list_length,
            work_s=self.options.work_s,
        )
        cases = [Case(group, name) for name in answers[0]["cases"]]
        for case in cases:
            if self.options.check and self.is_checked(case, count):
                checked = group.call("check", self.options.timeout_s, case=case.name)
                case.wrong = sum(answer["wrong"] for answer in checked)
                case.path = checked[0].get("path", "")
            self.calibrate(case)
        return cases

    def is_checked(self, case: Case, count: int) -> bool:
        """Return whether a case has a result that can be checked."""
        return case.variant not in UNCHECKED and (count > 0 or self.options.traits.checks_itself)

    def calibrate(self, case: Case) -> None:
        """Warm up, and choose the number of calls in a sample."""
        options = self.options
        if options.warmup is not None and options.warmup > 0:
            self.sample(case, options.warmup)
        if options.reps is not None:
            case.reps = options.reps
            if options.warmup is not None:
                return
        reps, call_s = LEAST_REPS, 0.0
        while True:
            call_s = max(self.sample(case, reps)[0]) / 1e6
            if reps * call_s >= PILOT_S or reps >= MOST_REPS:
                break
            reps = min(4 * reps, MOST_REPS)
        if options.reps is None:
            case.reps = min(max(round(options.sample_s / call_s), LEAST_REPS), MOST_REPS)

    def keep_sample(self, case: Case) -> None:
        """Take a sample and store it."""
        times_us, cpu_us = self.sample(case, case.reps)
        case.rounds_us.append(times_us)
        case.cpu_us.append(cpu_us)

    def time_single_calls(self, cases: list[Case]) -> None:
        """Time calls one by one, the cases in turns, a part of them in each."""
        rounds = self.options.rounds
        wanted = []
        for case in cases:
            case.single_us = []
            calls = single_calls(self.options, case.call_s)
            wanted.append(-(-calls // rounds))
        for number in range(rounds):
            for position in range(len(cases)):
                place = (position + number) % len(cases)
                case = cases[place]
                if wanted[place] and self.alive(case.group):
                    self.progress.show(f"{case.title}, single calls")
                    with self.tolerating(case.group):
                        self.keep_single_calls(case, wanted[place])

    def keep_single_calls(self, case: Case, calls: int) -> None:
        """Time some calls one by one, and store the slowest rank's time of each."""
        assert case.single_us is not None
        timeout_s = self.options.timeout_s + 20 * calls * case.call_s
        answers = case.group.call("single_calls", timeout_s, case=case.name, calls=calls)
        times = np.array([answer["nanoseconds"] for answer in answers])
        case.single_us.append(times.max(axis=0) / 1e3)

    def sample(self, case: Case, reps: int) -> tuple[list[float], list[float]]:
        """Return each rank's microseconds per call over `reps` calls: elapsed time and CPU time."""
        slowest_s = case.call_s if case.rounds_us else 0.0
        timeout_s = self.options.timeout_s + 20 * reps * slowest_s
        answers = case.group.call("measure", timeout_s, case=case.name, reps=reps)
        return (
            [answer["seconds"] / reps * 1e6 for answer in answers],
            [answer["cpu_seconds"] / reps * 1e6 for answer in answers],
        )

    def rows(self, cases: list[Case], dtype: str, redop: str, count: int) -> list[Row]:
        """Combine the in-place and out-of-place results of each library into rows."""
        sides: dict[tuple[str, str], dict[str, Measurement]] = {}
        for case in cases:
            variant, _, side = case.name.partition("/")
            sides.setdefault(named(case.group.name, variant), {})[side] = case.measurement()
        traits = self.options.traits
        return [
            Row(
                library,
                placement,
                self.options.collective,
                self.own.ranks,
                count * item_bytes(dtype) if traits.has_data else 0,
                count,
                dtype,
                redop,
                self.options.root if traits.has_root else -1,
                measured.get("out_of_place"),
                measured.get("in_place"),
                self.options.list_length,
            )
            for (library, placement), measured in sides.items()
        ]

    def alive(self, group: Group) -> bool:
        """Return whether the group is still being measured."""
        return group is self.own or group in self.peers

    @contextmanager
    def tolerating(self, group: Group) -> Iterator[None]:
        """Remove a peer if the block fails; a failure of gpucoll ends the run."""
        try:
            yield
        except GroupError as failure:
            error = f"{failure}\nit was measuring {self.what}"
            if group is self.own:
                raise GroupError(error) from failure
            self.peers.remove(group)
            group.close()
            self.results.failures.append(error)
            self.progress.clear()
            self.complain(f"{error}\n{group.name} was ended, and is left out from here on")


def seconds_of_samples(options: Options, call_s: float) -> float:
    """Return the seconds of all samples of a case whose call takes `call_s`."""
    reps = options.reps or LEAST_REPS
    sample_s = reps * call_s if options.reps else max(options.sample_s, reps * call_s)
    single_s = single_calls(options, call_s) * call_s if options.percentiles else 0.0
    return options.rounds * sample_s + single_s


def single_calls(options: Options, call_s: float) -> int:
    """Return how many calls to time alone: none if even `LEAST_SINGLE_CALLS` take too long."""
    if LEAST_SINGLE_CALLS * call_s > MOST_SINGLE_CALLS_S:
        return 0
    fitting = round(options.rounds * options.sample_s / max(call_s, 1e-9))
    return min(max(fitting, LEAST_SINGLE_CALLS), MOST_SINGLE_CALLS)


def named(library: str, variant: str) -> tuple[str, str]:
    """Return the table's names of library and placement."""
    if variant in LIMITS:
        return variant, "private"
    if variant == "plan":
        return f"{library}-plan", "private"
    if variant == "fused":
        return f"{library}-list", "private"
    return library, variant
