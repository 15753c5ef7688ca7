"""Launchers that need no GPU, in the place of the driver's."""

from __future__ import annotations

import pytest
from tests.kernels.gpu import host

from gpucoll.kernels.gpu import launch


@pytest.fixture(scope="session")
def host_launcher(pytestconfig, tmp_path_factory):
    if host.COMPILER is None:
        pytest.skip("no C++ compiler (g++ or clang++) to compile the GPU kernels as host code")
    cache = getattr(pytestconfig, "cache", None)  # there is none with -p no:cacheprovider
    name = "gpucoll-host-kernels"
    folder = cache.mkdir(name) if cache else tmp_path_factory.mktemp(name)
    return host.HostLauncher(folder)


@pytest.fixture
def on_host(host_launcher, monkeypatch):
    """Have the launchers take NumPy arrays, and two blocks do all the work: each has many tiles."""
    monkeypatch.setattr(launch, "BLOCKS_PER_MULTIPROCESSOR", 2)
    monkeypatch.setitem(launch.LAUNCHERS, "cpu", lambda: host_launcher)
    launch.launcher_of.cache_clear()
    yield
    launch.launcher_of.cache_clear()
