"""One rank's part in the measurement: answers the driver's commands, one at a time."""

from __future__ import annotations

import gc
import os
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from gpucoll.bench.rank import inputs
from gpucoll.bench.rank.library import Call, Library, Loop
from gpucoll.bench.rank.loops import timed

__all__ = ["Session"]

CHECKED_JOBS = 50


class Session:
    """Holds the arrays and loops of the current size, and runs them on command.

    Every command is a dictionary with ``do``, the name of a method below, and that method's
    arguments. Every answer has the results, or ``error``. Case names are ``variant/placement of the
    result``, such as ``symmetric/in_place``.

    Parameters
    ----------
    library : Library
        The measured library.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.calls: dict[str, Call] = {}
        self.loops: dict[str, Loop] = {}
        gc.disable()  # a collection during a loop would be counted as the library's time

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Execute a command; turn an exception into an answer, too."""
        arguments = dict(command)
        try:
            methods: dict[str, Callable[..., dict[str, Any]]] = {
                "describe": self.describe,
                "bind": self.bind,
                "prepare": self.prepare,
                "check": self.check,
                "measure": self.measure,
                "single_calls": self.single_calls,
                "clock": self.clock,
                "release": self.release,
            }
            method = methods[arguments.pop("do")]
            answer: dict[str, Any] = method(**arguments)
            return answer
        except Exception as error:
            return {
                "error": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc(),
            }

    def describe(self) -> dict[str, Any]:
        """Return this rank, its CPUs, and the library's versions."""
        library = self.library
        return {
            "rank": library.rank,
            "world_size": library.world_size,
            "cpus": sorted(os.sched_getaffinity(0)),
            "versions": library.versions(),
        }

    def bind(self, cpu: int) -> dict[str, Any]:
        """Bind this thread, and those that it starts later, to one CPU."""
        os.sched_setaffinity(0, {cpu})
        return {}

    def prepare(
        self,
        collective: str,
        dtype: str,
        redop: str,
        root: int,
        count: int,
        variants: list[str],
        list_length: int = 1,
        work_s: float = 0.0,
    ) -> dict[str, Any]:
        """Allocate and touch the arrays, build the loops; return the names of the cases."""
        self.release()
        if dtype == "none":  # a barrier, or jobs: there is nothing to allocate, and only one side
            call = Call(collective, "private", dtype, redop, root, None, None, in_place=False)
            self.add("private/out_of_place", call)
            return {"cases": list(self.loops)}
        sides: dict[str, dict[str, tuple[Any, Any]]] = {}
        for variant in variants:
            placement = "symmetric" if variant == "symmetric" else "private"
            if placement not in sides:
                sides[placement] = self.arrays(placement, collective, count * list_length, dtype)
            for side, pair in sides[placement].items():
                in_place = side == "in_place"
                call = Call(collective, variant, dtype, redop, root, *pair, in_place, list_length)
                self.add(f"{variant}/{side}", replace(call, work_s=work_s))
        return {"cases": list(self.loops)}

    def add(self, case: str, call: Call) -> None:
        """Build the loop of a case if the library supports it."""
        loop = self.library.loop(call)
        if loop is not None:
            self.calls[case] = call
            self.loops[case] = loop

    def arrays(
        self, placement: str, collective: str, count: int, dtype: str
    ) -> dict[str, tuple[Any, Any]]:
        """Return input and output, filled with ones, out of place and in place."""
        library = self.library
        source, destination = (
            library.allocate(placement, length, dtype)
            for length in inputs.lengths(collective, count, library.world_size)
        )
        for array in (source, destination):
            library.arrays.edit(array, partial(inputs.fill_with_one, dtype=dtype))
        reduce_scatter = inputs.plain(collective) == "reduce_scatter"
        block = library.reduce_scatter_block if reduce_scatter else library.rank
        return {
            "out_of_place": (source, destination),
            "in_place": inputs.in_place_pair(source, destination, block),
        }

    def check(self, case: str) -> dict[str, Any]:
        """Make the call once on inputs with a known result; return how many elements are wrong."""
        call, rank, ranks = self.calls[case], self.library.rank, self.library.world_size
        if call.source is None:
            return self.check_jobs(self.loops[case])
        arrays = self.library.arrays
        redop = "sum" if call.redop == "none" else call.redop
        given = inputs.encode(inputs.values(redop, call.dtype, rank, ranks), call.dtype)
        size = len(call.destination)
        parts = inputs.expected(
            call.collective, call.redop, call.dtype, call.root, rank, ranks, size
        )
        arrays.edit(call.destination, inputs.poison)
        arrays.edit(call.source, partial(inputs.fill, period=given))
        self.loops[case](1)
        path = self.library.path()
        periods = [inputs.encode(part, call.dtype) for part in parts]
        wrong = inputs.count_wrong(arrays.read(call.destination), periods)
        if not call.in_place:  # the call must not write to its input
            wrong += inputs.count_wrong(arrays.read(call.source), [given])
        arrays.edit(call.source, partial(inputs.fill_with_one, dtype=call.dtype))
        return {"wrong": wrong, "path": path} if path else {"wrong": wrong}

    def check_jobs(self, loop: Any) -> dict[str, Any]:
        """Run a loop that counts its own wrong results."""
        loop(CHECKED_JOBS)
        return {"wrong": loop.wrong}

    def measure(self, case: str, reps: int) -> dict[str, Any]:
        """Return the seconds of `reps` calls in direct succession, which all ranks start at once.

        Also return the seconds of CPU time that all threads of this process took for them.
        """
        loop = self.loops[case]
        loop(1)  # other libraries have used the caches since the last call
        self.library.barrier()
        cpu_begun = time.process_time()
        seconds = loop(reps)
        cpu_seconds = time.process_time() - cpu_begun
        self.library.barrier()  # no rank goes to sleep while a peer may still need it
        return {"seconds": seconds, "cpu_seconds": cpu_seconds}

    def single_calls(self, case: str, calls: int) -> dict[str, Any]:
        """Return the nanoseconds of each of several calls, which follow one another.

        Between two calls, about a microsecond passes in this loop. There is no barrier, because the
        ranks' ways out of a library's barrier would count as the time of its call.
        """
        loop = self.loops[case]
        loop(1)
        self.library.barrier()
        seconds = [loop(1) for _ in range(calls)]
        self.library.barrier()
        return {"nanoseconds": [round(1e9 * one) for one in seconds]}

    def clock(self) -> dict[str, Any]:
        """Return the nanoseconds that the timing of a call takes: the median of no calls."""
        loop = timed("pass")
        return {"nanoseconds": 1e9 * statistics.median(loop(1) for _ in range(1000))}

    def release(self) -> dict[str, Any]:
        """Release the arrays and loops."""
        self.calls.clear()
        self.loops.clear()
        return {}
