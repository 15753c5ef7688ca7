"""A Dask cluster of processes on this machine."""

from __future__ import annotations

import importlib.util
import tempfile

import pytest

N_WORKERS = 3


@pytest.fixture(scope="session")
def client():
    """Start three workers; lead to them."""
    if importlib.util.find_spec("distributed") is None:
        pytest.skip("distributed is not installed")
    from distributed import Client, LocalCluster

    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            n_workers=N_WORKERS,
            threads_per_worker=1,
            dashboard_address="127.0.0.1:0",
            local_directory=folder,
            silence_logs="CRITICAL",
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client
