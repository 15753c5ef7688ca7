"""backend="mpi" on real MPIs, among ranks that play several hosts."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.backends.mpi.test_mpi import PROGRAM, run
from tests.certificates import Authority


def test_between_hosts(mpi):
    run(mpi, 3, "cases", "calls", "mismatch", "other_calls", "beside", GPUCOLL_TEST_HOSTS="aba")


def test_where_the_links_are_encrypted(mpi, tmp_path):
    """Then calls are agreed on over those."""
    certificates = Authority(tmp_path / "ours").environment()
    names = "calls", "mismatch", "traffic"
    run(mpi, 3, *names, GPUCOLL_TEST_HOSTS="aba", **certificates)


@pytest.mark.parametrize("hosts", ["ab", "aab"])
def test_messages_between_hosts(mpi, hosts):
    run(mpi, len(hosts), "messages", "message_ends", GPUCOLL_TEST_HOSTS=hosts)


def test_a_late_rank(mpi):
    run(mpi, 3, "late", GPUCOLL_TEST_HOSTS="abc")


def test_what_mpi_does_not_end(mpi):
    _, output = mpi.run(2, PROGRAM, "given_up_between_hosts", GPUCOLL_TEST_HOSTS="ab")

    assert output.count("as expected") == 2, output


@pytest.mark.parametrize("hosts", ["aab", "abc"])
def test_a_killed_rank_on_another_host(mpi, hosts):
    if mpi.name != "impi":
        pytest.skip("only Intel MPI's mpiexec can leave the others alone, whatever happens")
    mpi = replace(mpi, options=("-disable-auto-cleanup",))

    _, output = mpi.run(3, PROGRAM, "killed", GPUCOLL_TEST_HOSTS=hosts)

    for rank in (0, 2):
        assert re.search(rf"rank {rank}: rank {rank} of 3.* lost rank 1 ", output), output
