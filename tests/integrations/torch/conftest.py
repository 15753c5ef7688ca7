"""Ranks that have torch, and process groups of them."""

from __future__ import annotations

import pytest
from tests.process_groups import ProcessGroups, load_torch
from tests.ranks import Pools, RankServer


@pytest.fixture(scope="session")
def torch_server():
    """A process that has loaded torch, from which ranks are forked: each would take 2 s for it."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    with RankServer() as server:
        server.call(load_torch)
        yield server


@pytest.fixture(scope="session")
def torch_ranks(torch_server):
    """Ranks as the fixture `ranks`, with torch."""
    pools = Pools(torch_server)
    yield pools
    pools.close()


@pytest.fixture
def groups(torch_ranks, tmp_path):
    """Call a function of the test on ranks inside a process group: ``groups.call(2, function)``."""
    return ProcessGroups(torch_ranks, tmp_path)
