"""Process sets: parts of the ranks with an engine of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gpucoll.integrations.horovod.job import job

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """Some of the ranks, which run collectives together.

    Parameters
    ----------
    ranks_or_comm : iterable of int
        Ranks of the job, in any order. Communicators of MPI are refused: pass their ranks.

    Attributes
    ----------
    process_set_id : int or None
        Set by `init` or `add_process_set`; None for a set that is not in use.
    ranks : list of int
    mpi_comm : None
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        self.process_set_id: int | None = None
        self.mpi_comm = None
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(
                "a ProcessSet is made of a list of ranks; communicators of MPI are not taken: pass "
                "the ranks that they have in the job"
            )
        ranks = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"a ProcessSet is made of a list of ranks, which are int; got {ranks}")
        self.ranks: list[int] = ranks

    def _invalidate(self) -> None:
        self.process_set_id = None

    def size(self) -> int | None:
        """Return the number of its ranks; None if it is not in use."""
        if self.process_set_id is None:
            return None
        return len(job.ranks_of(self.process_set_id))

    def rank(self) -> int | None:
        """Return this rank's number in the set; None if the set is not in use.

        Calls take the numbers of ranks in the job, as ``root_rank``, not these.
        """
        if self.process_set_id is None:
            return None
        return job.engine_of(self.process_set_id).comm.rank

    def included(self) -> bool | None:
        """Return whether this rank is in it; None before `init`."""
        if self is global_process_set and not self.ranks:
            return None
        return job.rank in self.ranks

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"
        )


global_process_set = ProcessSet([])
"""All ranks."""
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a set after `init`; every rank of the job calls it, also those that are not in it.

    Raises
    ------
    ValueError
        Not initialized, or without ``HOROVOD_DYNAMIC_PROCESS_SETS=1``; there is a set of these
        ranks; the ranks differ from those that another rank passed.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    job.check_dynamic()
    number = job.add_set(added.ranks)
    if number is None:
        raise ValueError(f"Attempted to add a duplicate process set: {added}")
    added.process_set_id = number
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set; every rank of the job calls it. Return whether there was such a set.

    The set of all ranks stays.
    """
    number = process_set.process_set_id
    if not number:
        return False
    job.check_dynamic()
    process_set._invalidate()
    return job.remove_set(number)


def begin(process_sets: Sequence[ProcessSet]) -> None:
    """Give the sets of `init` their engines, and the set of all ranks its list."""
    global_process_set.ranks = list(range(job.size))
    job.agree("init", [process_set.ranks for process_set in process_sets])
    for process_set in process_sets:
        number = job.add_set(process_set.ranks)
        if number is None:
            raise ValueError(f"init was given a process set twice: {process_set}")
        process_set.process_set_id = number


def of(number: int) -> Any:
    """Return a set that stands for a number, for callers that have nothing else."""
    made = ProcessSet(job.ranks_of(number))
    made.process_set_id = number
    return made
