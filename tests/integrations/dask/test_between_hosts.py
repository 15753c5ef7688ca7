"""Dask workers in network namespaces, which are hosts: they meet by the scheduler's keys alone."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys

import pytest
from tests.group.world.test_namespaces import made_namespaces

WAIT_S = 120.0
PORT = 8786
DRIVER = """\
import sys
from distributed import Client
from gpucoll.integrations.dask import Workers

def total(comm):
    return comm.rank, comm.all_reduce(1), dict(comm.describe().facts)["hosts"]

with Client(sys.argv[1], timeout=60) as client:
    client.wait_for_workers(2, timeout=60)
    for _ in range(2):
        for result in Workers(2, client=client).run(total, init={"timeout_s": 60}):
            print(*result)
"""


@pytest.fixture(scope="module")
def namespaces():
    if importlib.util.find_spec("distributed") is None:
        pytest.skip("distributed is not installed")
    yield from made_namespaces()


def test_workers_of_two_hosts_and_a_driver_on_a_third(namespaces, tmp_path, rank_server):
    scheduler = f"tcp://10.78.0.1:{PORT}"
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GPUCOLL_SE")},
        "DASK_DISTRIBUTED__WORKER__PROFILE__INTERVAL": "1s",
    }
    worker = ["worker", scheduler, "--nthreads", "1", "--no-dashboard", "--no-nanny"]
    commands = [
        (
            0,
            [
                "-m",
                "dask",
                "scheduler",
                "--host",
                "10.78.0.1",
                "--port",
                f"{PORT}",
                "--no-dashboard",
            ],
        ),
        (0, ["-m", "dask", *worker]),
        (1, ["-m", "dask", *worker]),
        (2, ["-c", DRIVER, scheduler]),
    ]
    with contextlib.ExitStack() as held:
        processes = []
        for number, (place, command) in enumerate(commands):
            said = held.enter_context(open(tmp_path / f"{number}.log", "w"))
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", namespaces.names[place], sys.executable, *command],
                    env=variables,
                    cwd=tmp_path,
                    stdout=said,
                    stderr=subprocess.STDOUT if number < 3 else None,
                )
            )
            held.callback(ended, processes[-1])
        assert processes[-1].wait(WAIT_S) == 0, (tmp_path / "3.log").read_text()

    lines = (tmp_path / "3.log").read_text().splitlines()
    assert len(lines) == 4
    for number, line in enumerate(lines):
        assert line.startswith(f"{number % 2} 2 ")
        assert "10.78.0.1: rank" in line
        assert "10.78.0.2: rank" in line


def ended(process):
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
