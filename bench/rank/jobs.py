"""Jobs that rank 0 sends to the other ranks as Python objects, one at a time, and their results."""

from __future__ import annotations

import time
from typing import Any, Protocol

__all__ = ["RESULT", "STOP", "TASK", "JobMessages", "Jobs"]

TASK, RESULT, STOP = 1, 2, 3
"""Tags of the messages."""

Job = dict[str, Any]


class JobMessages(Protocol):
    """Messages of objects, in the form that a program would use with a library."""

    def give(self, job: Job | None, worker: int) -> None:
        """Send a job to a rank, or None if there are no more."""
        ...

    def take_result(self) -> tuple[Job, int]:
        """Return the next result of any rank, and that rank."""
        ...

    def take_job(self) -> Job | None:
        """Return the job that rank 0 has sent."""
        ...

    def give_result(self, result: Job) -> None:
        """Send a result to rank 0."""
        ...


class Jobs:
    """The loop that distributes jobs and collects their results; one call is one job.

    Attributes
    ----------
    wrong : int
        Number of results of the last loop that were wrong or missing.
    """

    def __init__(self, rank: int, ranks: int, messages: JobMessages) -> None:
        self.wrong = 0
        self._rank, self._ranks, self._messages = rank, ranks, messages

    def __call__(self, reps: int) -> float:
        """Do `reps` jobs; return the seconds that they took."""
        if self._rank:
            begun = time.perf_counter()
            self._work()
            return time.perf_counter() - begun
        jobs = [{"id": i, "name": f"job {i}", "data": list(range(i % 7))} for i in range(reps)]
        begun = time.perf_counter()
        results = self._give_out(jobs)
        seconds = time.perf_counter() - begun
        expected = {i: sum(range(i % 7)) for i in range(reps)}
        self.wrong = sum(results.get(i) != value for i, value in expected.items())
        return seconds

    def _give_out(self, jobs: list[Job]) -> dict[int, int]:
        messages = self._messages
        results: dict[int, int] = {}
        active = 0
        for worker in range(1, self._ranks):
            active += bool(jobs)
            messages.give(jobs.pop() if jobs else None, worker)
        while active:
            result, worker = messages.take_result()
            results[result["id"]] = result["sum"]
            active -= not jobs
            messages.give(jobs.pop() if jobs else None, worker)
        return results

    def _work(self) -> None:
        messages = self._messages
        while (job := messages.take_job()) is not None:
            messages.give_result({"id": job["id"], "sum": sum(job["data"])})
