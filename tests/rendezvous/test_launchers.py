"""What MPIs' launchers and Slurm put into the environment, as they were seen to do it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpucoll import config
from gpucoll.errors import RendezvousError
from gpucoll.rendezvous.job import find_job
from gpucoll.rendezvous.meeting_points import TcpPoint

OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-5918@1",
    "PMIX_RANK": "1",
    "PMIX_SERVER_URI2": "prterun-host-5918@0.0;tcp4://127.0.0.1:55971",
}
OPEN_MPI_4 = {
    **OPEN_MPI_5,
    "PMIX_NAMESPACE": "1873805313",
    "PMIX_SERVER_URI2": "1873805312.0;tcp4://127.0.0.1:50163",
}
HYDRA = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
HYDRA_WITH_PORT = {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_ID": "1"}
PRTERUN = {"PMIX_NAMESPACE": "prterun-host-7432@1", "PMIX_RANK": "0"}
SLURM_ALLOCATION = {  # the shell of salloc
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "2",
    "SLURM_NPROCS": "2",
    "SLURM_NNODES": "1",
}
SLURM_BATCH = {**SLURM_ALLOCATION, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SLURM_STEP = {
    **SLURM_BATCH,
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
}
SLURM_PMI2 = {**SLURM_STEP, "PMI_JOBID": "7.0", "PMI_RANK": "1", "PMI_SIZE": "2"}
SLURM_PMIX = {**SLURM_STEP, "PMIX_NAMESPACE": "slurm.pmix.7.0", "PMIX_RANK": "1"}
SLURM_SHELL = {  # srun --pty bash, and salloc's interactive step
    **SLURM_BATCH,
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NUM_NODES": "1",
}
OURS = {"GPUCOLL_RANK": "2", "GPUCOLL_WORLD_SIZE": "4", "GPUCOLL_JOB": "abc"}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}

# As hydra does: a process of this name, and the ranks below it.
HYDRA_PMI_PROXY = """\
import os, pathlib, subprocess, sys
pathlib.Path("/proc/self/comm").write_text("hydra_pmi_proxy")
sys.exit(subprocess.run(sys.argv[1:]).returncode)
"""
PRINT_JOB = """\
from gpucoll.rendezvous.job import find_job
job = find_job()
print(job.rank, job.world_size, job.token, sep="|")
"""


@pytest.fixture
def environment(monkeypatch):
    def environment(*tables, **changes):
        for table in (*tables, changes):
            for name, value in table.items():
                monkeypatch.setenv(name, value)

    return environment


def place(job):
    return job.rank, job.world_size


@pytest.mark.parametrize("table", [OPEN_MPI_4, OPEN_MPI_5])
def test_open_mpi(environment, table):
    environment(table)
    job = find_job()

    assert place(job) == (1, 2)
    assert job.is_launched
    assert config.local_rank() == 1
    environment(PMIX_SERVER_URI2="another")
    assert find_job().token != job.token
    environment(PMIX_SERVER_URI2=table["PMIX_SERVER_URI2"], PMIX_NAMESPACE="another")
    assert find_job().token != job.token


def test_open_mpi_without_a_name_for_its_job(environment, monkeypatch):
    environment(OPEN_MPI_5)
    monkeypatch.delenv("PMIX_NAMESPACE")
    with pytest.raises(RendezvousError, match=r"PMIX_NAMESPACE is not set.*set GPUCOLL_JOB to"):
        find_job()
    environment(GPUCOLL_JOB="word")
    assert (*place(find_job()), find_job().token) == (1, 2, "word")


def test_hydra_names_no_job(environment):
    environment(HYDRA)
    with pytest.raises(RendezvousError, match=r"above this one is called hydra_pmi_proxy.*set GPU"):
        find_job()
    environment(GPUCOLL_JOB="word")
    assert (*place(find_job()), find_job().token) == (1, 2, "word")
    assert config.local_rank() == 1


def below_a_proxy(*command, **changes):
    path = str(Path(config.__file__).parent.parent)
    variables = {**os.environ, **HYDRA, "PYTHONPATH": path, **changes}
    program = [sys.executable, "-c", HYDRA_PMI_PROXY, *command, sys.executable, "-c", PRINT_JOB]
    ended = subprocess.run(
        program, env=variables, capture_output=True, text=True, timeout=60, check=True
    )
    return ended.stdout.strip().split("|")


def test_the_process_above_names_hydras_job():
    rank, world_size, token = below_a_proxy()

    assert (rank, world_size) == ("1", "2")
    assert token.startswith("hydra_pmi_proxy:")
    assert below_a_proxy()[2] != token  # another job's


def test_through_a_wrapper_it_is_above_the_parent():
    wrapper = (sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])")

    assert below_a_proxy(*wrapper)[2].startswith("hydra_pmi_proxy:")


@pytest.mark.parametrize("table", [SLURM_STEP, SLURM_PMI2, SLURM_PMIX])
def test_a_task_of_srun(environment, table):
    environment(table)
    job = find_job()

    assert place(job) == (1, 2)
    assert job.token == "slurm:7.0"
    assert job.is_launched
    assert config.local_rank() == 1
    environment(SLURM_STEP_ID="1")
    assert find_job().token != job.token


@pytest.mark.parametrize("table", [SLURM_ALLOCATION, SLURM_BATCH, SLURM_SHELL])
def test_in_an_allocation_but_not_of_srun(environment, table):
    environment(table)
    job = find_job()

    assert place(job) == (0, 1)
    assert not job.is_launched


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        (OURS, OPEN_MPI_5),
        (OURS, SLURM_STEP),
        (TORCHRUN, SLURM_STEP),
        (TORCHRUN, HYDRA),
        (OPEN_MPI_5, SLURM_SHELL),
        (OPEN_MPI_5, SLURM_BATCH),
    ],
)
def test_a_launcher_inside_of_another_ones_job(environment, inner, outer):
    environment(inner)
    expected = find_job()
    environment(outer)

    assert find_job() == expected


def test_hydra_inside_of_slurms_step(environment):
    environment(SLURM_SHELL, HYDRA, GPUCOLL_JOB="word")

    assert place(find_job()) == (1, 2)


@pytest.mark.parametrize(
    ("tables", "name"),
    [
        ([PRTERUN], "PMIX_RANK=0"),
        ([SLURM_SHELL, PRTERUN], "PMIX_RANK=0"),
        ([HYDRA_WITH_PORT], "PMI_ID=1"),
        ([{"PMI_RANK": "1", "PMI_SIZE": "2"}], "PMI_RANK=1"),
        ([SLURM_SHELL, {"PMI_RANK": "0", "PMI_SIZE": "2"}], "PMI_RANK=0"),
    ],
)
def test_a_launcher_that_says_too_little_leaves_nobody_alone(environment, tables, name):
    environment(*tables)
    with pytest.raises(RendezvousError, match=rf"{name} shows .*set GPUCOLL_RANK, GPUCOLL_WORLD_S"):
        find_job()
    assert place(find_job(0, 1)) == (0, 1)
    environment(GPUCOLL_JOB="word")
    assert place(find_job(1, 3)) == (1, 3)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "one of 2 ranks, but not what names their job: "),
        (PRTERUN, "one of several ranks, but not how many there are, or what names their job: "),
    ],
)
def test_what_a_launcher_has_said_is_not_missed(environment, table, text):
    environment(table)
    with pytest.raises(RendezvousError, match=text):
        find_job()


@pytest.mark.parametrize(
    ("table", "changes", "text"),
    [
        (OPEN_MPI_5, {"OMPI_COMM_WORLD_SIZE": "4"}, "has 4 ranks, 2 of them on this host"),
        (HYDRA, {"PMI_SIZE": "4"}, "has 4 ranks, 2 of them on this host"),
    ],
)
def test_several_hosts_of_an_mpi(environment, table, changes, text):
    environment(table, GPUCOLL_JOB="word", **changes)
    for rank, world_size in [(None, None), (1, 4)]:
        with pytest.raises(RendezvousError, match=rf"{text}, and nothing says .*set GPUCOLL_MEET"):
            find_job(rank, world_size)
    assert find_job(0, 1).meet is None
    assert find_job(1, 3).meet is None  # those of this host, as the program says
    assert find_job(meet="tcp://host:99").meet == TcpPoint("host", 99)
    environment(GPUCOLL_MEET="tcp://host:98")
    assert (*place(find_job()), find_job().meet) == (1, 4, TcpPoint("host", 98))


def test_several_hosts_of_slurm(environment):
    hosts = {"SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[01-09]"}
    environment(SLURM_STEP, hosts, SLURM_STEP_NODELIST="n[03,05]")
    job = find_job()

    assert (*place(job), job.token) == (1, 2, "slurm:7.0")
    assert isinstance(job.meet, TcpPoint)
    assert job.meet.host == "n03"
    assert 10000 < job.meet.port < 32768
    environment(SLURM_STEP_ID="1")
    other = find_job().meet
    assert isinstance(other, TcpPoint)
    assert other.port != job.meet.port
    environment(GPUCOLL_MEET="tcp://host:98")
    assert find_job().meet == TcpPoint("host", 98)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "SLURM_STEP_NODELIST is not set"),
        ({"SLURM_JOB_NODELIST": "n[3"}, r"SLURM_JOB_NODELIST is 'n\[3': character 2 is"),
    ],
)
def test_slurm_that_does_not_say_where(environment, changes, text):
    environment(SLURM_STEP, {"SLURM_STEP_NUM_NODES": "2"}, changes)
    with pytest.raises(RendezvousError, match=rf"where rank 0 runs \({text}.*set GPUCOLL_MEET"):
        find_job()


@pytest.mark.parametrize(
    ("table", "changes", "text"),
    [
        (OPEN_MPI_5, {"OMPI_COMM_WORLD_RANK": "2"}, "Open MPI's environment gives rank 2 of 2"),
        (SLURM_STEP, {"SLURM_PROCID": "two"}, "SLURM_PROCID must be a number, but is 'two'"),
        (SLURM_STEP, {"SLURM_STEP_NUM_TASKS": ""}, "SLURM_STEP_NUM_TASKS must be a number"),
    ],
)
def test_a_wrong_environment(environment, table, changes, text):
    environment(table, **changes)

    with pytest.raises(RendezvousError, match=text):
        find_job()


def test_arguments_meet_by_the_jobs_name(environment):
    environment(SLURM_STEP)
    job = find_job(0, 2)

    assert (*place(job), job.token) == (0, 2, "slurm:7.0")
