"""Who a process is: from arguments, from a launcher's environment, or nobody's."""

from __future__ import annotations

import pytest

from gpucoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendUnavailableError,
    RendezvousError,
)
from gpucoll.rendezvous.job import find_job

OURS = {"GPUCOLL_RANK": "2", "GPUCOLL_WORLD_SIZE": "4", "GPUCOLL_JOB": "abc"}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}


@pytest.fixture
def environment(monkeypatch):
    def environment(values, **changes):
        for name, value in {**values, **changes}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return environment


def test_alone_without_a_launcher():
    job = find_job()

    assert (job.rank, job.world_size) == (0, 1)


def test_our_launcher(environment):
    environment({**TORCHRUN, **OURS})
    job = find_job()

    assert (job.rank, job.world_size, job.token) == (2, 4, "abc")


def test_torchrun(environment):
    environment(TORCHRUN)
    job = find_job()

    assert (job.rank, job.world_size) == (1, 2)
    assert "29500" in job.token


def test_ranks_that_cannot_meet_are_not_each_alone(environment):
    environment(TORCHRUN, MASTER_PORT=None)
    with pytest.raises(RendezvousError, match="WORLD_SIZE=2 are set but MASTER_PORT not: start"):
        find_job()
    assert find_job(0, 1).world_size == 1
    environment(TORCHRUN, MASTER_PORT=None, RANK="0", WORLD_SIZE="1")
    assert find_job().world_size == 1


def test_torchrun_over_hosts_is_refused(environment):
    environment(TORCHRUN, WORLD_SIZE="4")

    with pytest.raises(BackendUnavailableError, match="one host only"):
        find_job()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"GPUCOLL_RANK": "two"}, "GPUCOLL_RANK must be a number, but is 'two'"),
        ({"GPUCOLL_WORLD_SIZE": None}, "GPUCOLL_WORLD_SIZE must be a number, but is not set"),
        ({"GPUCOLL_RANK": "4"}, "rank 4 of 4"),
        ({"GPUCOLL_RANK": "-1"}, "rank -1 of 4"),
        ({"GPUCOLL_JOB": None}, "GPUCOLL_JOB is not"),
    ],
)
def test_a_wrong_environment(environment, changes, text):
    environment(OURS, **changes)

    with pytest.raises(RendezvousError, match=text):
        find_job()


@pytest.mark.parametrize("arguments", [{"rank": 0}, {"world_size": 2}])
def test_half_of_the_arguments(arguments):
    with pytest.raises(ArgumentError, match="go together"):
        find_job(**arguments)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2)])
def test_a_rank_outside_of_the_world(rank, world_size):
    with pytest.raises(ArgumentError, match="rank must be in"):
        find_job(rank, world_size)


def test_nothing_to_meet_by():
    with pytest.raises(RendezvousError, match="torchrun, mpiexec or srun, or set GPUCOLL_JOB"):
        find_job(0, 2)


def test_one_rank_alone_has_nothing_that_others_could_meet_by(environment):
    environment({"GPUCOLL_RANK": "0", "GPUCOLL_WORLD_SIZE": "1"})
    assert find_job().world_size == 1
    with pytest.raises(RendezvousError, match="environment does not name the job"):
        find_job(0, 2)


def test_arguments_go_before_a_job_over_hosts(environment):
    environment(TORCHRUN, WORLD_SIZE="4")

    assert find_job(0, 1).world_size == 1
    assert find_job(1, 2).world_size == 2  # those of this host
    with pytest.raises(BackendUnavailableError, match="one host only"):
        find_job(1, 4)


@pytest.mark.parametrize(("rank", "world_size"), [("0", 1), (0, "1"), (0.0, 1), (False, 1)])
def test_numbers_that_are_none(rank, world_size):
    with pytest.raises(ArgumentTypeError, match="must be an int; got"):
        find_job(rank, world_size)


def test_a_world_without_ranks():
    with pytest.raises(ArgumentError, match="world_size must be at least 1; got 0"):
        find_job(0, 0)
