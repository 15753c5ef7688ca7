from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from gpucoll.bench import cli, peers

ARGUMENTS = ["--ranks", "2", "-b", "4", "-e", "4", "-n", "3", "-w", "1", "--rounds", "2"]


def test_a_missing_python_is_named_with_what_to_do(on_double, capfd):
    assert cli.main([*ARGUMENTS, "--compare", "mpich=/nowhere/bin/python"]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""  # nothing was measured
    assert "mpich: no Python at /nowhere/bin/python" in captured.err
    assert "E/bin/pip install numpy mpi4py mpich" in captured.err
    assert "--compare mpich=E/bin/python" in captured.err


def test_a_missing_module_is_named(on_double, monkeypatch, capfd):
    lacking = replace(peers.PEERS["openmpi"], modules=("numpy", "no_such_module"))
    monkeypatch.setitem(peers.PEERS, "openmpi", lacking)
    assert cli.main([*ARGUMENTS, "--compare", "openmpi"]) == 2
    assert f"openmpi: {sys.executable} lacks no_such_module" in capfd.readouterr().err


def test_what_is_no_python_is_said_to_be_none(tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(peers.PeerMissingError, match="does not run as a Python"):
        peers.locate("gloo", str(program))


def test_a_python_that_is_too_old_is_refused(tmp_path):
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho \'{"version": [3, 9], "missing": []}\'\n')
    program.chmod(0o755)
    with pytest.raises(peers.PeerMissingError, match=r"is Python 3\.9, .* at least 3\.10"):
        peers.locate("gloo", str(program))


def test_an_mpi_without_its_mpiexec_is_missing(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(peers.PEERS, "impi", replace(peers.PEERS["impi"], modules=("numpy",)))
    with pytest.raises(peers.PeerMissingError, match="impi: there is no mpiexec next to"):
        peers.locate("impi", str(tmp_path))  # the environment's folder will do
    mpiexec = tmp_path / "bin" / "mpiexec"
    mpiexec.touch()
    located = peers.locate("impi", str(tmp_path))
    assert located.command(3, ["--rank-program"]) == [
        str(mpiexec), "-n", "3", str(program), "--rank-program",
    ]  # fmt: skip


def test_a_peers_environment_is_not_this_pythons(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/this/python")
    monkeypatch.setenv("MPI4PY_RC_THREAD_LEVEL", "single")
    environment = peers.environment_of_peer()
    assert "PYTHONPATH" not in environment
    assert environment["MPI4PY_RC_THREAD_LEVEL"] == "single"
