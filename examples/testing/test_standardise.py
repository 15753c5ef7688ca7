"""Tests of `standardise` that need one machine, and no launcher, GPU or MPI."""

from __future__ import annotations

import numpy as np
import pytest
from standardise import standardise, standardise_file


@pytest.fixture
def table():
    """Return a table with four columns; every rank makes the same table."""
    return np.random.default_rng(7).normal(5.0, 3.0, size=(100, 4))


def parts(table, world_size):
    """Return the table's rows for each rank, in parts of unequal size."""
    cuts = [len(table) * rank**2 // world_size**2 for rank in range(1, world_size)]
    return np.split(table, cuts)


@pytest.mark.ranks(1, 2, 4)
def test_any_number_of_ranks_gives_what_one_process_gives(comm, table):
    expected = (table - table.mean(axis=0)) / table.std(axis=0)

    mine = standardise(comm, parts(table, comm.world_size)[comm.rank])

    np.testing.assert_allclose(mine, parts(expected, comm.world_size)[comm.rank])


@pytest.mark.ranks(3)
def test_a_rank_may_have_no_rows(comm, table):
    mine = table if comm.rank == 1 else table[:0]

    result = standardise(comm, mine)

    assert result.shape == mine.shape
    assert comm.all_reduce(abs(result.sum())) < 1e-10


@pytest.mark.ranks(2)
def test_an_empty_table_is_refused_on_every_rank(comm, table):
    with pytest.raises(ValueError, match="no rows on any rank"):
        standardise(comm, table[:0])


@pytest.mark.ranks(2, 3, timeout_s=20)
def test_files(comm, table, tmp_path):
    # tmp_path is one folder for all ranks of a test.
    source, target = tmp_path / "table.npy", tmp_path / "standardised.npy"
    if comm.rank == 0:
        np.save(source, table)
    comm.barrier()

    # this calls gpucoll.init() itself, with the same ranks
    standardise_file(str(source), str(target))

    written = np.load(target)
    assert written.shape == table.shape
    np.testing.assert_allclose(written.std(axis=0), 1.0)
