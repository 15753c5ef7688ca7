"""PyTorch's test case, with ranks that are forked from this process, which has loaded torch.

PyTorch's own starts each rank with a new interpreter (3 s), and looks every 0.1 s whether it has
ended, or whether others have come to a barrier.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import multiprocessing.sharedctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

BARRIER_S = 60.0  # a rank that fails ends the test, so that no barrier is waited for in vain
END_S = 10.0
POLL_S = 0.001
FAILED = 10  # how PyTorch's ranks end after an exception


class ForkedRanks:
    """What differs from PyTorch's case; `case_of` puts the two together."""

    module: Any
    log: Path
    limit_s: float
    arrivals: Any  # at how many barriers each rank has been

    # PyTorch's class has these.
    rank: int
    world_size: str
    processes: list[Any]
    skip_return_code_checks: list[Any]
    _start_processes: Any
    _check_return_codes: Any

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        self.module.INIT_METHOD = os.environ["INIT_METHOD"]  # a new file for each test
        size = int(self.world_size)
        type(self).arrivals = multiprocessing.sharedctypes.RawArray(ctypes.c_long, size)
        self._start_processes(multiprocessing.get_context("fork").Process)

    def tearDown(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(END_S)
            if process.exitcode is None:
                process.kill()
                process.join()
        super().tearDown()  # type: ignore[misc]

    @classmethod
    def _run(cls, *args: Any, **options: Any) -> None:
        """Run a rank, in its process."""
        log = os.open(cls.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        super()._run(*args, **options)  # type: ignore[misc]

    def _barrier(self, wait_for: int | None = None, timeout: float = BARRIER_S) -> None:
        wait_for = wait_for or int(self.world_size)
        self.arrivals[self.rank] += 1
        number = self.arrivals[self.rank]
        deadline = time.monotonic() + max(timeout, BARRIER_S)
        while sum(count >= number for count in self.arrivals) < wait_for:
            if time.monotonic() > deadline:
                counts = list(self.arrivals)
                raise RuntimeError(f"barrier timeout on rank {self.rank}: {counts=}, {wait_for=}")
            time.sleep(POLL_S)

    def _test_accumulate_gradients_no_sync(self, *args: Any, **options: Any) -> None:
        """Run a body that asks for the name, and has a model only for those that it knows."""
        usual, self.module.BACKEND = self.module.BACKEND, "gloo"
        try:
            super()._test_accumulate_gradients_no_sync(*args, **options)  # type: ignore[misc]
        finally:
            self.module.BACKEND = usual

    def _join_processes(self, function: Any) -> None:
        begin = time.monotonic()
        running = list(self.processes)
        while running:
            left_s = begin + self.limit_s - time.monotonic()
            if left_s <= 0 or any(_is_failed(process) for process in self.processes):
                break
            multiprocessing.connection.wait([each.sentinel for each in running], left_s)
            running = [each for each in running if each.exitcode is None]
        codes = [process.exitcode for process in self.processes]
        if FAILED in codes or function in self.skip_return_code_checks:
            self._check_return_codes(function, time.monotonic() - begin)
            return
        for rank, process in enumerate(self.processes):
            if _is_killed(process):
                name = signal.Signals(-process.exitcode).name
                raise RuntimeError(f"rank {rank} of {self.world_size} was ended by {name}")
        self._check_return_codes(function, time.monotonic() - begin)
        if len(set(codes)) > 1:  # PyTorch looks at rank 0's alone
            raise RuntimeError(f"the ranks ended with different exit codes: {codes}")


def _is_failed(process: Any) -> bool:
    return process.exitcode == FAILED or _is_killed(process)


def _is_killed(process: Any) -> bool:
    return process.exitcode is not None and process.exitcode < 0


def case_of(module: Any, log: Path, limit_s: float) -> Any:
    """Return the class of PyTorch's tests, to be run with forked ranks that write into `log`."""
    bases = (ForkedRanks, module.TestDistBackend, module.DistributedTest._DistTestBase)
    return type("TestDistributed", bases, {"module": module, "log": log, "limit_s": limit_s})
