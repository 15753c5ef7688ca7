"""The measurement of programs: runs one after another, the libraries in turn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpucoll.bench.arguments import Options
from gpucoll.bench.figures import FIGURES
from gpucoll.bench.groups import GroupError
from gpucoll.bench.programs import Program, Run
from gpucoll.bench.progress import Progress
from gpucoll.bench.rank.hello import DUPLICATES
from gpucoll.bench.results import Measurement, Results, Row

__all__ = ["START_S", "ProgramBench"]

START_S = 60.0  # for a library's ranks to meet: a first import from a cold disk is slow

STEPS = {"communicator": 1, "duplicate": DUPLICATES}
"""What is made between two readings of the memory, and how many of it."""

FIGURES_OF_RANKS = ("joined_s", "cpu_s", "peak_bytes")
"""Figures of the rank with the largest value."""


class ProgramBench:
    """Measures one program of each library, in turn.

    Parameters
    ----------
    options : Options
        The options, with the current program.
    programs : list of Program
        gpucoll's program first; if it fails, the run fails. A peer's that fails is removed.
    results : Results
        Collects the results.
    report : callable
        Called with the rows.
    complain : callable
        Called with a line about a peer that failed.
    progress : Progress
        Told of each round and program.
    """

    def __init__(
        self,
        options: Options,
        programs: list[Program],
        results: Results,
        report: Callable[[list[Row], Row | None], None],
        complain: Callable[[str], None],
        progress: Progress,
    ) -> None:
        self.options = options
        self.programs = programs
        self.results = results
        self.report = report
        self.complain = complain
        self.progress = progress
        self.own = programs[0]

    def run(self) -> None:
        """Measure the program: its time in several rounds, its memory, which is stable, once."""
        is_memory = self.options.collective == "memory"
        rounds = 1 if is_memory else self.options.rounds
        self.progress.begin(self.options.collective, rounds)
        runs: dict[str, list[Run]] = {}
        for number in range(rounds):
            self.progress.end_round(number)
            start = number % len(self.programs)
            for program in [*self.programs[start:], *self.programs[:start]]:
                self.progress.show(program.name)
                self.run_once(program, runs.setdefault(program.name, []))
        self.progress.end()
        make = self.memory if is_memory else self.startup
        rows = [make(program.name, runs[program.name]) for program in self.programs]
        self.results.rows += rows
        self.report(rows, None)

    def run_once(self, program: Program, runs: list[Run]) -> None:
        """Add a run; remove a peer that fails."""
        try:
            timeout_s = max(self.options.timeout_s, START_S)
            runs.append(program.run(self.options.collective, timeout_s))
        except GroupError as error:
            if program is self.own:
                raise
            self.programs.remove(program)
            self.results.failures.append(f"{error}")
            self.progress.clear()
            self.complain(f"{error}\n{program.name} is left out from here on")

    def startup(self, library: str, runs: list[Run]) -> Row:
        """Return the time and resources that the runs took."""
        samples_us = np.array([[run.wall_s * 1e6 for run in runs]])
        wrong = sum(run.wrong for run in runs) if self.options.check else None
        figures = {name: [run.slowest(name) for run in runs] for name in FIGURES_OF_RANKS}
        figures["job_cpu_s"] = [run.cpu_s for run in runs]
        return self.row(
            library,
            Measurement(samples_us, 1, wrong),
            {name: float(np.median(figures[name])) for name in FIGURES if name in figures},
        )

    def memory(self, library: str, runs: list[Run]) -> Row:
        """Return what a communicator and a duplicate take; shared memory is that of all ranks."""
        (run,) = runs
        figures: dict[str, float] = {}
        looks = [answer["stages"] for answer in run.answers]
        shared = [run.shared_bytes_before, *(look["shared_bytes"] for look in looks[0][1:])]
        for number, (step, made) in enumerate(STEPS.items()):
            figures[f"{step}_shared_bytes"] = (shared[number + 1] - shared[number]) / made
            for name in ("private_bytes", "address_space_bytes", "descriptors"):
                taken = [look[number + 1][name] - look[number][name] for look in looks]
                figures[f"{step}_{name}"] = max(taken) / made
        return self.row(library, None, figures)

    def row(self, library: str, side: Measurement | None, figures: dict[str, float]) -> Row:
        """Return the row of a library."""
        return Row(
            library, "private", self.options.collective, self.own.ranks, 0, 0, "none", "none", -1,
            side, None, figures=figures,
        )  # fmt: skip
