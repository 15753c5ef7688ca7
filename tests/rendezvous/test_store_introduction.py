"""Ranks that share a store learn by it whether they are on one host, whatever was left in it."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpucoll.errors import (
    AbortedError,
    ArgumentError,
    ArgumentTypeError,
    AuthenticationError,
    RendezvousDeadlineError,
    RendezvousError,
)
from gpucoll.rendezvous import meeting_store, store_introduction
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.meeting_store import StorePoint
from gpucoll.rendezvous.store_introduction import introduced


class Store:
    """As torch's: a key that is read must be there, or the reader waits."""

    def __init__(self):
        self.kept: dict[str, str] = {}
        self.lock = threading.Lock()

    def set(self, key, value):
        with self.lock:
            self.kept[key] = value

    def check(self, keys):
        with self.lock:
            return all(key in self.kept for key in keys)

    def get(self, key):
        with self.lock:
            assert key in self.kept, f"{key} was taken away while somebody read it"
            return self.kept[key].encode()

    def delete_key(self, key):
        with self.lock:
            return self.kept.pop(key, None) is not None


def job_of(rank, world_size, store, name="group"):
    return Job(rank, world_size, "", "arguments", meet=StorePoint(store, name), name=name)


def introduce(job, timeout_s, has_met=None):
    """Return the job as it meets; the body ends when all ranks are there, as a meeting does."""
    with introduced(job, timeout_s) as meeting:
        if has_met is not None:
            has_met.wait(timeout_s)
        return meeting


def meet(store, world_size, timeout_s=20.0):
    with ThreadPoolExecutor(world_size) as threads:
        jobs = [job_of(rank, world_size, store) for rank in range(world_size)]
        has_met = threading.Barrier(world_size)
        return list(threads.map(lambda job: introduce(job, timeout_s, has_met), jobs))


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_of_one_host_need_no_address(world_size):
    store = Store()
    jobs = meet(store, world_size)

    assert {job.meet for job in jobs} == {None}
    assert len({job.token for job in jobs}) == 1
    assert store.kept == {}


def test_rank_0_looks_often_again_when_the_last_rank_has_come(monkeypatch):
    store = Store()
    slept: list[float] = []
    other = StorePoint(store, "group")

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 50:
            other.set("gpucoll/group/rank/1", json.dumps({"nonce": "n", "host": "h"}))
        elif len(slept) > 50:
            other.set("gpucoll/group/rank/1", "")

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setenv("GPUCOLL_HOST_ID", "h")

    introduce(job_of(0, 2, store), 20.0)

    assert slept[49:] == [store_introduction._MOST_SLEEP_S, store_introduction._LEAST_SLEEP_S]


def test_every_meeting_has_a_word_of_its_own():
    store = Store()

    words = {meet(store, 2)[0].token for _ in range(20)}

    assert len(words) == 20


def test_ranks_of_several_hosts_meet_by_the_store(monkeypatch):
    hosts = threading.local()
    monkeypatch.setattr(store_introduction, "host_id", lambda: hosts.name)

    monkeypatch.setenv("GPUCOLL_SECRET", "a secret that is long enough")
    has_met = threading.Barrier(4)

    def come(rank):
        hosts.name = f"host {rank // 2}"
        return introduce(job_of(rank, 4, store), 20.0, has_met)

    store = Store()
    with ThreadPoolExecutor(4) as threads:
        jobs = list(threads.map(come, range(4)))
    points = [job.meet for job in jobs]

    assert all(isinstance(point, StorePoint) for point in points)
    assert len({point.key for point in points}) == 1
    assert len({job.title for job in jobs}) == 1
    points[0].publish("10.0.0.1:4711")
    assert [point.find() for point in points[1:]] == ["10.0.0.1:4711"] * 3


def test_several_hosts_need_a_secret_and_all_ranks_are_told(monkeypatch):
    hosts, store = threading.local(), Store()
    monkeypatch.setattr(store_introduction, "host_id", lambda: hosts.name)
    has_one = b"a secret that is long enough"
    monkeypatch.setattr(
        meeting_store, "job_secret", lambda: None if hosts.name == "host 1" else has_one
    )

    def come(rank):
        hosts.name = f"host {rank}"
        with pytest.raises(AuthenticationError) as info:
            introduce(job_of(rank, 3, store), 20.0)
        return str(info.value)

    with ThreadPoolExecutor(3) as threads:
        texts = list(threads.map(come, range(3)))

    assert all(text.startswith("rank 1 of 3 must talk to other hosts over TCP") for text in texts)


@pytest.mark.parametrize(
    "left", ["rank/1", "rank/2", "seen decision", "rank/1 rank/2 seen decision"]
)
def test_what_a_killed_job_has_left_is_no_harm(left):
    store = Store()
    said = {"nonce": "old", "host": "another host"}
    for key in left.split():
        decision = {"word": "old", "nonces": ["old"], "one_host": True}
        store.set(f"gpucoll/group/{key}", json.dumps(said if "rank" in key else decision))
    jobs = meet(store, 3)

    assert len({job.token for job in jobs}) == 1
    assert "old" not in jobs[0].token
    assert store.kept == {}


@pytest.mark.parametrize("text", ["", "no JSON", "[1]", "3"])
def test_what_is_no_introduction(text):
    store = Store()
    store.set("gpucoll/group/rank/1", text)
    store.set("gpucoll/group/seen", text)
    store.set("gpucoll/group/decision", text)

    assert len({job.token for job in meet(store, 2)}) == 1


def test_who_did_not_come_is_named():
    store = Store()
    with ThreadPoolExecutor(2) as threads:
        waiting = [
            threads.submit(introduce, job_of(rank, 4, store, "some"), 0.5) for rank in (0, 2)
        ]
        errors = [one.exception(20) for one in waiting]

    assert [type(error) for error in errors] == [RendezvousDeadlineError] * 2
    assert "rank 0 of 4: ranks 1, 3 did not come to init" in str(errors[0])
    assert "within 0.5 s" in str(errors[0])
    assert "rank 2 of 4: rank 0 did not come" in str(errors[1])


def test_the_next_try_succeeds():
    store = Store()
    with pytest.raises(RendezvousDeadlineError):
        introduce(job_of(1, 2, store), 0.01)
    with pytest.raises(RendezvousDeadlineError):
        introduce(job_of(0, 2, store), 0.01)

    assert len({job.token for job in meet(store, 2)}) == 1


def test_a_store_that_is_gone():
    class Gone(Store):
        def set(self, key, value):
            raise ConnectionError("broken")

    with pytest.raises(RendezvousError, match=r"'gpucoll/group/rank/1' of .*ConnectionError"):
        introduce(job_of(1, 2, Gone()), 5.0)


class Knows(Store):
    """A store that hands out a secret."""

    def __init__(self, secret):
        super().__init__()
        self.given = secret

    def secret(self):
        return self.given


@pytest.mark.parametrize("secret", [b"of the store, long enough", "of the store, long enough"])
def test_a_stores_secret_goes_before_the_variables(secret, monkeypatch):
    monkeypatch.setenv("GPUCOLL_SECRET", "another one, which is long enough")

    assert meeting_store.given_secret(StorePoint(Knows(secret))) == b"of the store, long enough"
    assert StorePoint(Knows(secret)).named("word").secret() == b"of the store, long enough"


def test_a_store_that_has_none_leaves_it_to_the_variables(monkeypatch):
    monkeypatch.setenv("GPUCOLL_SECRET", "of the variable, long enough")

    assert meeting_store.given_secret(StorePoint(Knows(None))) == b"of the variable, long enough"
    assert meeting_store.given_secret(StorePoint(Store())) == b"of the variable, long enough"


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (b"short", ArgumentError, r"secret\(\) of the store Knows holds a secret of 5 bytes"),
        (b"", ArgumentError, "a secret of 0 bytes, but at least 16 are needed"),
        (5, ArgumentTypeError, r"secret\(\) of the store Knows must return bytes or str; got int"),
    ],
)
def test_what_is_no_secret(given, kind, text):
    for rank in (0, 1):
        with pytest.raises(kind, match=text):
            introduce(job_of(rank, 2, Knows(given)), 0.1)


def test_an_error_of_gpucolls_in_a_store_ends_the_meeting():
    class Ended(Store):
        def check(self, keys):
            raise AbortedError("enough")

    for rank in (0, 1):
        with pytest.raises(AbortedError, match="enough"):
            introduce(job_of(rank, 2, Ended()), 20.0)
