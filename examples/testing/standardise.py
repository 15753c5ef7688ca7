"""Standardise a table whose rows are spread over ranks: each column gets mean 0 and variance 1."""

from __future__ import annotations

from typing import Any

import numpy as np

import gpucoll


def standardise(comm: gpucoll.Communicator, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return this rank's rows, standardised with the columns of the whole table."""
    count = comm.all_reduce(len(rows))
    if count == 0:
        raise ValueError("the table has no rows on any rank")
    centred = rows - comm.all_reduce(rows.sum(axis=0)) / count
    variance = comm.all_reduce((centred**2).sum(axis=0)) / count
    return centred / np.sqrt(variance)


def standardise_file(source: str, target: str) -> None:
    """Standardise a table in a file; every rank reads and writes its part of the rows."""
    with gpucoll.init() as comm:
        table = np.load(source, mmap_mode="r")
        parts = np.array_split(np.arange(len(table)), comm.world_size)
        mine = standardise(comm, np.asarray(table[parts[comm.rank]]))
        everything = comm.gather_object(mine)
        if comm.rank == 0:
            np.save(target, np.concatenate(everything))
        comm.barrier()
