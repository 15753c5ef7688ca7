"""Tasks of a real Slurm, of two nodes on this machine, and the batch script of the documents."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.elastic import PROGRAM as ELASTIC
from tests.elastic import SAID, again
from tests.slurm import missing, slurm

import gpucoll
from gpucoll import config

WAIT_S = 120.0
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "clusters.md"
PROGRAM = """\
import os, sys
import numpy as np
import gpucoll
os.environ["GPUCOLL_HOST_ID"] = "node " + os.environ["SLURM_NODEID"]
with gpucoll.init(timeout_s=60) as comm:
    total = comm.all_reduce(np.full(1, 1.0))
    hosts = "hosts" in dict(comm.describe().facts)
    sys.stdout.write(f"rank {comm.rank} of {comm.world_size}: {total[0]:g} {hosts}\\n")
"""


@pytest.fixture(scope="module")
def variables():
    """Return the variables for commands of a Slurm that runs as long as these tests."""
    if why := missing():
        pytest.skip(f"no Slurm: {why}")
    with contextlib.ExitStack() as held:
        try:
            variables = held.enter_context(slurm())
        except RuntimeError as error:
            pytest.skip(str(error))
        path = str(Path(gpucoll.__file__).parent.parent)
        yield {**variables, "PYTHONPATH": path, "GPUCOLL_INTERFACES": "lo"}


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(PROGRAM)
    return path


def done(command, variables, **options):
    ended = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=WAIT_S, **options
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_tasks_of_one_node(variables, program, rank_server):
    said = done(["srun", "-N1", "-n2", "--overcommit", sys.executable, str(program)], variables)

    assert sorted(said.splitlines()) == ["rank 0 of 2: 2 False", "rank 1 of 2: 2 False"]


@pytest.mark.parametrize("n_nodes", [1, 2])
def test_a_task_that_fails_comes_back(variables, tmp_path, rank_server, n_nodes):
    head = 'import os; os.environ["GPUCOLL_HOST_ID"] = "node " + os.environ["SLURM_NODEID"]\n'
    (tmp_path / "program.py").write_text(head + ELASTIC)
    meet = {"GPUCOLL_MEET": f"file://{tmp_path}/meet"} if n_nodes > 1 else {}
    said = done(
        [
            *("srun", "--no-kill", "--kill-on-bad-exit=0", f"-N{n_nodes}", "-n3", "--overcommit"),
            *again(sys.executable, tmp_path / "program.py"),
        ],
        {**variables, **meet},
    )

    assert sorted(said.splitlines()) == SAID


def test_what_slurm_sets(variables):
    command = ["srun", "-N2", "--ntasks-per-node=2", "--overcommit", "env"]
    said = done(command, variables)

    for name, values in {
        config.SLURM_RANK: {"0", "1", "2", "3"},
        config.SLURM_STEP_TASKS: {"4"},
        config.SLURM_STEP_NODES: {"2"},
        config.SLURM_STEP_NODE_LIST: {"node[1-2]"},
        config.SLURM_LOCAL_RANK: {"0", "1"},
    }.items():
        assert {*re.findall(rf"^{name}=(.*)$", said, re.MULTILINE)} == values, name


def test_the_batch_script_of_the_documents(variables, program, tmp_path, rank_server):
    script = re.search(r"^#!/bin/bash\n#SBATCH.*?(?=^```)", DOCUMENT.read_text(), re.S | re.M)
    assert script is not None
    (tmp_path / "job.sh").write_text(script[0])
    python = tmp_path / "python3"  # no link: a virtual environment's is known by its path
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    port = free_port()
    done(
        ["sbatch", "--wait", "--nodes=2", "--ntasks-per-node=2", "--output=said", "job.sh"],
        {
            **variables,
            "HOME": str(tmp_path),
            "PATH": f"{tmp_path}:{variables['PATH']}",
            # Names of these nodes lead nowhere.
            "GPUCOLL_MEET": f"tcp://127.0.0.1:{port}",
        },
        cwd=tmp_path,
    )
    said = (tmp_path / "said").read_text()
    lines = [line for line in said.splitlines() if not line.startswith("gpucoll: compil")]

    assert sorted(lines) == [f"rank {rank} of 4: 4 True" for rank in range(4)], said
    assert not list(tmp_path.glob("secret*"))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]
