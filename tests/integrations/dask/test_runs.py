"""Functions on the workers of a Dask cluster."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.dask.conftest import N_WORKERS
from tests.integrations.engine.cases import WAIT_S, RunCases, total, wait_for_the_other, who

import gpucoll
from gpucoll.integrations.dask import Workers, following, on_worker, run


class TestRuns(RunCases):
    @pytest.fixture
    def make(self, client):
        return lambda world_size: Workers(world_size, client=client)

    @pytest.fixture
    def spare(self, client):
        def spare(function, argument):
            client.wait_for_workers(N_WORKERS)
            last = list(client.nthreads())[-1]
            future = client.submit(function, argument, workers=[last], pure=False)
            return lambda: future.result(WAIT_S)

        return spare


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kept_by_the_scheduler(client):
    def look(dask_scheduler):
        kept = dask_scheduler.extensions
        return [*kept["variables"].variables, *kept["events"]._events]

    return client.run_on_scheduler(look)


def running_ranks():
    return len(on_worker._ranks)


def rank_threads():
    import threading

    return sum(thread.name.startswith("run ") for thread in threading.enumerate())


def test_every_worker_is_a_rank(client):
    client.wait_for_workers(N_WORKERS)
    results = run(who, client=client)

    assert [place[:2] for place in results] == [(rank, N_WORKERS) for rank in range(N_WORKERS)]
    assert len({place[2] for place in results}) == N_WORKERS


def test_the_current_client(client):
    with client.as_current():
        assert run(total, (1.0,), world_size=1)[0].tolist() == [1.0] * 3


def test_chosen_workers(client):
    chosen = sorted(client.nthreads())[:2]
    pids = client.run(os.getpid)

    assert {place[2] for place in run(who, client=client, workers=chosen)} == {
        pids[address] for address in chosen
    }
    with pytest.raises(gpucoll.LaunchError, match=r"the cluster has no worker tcp://127.0.0.1:1"):
        run(who, client=client, workers=[*chosen, "tcp://127.0.0.1:1"])
    wrong: Any
    for wrong in ("tcp://127.0.0.1:1", []):
        with pytest.raises(gpucoll.ArgumentError, match="workers must be a list of addresses"):
            run(who, client=client, workers=wrong)


def test_too_few_workers(client):
    with pytest.raises(gpucoll.DeadlineError, match="9 workers are needed; 3 were there within 0"):
        Workers(9, client=client, ready_s=0.5).run(who)


def test_workers_that_are_threads():
    distributed = pytest.importorskip("distributed", reason="distributed is not installed")
    options = {"n_workers": 2, "processes": False, "dashboard_address": "127.0.0.1:0"}
    with (
        distributed.LocalCluster(**options) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
        pytest.raises(gpucoll.ArgumentError, match=r"are one process .* LocalCluster\(processes=T"),
    ):
        run(who, client=client)


def test_no_client(client):
    with pytest.raises(gpucoll.ArgumentError, match="there is no client"):
        run(who)
    with pytest.raises(gpucoll.ArgumentTypeError, match=r"must be a distributed.Client; got str"):
        run(who, client="tcp://127.0.0.1:1")


def test_an_asynchronous_client(client):
    import asyncio

    from distributed import Client

    async def call():
        async with Client(client.scheduler.address, asynchronous=True) as other:
            with pytest.raises(gpucoll.ArgumentError, match="asynchronous"):
                run(who, client=other)

    asyncio.run(call())


def call_a_task(comm, scheduler):
    from distributed import Client

    with Client(scheduler, set_as_default=False) as client:
        return comm.all_reduce(client.submit(sum, [1, 2], pure=False).result(timeout=WAIT_S))


def test_tasks_go_on_beside_a_run(client):
    workers = Workers(2, client=client)

    assert workers.run(call_a_task, (client.scheduler.address,)) == [6, 6]


def test_nothing_is_left_in_the_cluster(client):
    workers = Workers(2, client=client)
    for _ in range(3):
        workers.run(total, (1.0,))
    with pytest.raises(gpucoll.DeadlineError):
        workers.run(wait_for_the_other, timeout_s=0.5)
    with pytest.raises(gpucoll.LaunchError, match="cannot load the function"):
        workers.run(Unloadable())

    until(lambda: not kept_by_the_scheduler(client))
    until(lambda: not any(client.run(rank_threads).values()))
    assert not any(client.run(running_ranks).values())


class Unloadable:
    """Loads on the driver's side only, as what is importable nowhere else."""

    def __call__(self, comm):
        raise AssertionError

    def __reduce__(self):
        return importlib.import_module, ("a module that is nowhere",)


def keep_what_is_logged():
    """Have a worker keep what Dask says there of what cannot be loaded."""
    logger = logging.getLogger("distributed.protocol.pickle")
    logger.setLevel(logging.INFO)
    logger.addHandler(Kept())


def take_what_was_logged():
    logger = logging.getLogger("distributed.protocol.pickle")
    (handler,) = (each for each in logger.handlers if isinstance(each, Kept))
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    return handler.records


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record.getMessage())


def test_no_log_shows_the_secret_of_a_run_that_workers_cannot_load(client, monkeypatch):
    monkeypatch.setattr(secrets, "token_hex", lambda n_bytes: "5e" * n_bytes)
    client.run(keep_what_is_logged)
    try:
        with pytest.raises(gpucoll.LaunchError) as caught:
            run(who, client=client, init={"timeout_s": Unloadable()})
    finally:
        logged = client.run(take_what_was_logged)

    assert len(logged) == N_WORKERS
    assert not any("5e" * 32 in text for texts in logged.values() for text in texts)
    assert "cannot load the function or its arguments" in str(caught.value)


def test_a_run_whose_driver_is_gone_is_given_up(client, monkeypatch):
    def hurry():
        on_worker._ASK_S, on_worker._ORPHAN_S = 0.1, 0.5

    def take_time():
        on_worker._ASK_S, on_worker._ORPHAN_S = 20.0, 120.0

    async def ask_nobody(self, address):
        import asyncio

        await asyncio.sleep(WAIT_S)

    client.run(hurry)
    try:
        monkeypatch.setattr(following.Following, "_end_of", ask_nobody)
        monkeypatch.setattr(following.Following, "_give_up", lambda self: None)
        with pytest.raises(gpucoll.DeadlineError):
            Workers(2, client=client).run(wait_for_the_other, timeout_s=0.1)
        until(lambda: not any(client.run(rank_threads).values()))
        assert not any(client.run(running_ranks).values())
    finally:
        client.run(take_time)


INTERRUPTED = """\
import sys
from pathlib import Path
from typing import Any
from distributed import Client
from gpucoll.integrations.dask import Workers

def begin(comm, folder):
    Path(folder, str(comm.rank)).touch()
    comm.recv_object(1 - comm.rank)

with Client(sys.argv[1]) as client:
    workers = Workers(2, client=client)
    try:
        workers.run(begin, (sys.argv[2],))
    except KeyboardInterrupt:
        print(workers.run(lambda comm: comm.all_reduce(1)))
"""


def test_ctrl_c(client, tmp_path):
    driver = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, client.scheduler.address, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until(lambda: len(list(Path(tmp_path).iterdir())) == 2 or driver.poll() is not None)
        driver.send_signal(signal.SIGINT)
        said, _ = driver.communicate(timeout=WAIT_S)
    finally:
        driver.kill()
        driver.wait()

    assert driver.returncode == 0, said
    assert said.rstrip().endswith("[2, 2]"), said
    until(lambda: not any(client.run(rank_threads).values()))
