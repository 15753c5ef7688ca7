"""A Ray cluster of two nodes on this machine, which are two hosts to gpucoll."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import tempfile
from pathlib import Path

import pytest

CPUS, WORKERS = 2, 10
"""Of each node: Ray starts a process for each CPU beforehand, so tests take parts of one."""


@pytest.fixture(scope="session")
def cluster():
    """Start it; the tests are its driver."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    folder = tempfile.mkdtemp(prefix="gct-ray-", dir="/tmp")  # sockets lie deep below: a short one
    (Path(folder) / "ray").mkdir()
    variables = {
        "RAY_TMPDIR": folder,  # where Ray makes a folder "ray", and expects one
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # it kills tests where others fill the memory
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray leaves one in the home
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)  # which Ray reads when it is imported
    import ray
    from ray.cluster_utils import Cluster

    started = Cluster()
    try:
        for host in "ab":
            head = {"include_dashboard": False} if host == "a" else {}
            started.add_node(
                num_cpus=CPUS,
                resources={f"host-{host}": WORKERS},
                object_store_memory=80_000_000,
                env_vars={"GPUCOLL_HOST_ID": f"host {host}", "GPUCOLL_INTERFACES": "lo"},
                **head,
            )
        ray.init(address=started.address, log_to_driver=False, logging_level="ERROR")
        yield started
    finally:
        ray.shutdown()
        started.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
