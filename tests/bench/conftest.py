"""The bench on a double: a library in `double_library.py` stands in for gpucoll and for peers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpucoll.bench import cli, peers, starts

DOUBLE = str(Path(__file__).with_name("double_library.py"))


@pytest.fixture
def on_double(monkeypatch, tmp_path):
    """Let the double's ranks be measured as gpucoll's; return a function that sets a fault."""
    (tmp_path / "store").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("BENCH_DOUBLE_STORE", str(tmp_path / "store" / "own"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(starts, "OWN_LIBRARY", DOUBLE)
    monkeypatch.setattr(cli, "compile_kernels", lambda: None)
    yield lambda fault: monkeypatch.setenv("BENCH_DOUBLE", fault)
    left = list((tmp_path / "temporary").iterdir())
    assert not left, f"left behind: {left}"


@pytest.fixture
def double_peer(monkeypatch):
    """Return a function that puts the double, with a fault, in the place of a peer."""

    def put(name, fault=""):
        peer = replace(
            peers.PEERS[name],
            library=DOUBLE,
            modules=("numpy",),
            signature="Double",
            environment={"BENCH_DOUBLE": fault},
        )
        monkeypatch.setitem(peers.PEERS, name, peer)

    return put
