"""torchrun with two agents, as on two hosts: what its ranks learn, and how they meet."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.elastic import PROGRAM as ELASTIC
from tests.elastic import SAID, again

import gpucoll

WAIT_S = 100.0
PROGRAM = """\
import sys, time
from gpucoll.rendezvous.job import find_job

job = find_job().next_meeting()
if job.rank == 0:
    job.meet.publish("10.0.0.1:4711")
deadline = time.monotonic() + 60
while (address := job.meet.find()) is None:
    assert time.monotonic() < deadline, job.meet.trouble
    time.sleep(0.05)
sys.stdout.write(f"rank {job.rank} of {job.world_size}: {address} by {job.meet.text}\\n")
"""
MEMBERS = """\
import os, sys
import gpucoll

rank = int(os.environ["RANK"])
with gpucoll.init(rank=rank % 2, world_size=2, name=f"group {rank // 2}", timeout_s=60) as comm:
    sys.stdout.write(f"{rank}: {comm.all_gather_object(rank)}\\n")
"""


@pytest.fixture
def torchrun(tmp_path):
    """Start an agent; all are ended with the test."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    path = str(Path(gpucoll.__file__).parent.parent)
    started = []

    def torchrun(program, *options):
        (tmp_path / "program.py").write_text(program)
        command = [sys.executable, "-m", "torch.distributed.run", *map(str, options)]
        started.append(
            subprocess.Popen(
                [*command, str(tmp_path / "program.py")],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield torchrun
    for process in started:
        if process.poll() is None:
            process.terminate()  # an agent ends its ranks
        process.communicate(timeout=WAIT_S)


@pytest.mark.soak
@pytest.mark.parametrize("places", [[3], [1, 2]], ids=["one agent", "two agents"])
def test_a_process_that_fails_comes_back(torchrun, tmp_path, monkeypatch, places):
    command = again(sys.executable, tmp_path / "program.py")
    place = ("--nnodes", len(places), "--master-addr", "127.0.0.1", "--master-port", free_port())
    monkeypatch.setenv("GPUCOLL_SECRET", "0123456789abcdef")
    agents = []
    for node, n_ranks in enumerate(places):
        monkeypatch.setenv("GPUCOLL_HOST_ID", f"host {node}")
        options = (*place, "--node-rank", node, "--nproc-per-node", n_ranks, "--no-python")
        agents.append(torchrun(ELASTIC, *options, *command))
    ended = [agent.communicate(timeout=WAIT_S) for agent in agents]

    assert sorted(line for said, _ in ended for line in said.splitlines()) == SAID, ended


def free_port():
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        return end.getsockname()[1]


@pytest.mark.soak
def test_ranks_of_two_agents_find_rank_0_by_their_store(torchrun):
    port = free_port()
    place = ("--nnodes", 2, "--nproc-per-node", 1, "--master-addr", "127.0.0.1")
    agents = [
        torchrun(PROGRAM, *place, "--master-port", port, "--node-rank", node) for node in (0, 1)
    ]
    ended = [agent.communicate(timeout=WAIT_S) for agent in agents]

    assert [agent.returncode for agent in agents] == [0, 0], ended
    assert [out for out, _ in ended] == [
        f"rank {rank} of 2: 10.0.0.1:4711 by torchrun's store at 127.0.0.1:{port}\n"
        for rank in (0, 1)
    ]


@pytest.mark.soak
def test_groups_of_one_agents_ranks(torchrun):
    agent = torchrun(MEMBERS, "--standalone", "--nproc-per-node", 4)
    out, err = agent.communicate(timeout=WAIT_S)

    assert agent.returncode == 0, err
    assert sorted(out.splitlines()) == ["0: [0, 1]", "1: [0, 1]", "2: [2, 3]", "3: [2, 3]"]
