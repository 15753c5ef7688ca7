"""The doctor's rows of mpi4py: real MPIs, made-up ones that hang or crash, and how they read."""

from __future__ import annotations

import json
import os
import signal

import pytest
from tests import mpis
from tests.doctor.environments import laptop, nvidia

from gpucoll.doctor.isolation import Question, ask
from gpucoll.doctor.text import render


def found(**facts):
    memory = [
        {"kind": "cuda", "may_serve": True, "reason": "MPIX_Query_cuda_support() says yes"},
        {"kind": "rocm", "may_serve": False, "reason": "it does not say"},
    ]
    return {
        "mpi4py": "4.1.0",
        "library": "Open MPI v5.0.11",
        "path": "/mpi/libmpi.so.40",
        "thread_level": "multiple",
        "large_counts": False,
        "gpu_memory": memory,
        "problem": None,
        **facts,
    }


def rows(environment, **facts):
    environment.found["mpi"] = found(**facts)
    text = render(environment.report())
    assert "Libraries" in text
    return " ".join(text.partition("\nLibraries")[2].partition("Python packages")[0].split())


def test_what_mpi_there_is():
    text = rows(nvidia())
    assert "ok mpi4py 4.1.0 over Open MPI v5.0.11, thread level multiple, counts of 31" in text
    assert (
        "NVIDIA GPUs: MPI reports that it accepts their addresses (MPIX_Query_cuda_support()"
        in text
    )
    assert "AMD" not in text
    text = rows(laptop(), large_counts=True)
    assert "counts beyond 31 bits" in text
    assert "AMD GPUs: staged through page-locked host memory (it does not say)" in text


def test_what_stands_against_it():
    text = rows(laptop(), thread_level="funneled")
    assert "note mpi4py" in text
    assert "backend='mpi' needs thread level multiple" in text
    text = rows(laptop(), problem="mpi4py finds no MPI library", library=None, gpu_memory=[])
    assert "note mpi4py 4.1.0: mpi4py finds no MPI library" in text


TO_A_FILE = """
import contextlib, os, runpy, sys
folder = sys.argv.pop(1)
with open(f"{folder}/{os.getpid()}", "w") as file, contextlib.redirect_stdout(file):
    runpy.run_module("gpucoll.doctor", run_name="__main__", alter_sys=True)
"""
"""Each rank's report goes to a file: mpiexec mixes pieces of what two ranks print."""


@pytest.mark.parametrize("name", mpis.FOLDERS)
def test_real_mpis(name, tmp_path):
    """Under a launcher, whose job the probe has no part in."""
    mpi = mpis.installed(name)
    if mpi is None:
        pytest.skip(f"{name} is not installed (see GPUCOLL_TEST_MPI in tests/README.md)")
    code, output = mpi.run(2, "-c", TO_A_FILE, str(tmp_path), "--json", "--no-self-test")
    assert code == 0, output
    reports = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert len(reports) == 2, output
    for report in reports:
        assert report["problems"] == []
        mpi_found = report["mpi"]
        assert mpi_found["problem"] is None
        assert mpi_found["mpi4py"][0].isdigit()
        assert {"mpich": "MPICH", "openmpi": "Open MPI", "impi": "Intel"}[name] in mpi_found[
            "library"
        ]
        assert os.path.realpath(mpi_found["path"]).startswith(os.path.realpath(mpi.folder))
        assert mpi_found["thread_level"] == "multiple"
        assert mpi_found["large_counts"] is (name != "openmpi")
        assert [x["kind"] for x in mpi_found["gpu_memory"]] == ["cuda", "rocm"]
        assert not any(x["may_serve"] for x in mpi_found["gpu_memory"])  # wheels without GPUs
        assert all(x["reason"] for x in mpi_found["gpu_memory"])


@pytest.fixture
def mpi4py(tmp_path, monkeypatch):
    """Make an mpi4py whose MPI does what it is given, and ask the probe."""

    def ask_it(text, timeout_s=20.0):
        (tmp_path / "mpi4py").mkdir()
        (tmp_path / "mpi4py/__init__.py").write_text("")
        (tmp_path / "mpi4py/MPI.py").write_text(text)
        (tmp_path / "mpi4py-4.9.dist-info").mkdir()
        (tmp_path / "mpi4py-4.9.dist-info/METADATA").write_text(
            "Metadata-Version: 2.1\nName: mpi4py\nVersion: 4.9\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        (answer,) = ask([Question("mpi", (), timeout_s)])
        return answer

    return ask_it


@pytest.mark.soak
def test_one_that_hangs(mpi4py):
    answer = mpi4py("import signal; signal.pause()", 3.0)
    assert answer == (None, "no answer within 3 s; it was ended")


def test_one_that_crashes(mpi4py):
    answer = mpi4py(f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})")
    assert answer == (None, "killed by SIGSEGV")


def test_one_without_a_library(mpi4py):
    answer = mpi4py("raise RuntimeError('cannot load MPI library')")
    assert answer.problem is None
    assert answer.found["mpi4py"] == "4.9"
    assert "cannot load MPI library" in answer.found["problem"]
    assert answer.found["library"] is None
