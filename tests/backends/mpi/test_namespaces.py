"""Ranks on two hosts, network namespaces: MPICH's mpiexec reaches them as it would hosts."""

from __future__ import annotations

import os

import pytest
from tests import mpis
from tests.group.world.test_namespaces import made_namespaces

PROGRAM = "tests/backends/mpi/program.py"


@pytest.fixture(scope="module")
def namespaces():
    yield from made_namespaces()


@pytest.fixture
def mpich(namespaces, tmp_path):
    """MPICH, with two ranks on the first host and one on the second."""
    found = mpis.installed("mpich")
    if found is None:
        pytest.skip("mpich is not installed (see GPUCOLL_TEST_MPI in tests/README.md)")
    remote = tmp_path / "remote"
    remote.write_text(
        "#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nhost=$1; shift\n"
        f"names=({' '.join(namespaces.names)})\n"
        'exec ip netns exec "${names[$(( ${host##*.} - 1 ))]}" unshare --uts bash -c "$*"\n'
    )
    remote.chmod(0o755)
    hosts = ["-launcher", "ssh", "-launcher-exec", str(remote), "-hosts", "10.78.0.1:2,10.78.0.2:1"]
    before = ("ip", "netns", "exec", namespaces.names[0])
    return mpis.Mpi("mpich", found.folder, before, (*hosts, "-iface", "eth0"))


def test_between_hosts(mpich):
    """They are given no meeting point and no secret: MPI tells them."""
    given = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0", "GPUCOLL_INTERFACES": "eth0"}
    for name in ("GPUCOLL_SECRET", "GPUCOLL_SECRET_FILE", "GPUCOLL_MEET"):
        assert not os.environ.get(name)

    code, output = mpich.run(
        3, PROGRAM, "met_by_init", "cases", "calls", "mismatch", "traffic", **given
    )

    assert code == 0, output
    assert output.count("has ended well") == 3, output
