"""Which host this is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpucoll.topology import host_identity
from gpucoll.topology.host_identity import host_id

PRINT = "from gpucoll.topology.host_identity import host_id; print(host_id())"


def elsewhere(*command):
    """Return what a process says that these words start."""
    path = str(Path(host_identity.__file__).parent.parent.parent)
    done = subprocess.run(
        [*command, sys.executable, "-c", PRINT],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": path},
    )
    return done.stdout.strip() if done.returncode == 0 else None


def test_processes_of_a_host_agree():
    assert elsewhere() == host_id()
    assert "/net:[" in host_id()
    assert "/uts:[" in host_id()


@pytest.mark.parametrize("namespace", ["--net", "--uts"])
def test_a_namespace_of_its_own_is_a_host_of_its_own(namespace):
    command = ("unshare", "--user", "--map-root-user", namespace)
    found = elsewhere(*command)
    if found is None:
        pytest.skip("no namespaces here: neither as root nor for users")

    assert found != host_id()
    assert found.split("/")[0] == host_id().split("/")[0]  # the same kernel


def test_a_given_one(monkeypatch):
    monkeypatch.setenv("GPUCOLL_HOST_ID", "my host")

    assert host_id() == "my host"
