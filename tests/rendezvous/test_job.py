"""Who a process is: from arguments, from a launcher's environment, or nobody's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

import gpucoll
from gpucoll.errors import ArgumentError, ArgumentTypeError, RendezvousError
from gpucoll.rendezvous.job import find_job
from gpucoll.rendezvous.meeting_numbers import forget_meetings
from gpucoll.rendezvous.meeting_points import TcpPoint
from gpucoll.rendezvous.meeting_store import StorePoint, TorchrunPoint

OURS = {"GPUCOLL_RANK": "2", "GPUCOLL_WORLD_SIZE": "4", "GPUCOLL_JOB": "abc"}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
BY_HAND = {"GPUCOLL_RANK": "2", "GPUCOLL_WORLD_SIZE": "4", "GPUCOLL_MEET": "tcp://[fd00::1]:99"}
ON_TWO_HOSTS = {**TORCHRUN, "WORLD_SIZE": "4"}
WITH_STORE = {**ON_TWO_HOSTS, "TORCHELASTIC_USE_AGENT_STORE": "True"}


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


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"GPUCOLL_RANK": "two"}, "GPUCOLL_RANK must be a number, but is 'two'"),
        ({"GPUCOLL_WORLD_SIZE": None}, "GPUCOLL_WORLD_SIZE must be a number, but is not set"),
        ({"GPUCOLL_RANK": "4"}, "rank 4 of 4"),
        ({"GPUCOLL_RANK": "-1"}, "rank -1 of 4"),
        ({"GPUCOLL_JOB": None}, "GPUCOLL_JOB is not: set it .*on several hosts, GPUCOLL_MEET"),
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


class TestSeveralHosts:
    """Jobs whose ranks are not all on this host."""

    def test_by_hand(self, environment):
        environment(BY_HAND)
        job = find_job()

        assert (job.rank, job.world_size) == (2, 4)
        assert job.meet == TcpPoint("fd00::1", 99)
        assert job.token == "meet:tcp://[fd00::1]:99"
        environment(BY_HAND, GPUCOLL_LOCAL_WORLD_SIZE="2", GPUCOLL_JOB="of this host")
        assert find_job().meet == TcpPoint("fd00::1", 99)
        assert find_job().token == "of this host"

    def test_a_meeting_point_that_is_not_needed(self, environment):
        environment(OURS, GPUCOLL_LOCAL_WORLD_SIZE="4", GPUCOLL_MEET="tcp://host:99")

        assert find_job().meet is None
        assert find_job(meet="tcp://host:98").meet is None

    @pytest.mark.parametrize("stores", [None, "False"])
    def test_torchrun_without_a_store_leaves_its_port_alone(self, environment, stores):
        environment(ON_TWO_HOSTS, TORCHELASTIC_USE_AGENT_STORE=stores)
        job = find_job()

        assert isinstance(job.meet, TcpPoint)
        assert job.meet.host == "localhost"
        assert job.meet.port not in (29500, 0)
        assert find_job(3, 4).meet == job.meet
        environment(ON_TWO_HOSTS, MASTER_PORT=str(job.meet.port))
        other = find_job().meet
        assert isinstance(other, TcpPoint)
        assert other.port != job.meet.port

    def test_torchruns_store(self, environment, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
        environment(WITH_STORE)
        job = find_job()

        expected = TorchrunPoint("localhost", 29500)
        assert isinstance(job.meet, TorchrunPoint)
        assert (job.meet.text, job.meet.key) == (expected.text, expected.key)
        assert job.meet != find_job(name="a").meet
        environment({}, TORCHELASTIC_RESTART_COUNT="1")
        assert find_job().meet != job.meet
        environment({}, GPUCOLL_MEET="tcp://host:99")
        assert find_job().meet == TcpPoint("host", 99)

    def test_torchruns_store_without_torch(self, environment, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        environment(WITH_STORE)

        assert isinstance(find_job().meet, TcpPoint)

    def test_fewer_ranks_are_those_of_this_host_unless_they_have_a_name(self, environment):
        environment(BY_HAND, GPUCOLL_LOCAL_WORLD_SIZE="2", GPUCOLL_JOB="word")

        assert find_job(0, 1).meet is None
        assert find_job(1, 2).meet is None
        assert find_job(1, 2, name="evens").meet == TcpPoint("fd00::1", 99)
        assert find_job(1, 2, meet="tcp://b:1").meet == TcpPoint("b", 1)
        assert find_job(1, 4).meet == TcpPoint("fd00::1", 99)

    def test_arguments_alone(self, environment):
        job = find_job(1, 2, meet="tcp://host:99", name="a")

        assert (job.meet, job.name, job.token) == (TcpPoint("host", 99), "a", "meet:tcp://host:99")
        environment({"GPUCOLL_MEET": "host:98"})
        assert find_job(1, 2).meet == TcpPoint("host", 98)
        assert find_job(1, 2, meet="host:97").meet == TcpPoint("host", 97)
        assert find_job(0, 1, meet="host:97").meet is None
        assert find_job().world_size == 1

    def test_a_meeting_point_for_nobody(self):
        with pytest.raises(ArgumentError, match="give rank and world_size too"):
            find_job(meet="tcp://host:99")

    def test_each_meeting_has_its_number(self):
        class Store(dict):
            set = dict.__setitem__

        store = Store()
        first = find_job(0, 2, store, "a").next_meeting()
        second = find_job(0, 2, store, "a").next_meeting()

        assert (first.name, second.name) == ("a", "a")
        assert first.token != second.token
        assert isinstance(first.meet, StorePoint)
        assert isinstance(second.meet, StorePoint)
        assert (first.meet.key, second.meet.key) == ("gpucoll/a#0/address", "gpucoll/a#1/address")


class TestNames:
    """Who calls init with a name meets those that do so with the same."""

    @pytest.fixture(autouse=True)
    def counted_from_0(self):
        forget_meetings()

    def test_meetings_are_counted_name_by_name(self, environment):
        environment(OURS)
        tokens = [
            find_job(name=name).next_meeting().token for name in (None, "a", "b", "a", None, "a")
        ]

        assert tokens == ["abc#0", "abc\0a#0", "abc\0b#0", "abc\0a#1", "abc#1", "abc\0a#2"]

    def test_meetings_are_counted_job_by_job(self, environment):
        tokens = []
        for word in ("one", "two", "one"):
            environment({"GPUCOLL_JOB": word})
            tokens.append(find_job(0, 2).next_meeting().token)
            find_job(0, 1).next_meeting()  # alone: nobody's business

        assert tokens == ["one#0", "two#0", "one#1"]

    def test_a_name_does_not_name_a_job(self):
        with pytest.raises(RendezvousError, match="nothing by which to find the others"):
            find_job(0, 2, name="a")

    @pytest.mark.parametrize("name", ["", "x" * 201, "a\0b", "a\nb"])
    def test_names_that_are_none(self, name):
        with pytest.raises(ArgumentError, match="1 to 200 printable characters; got '"):
            find_job(name=name)

    def test_a_name_that_is_no_text(self):
        with pytest.raises(ArgumentTypeError, match="name must be a str; got 3"):
            find_job(name=cast(Any, 3))


@pytest.mark.parametrize(("rank", "world_size"), [("0", 1), (0, "1"), (0.0, 1), (False, 1)])
def test_numbers_that_are_none(rank, world_size):
    with pytest.raises(ArgumentTypeError, match="must be an int; got"):
        find_job(rank, world_size)


def test_a_world_without_ranks():
    with pytest.raises(ArgumentError, match="world_size must be at least 1; got 0"):
        find_job(0, 0)


def test_one_host_loads_nothing_of_several(environment):
    environment(OURS)
    program = (
        "import sys\n"
        "from gpucoll.rendezvous.job import find_job\n"
        "find_job().next_meeting()\n"
        "find_job(1, 2, name='a').next_meeting()\n"
        "print([name for name in sys.modules if 'meeting_' in name or 'interface' in name])\n"
    )
    path = str(Path(gpucoll.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
    )

    assert (done.stdout, done.stderr) == ("['gpucoll.rendezvous.meeting_numbers']\n", "")
