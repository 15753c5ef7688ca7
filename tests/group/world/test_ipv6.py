"""Everything between hosts over IPv6: played hosts that meet and talk at ::1."""

from __future__ import annotations

import socket

import numpy as np
import pytest
from tests.certificates import Authority

from gpucoll import config

PLACED = "aabc"


@pytest.fixture(scope="module", autouse=True)
def _ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this host has no ::1")


@pytest.fixture(scope="module", params=["plain", "TLS"])
def environment(request, tmp_path_factory):
    made = {config.INTERFACES: "::1"}
    if request.param == "TLS":
        made |= Authority(tmp_path_factory.mktemp("certificates") / "ca").environment()
    return made


def work(comm):
    small, large = comm.all_reduce(1), comm.all_reduce(np.ones(1_000_000))
    with comm.split(comm.rank % 2) as part:
        parts = part.all_reduce(np.ones(100_000))
    links = dict(comm.describe().facts)["links"]
    comm.barrier()
    return small, float(large[-1]), float(parts[0]), links


@pytest.mark.parametrize("is_by_port", [True, False])
def test_all_of_it(hosts, environment, is_by_port):
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
        meet = f"tcp://[::1]:{free.getsockname()[1]}" if is_by_port else ""

    replies = hosts.call(PLACED, work, environment=environment, meet=meet)

    for rank, (small, large, part, links) in enumerate(replies):
        assert (small, large, part) == (4, 4.0, 2.0)
        assert ("at [::1]:" in links) == (rank != 1), links
