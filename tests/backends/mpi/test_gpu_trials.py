"""Trials of MPI on a GPU's memory that go wrong, and what is kept of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from tests.backends.mpi.test_gpu_aware import Gpu, mpi_double
from tests.calls.gpu import cupy_double
from tests.waiting import SOON_S

from gpucoll.backends.mpi import gpu_aware, gpu_trial_program
from gpucoll.devices import open_device


def test_a_trial_belongs_to_no_job():
    given = {
        "PMI_RANK": "1", "PMI_FD": "9", "PMIX_RANK": "1", "PMIX_SERVER_URI2": "x",
        "HYDI_CONTROL_FD": "7",
        "OMPI_COMM_WORLD_RANK": "1", "OMPI_MCA_ess_base_jobid": "1", "OMPI_MCA_orte_hnp_uri": "x",
        "SLURM_PROCID": "1", "MPI_LOCALRANKID": "1", "PALS_RANKID": "1", "I_MPI_HYDRA_UUID": "x",
    }  # fmt: skip
    kept = {
        "PATH": "/bin", "OMPI_MCA_accelerator": "cuda", "OMPI_MCA_btl": "self",
        "OPAL_PREFIX": "/mpi", "I_MPI_OFFLOAD": "1", "MPICH_GPU_SUPPORT_ENABLED": "1",
        "CUDA_VISIBLE_DEVICES": "1",
        "PMIX_PREFIX": "/mpi", "UCX_TLS": "tcp",
    }  # fmt: skip

    made = gpu_aware.environment(given | kept)

    assert made == kept | {"OMPI_MCA_ess_singleton_isolated": "1"}


# --- trials ---------------------------------------------------------------------------------------

CRASH = f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})"
HANG = "import signal; signal.pause()"
ABORT = "import sys; sys.stderr.write('MPI_ABORT was called\\n'); raise SystemExit(14)"
PASS = f"print({gpu_trial_program.PASSED!r})"


@pytest.fixture
def trial(monkeypatch, tmp_path):
    """Return what tries a program in the place of a trial's, kept in a folder of its own."""
    tmp_path.chmod(0o700)
    monkeypatch.setattr(gpu_aware, "_FOLDER", str(tmp_path))

    def run(program, limit_s=20.0, mpi=None):
        monkeypatch.setattr(gpu_aware, "PROGRAM", (sys.executable, "-c", program))
        gpu: Any = Gpu()
        return gpu_aware.tried(mpi or mpi_double(), gpu, limit_s)

    return run


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (CRASH, "killed by SIGSEGV (no word)"),
        (ABORT, "ended with code 14: MPI_ABORT was called"),
        ("", "ended with code 0: no word"),
        ("print('something else')", "ended with code 0"),
    ],
)
def test_a_trial_that_fails(trial, program, why):
    problem = trial(program)
    assert why in problem
    assert "remove it to try again" in problem


def test_a_trial_without_an_end(trial, tmp_path):
    found = re.search(r"did not end within ([\d.]+) s", trial(HANG, limit_s=0.3))
    assert found is not None
    assert 0 < float(found[1]) <= 0.3  # what was left of it when the trial began
    # This limit was the caller's, not a trial's: the next one may have more time.
    assert trial(PASS) == ""


def test_a_trial_is_kept_for_its_mpi_and_settings(trial, monkeypatch):
    assert trial(PASS) == ""
    assert trial(CRASH) == "", "it was made again"
    assert "SIGSEGV" in trial(CRASH, mpi=mpi_double(name="Open MPI v6"))
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert "SIGSEGV" in trial(CRASH)
    monkeypatch.setenv("PMI_RANK", "1")
    assert "SIGSEGV" in trial(PASS), "made again for what a launcher sets"


def test_a_result_that_was_cut_off_is_made_again(trial, tmp_path):
    assert "SIGSEGV" in trial(CRASH)
    (kept,) = (path for path in tmp_path.iterdir() if path.suffix != ".lock")
    kept.write_bytes(kept.read_bytes()[:-1])
    assert trial(PASS) == ""


def test_no_process(trial, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", refuse)
    gpu: Any = Gpu()
    assert gpu_aware._try(gpu, 1.0) == ("no process can be started to try it: too many", False)


def refuse(*_, **__):
    raise OSError(11, "too many")


class Memory:
    """What mpi4py makes of an address."""

    def __init__(self, address, size_bytes):
        self.address, self._size_bytes = address, size_bytes

    def __len__(self):
        return self._size_bytes

    @staticmethod
    def fromaddress(address, size_bytes):
        return Memory(address, size_bytes)


@pytest.mark.parametrize("drawn", [os.urandom, bytes])
@pytest.mark.parametrize("but", [None, 0, 7])
def test_the_bytes_are_compared(monkeypatch, but, drawn):
    from gpucoll.devices import open_host

    monkeypatch.setattr(os, "urandom", drawn)  # `bytes` draws zeros, as chance does at times
    mpi = mpi_double()
    mpi.COMM_SELF.but, mpi.buffer, mpi.BYTE = but, Memory, None
    mpi.Request = SimpleNamespace(Waitall=lambda _: None)
    if but is None:
        gpu_trial_program.send_to_self(mpi, open_host(), 8)
    else:
        with pytest.raises(SystemExit, match="of 8 bytes sent, some came back different"):
            gpu_trial_program.send_to_self(mpi, open_host(), 8)


def send_by_a_stream(seat, double, is_blocking):
    """What MPI copies goes by a stream of its own, which blocks: that of Open MPI, or not."""
    double.load()
    device = open_device(double.kind, 0)
    cupy = cupy_double.install(double.kind)
    cupy.cuda.Device(0).use()
    stream = cupy.cuda.Stream(non_blocking=not is_blocking).ptr
    mpi: Any = mpi_double()

    def copy(given, dest):
        landing, source = mpi.COMM_SELF._landing, given[0]
        device.copy(landing.address, source.address, len(source), stream)
        device.synchronize_stream(stream)

    mpi.COMM_SELF.Isend, mpi.buffer, mpi.BYTE = copy, Memory, None
    mpi.Request = SimpleNamespace(Waitall=lambda _: None)
    held_s = 0.2 if is_blocking else SOON_S
    with device, mock.patch.object(gpu_trial_program, "HELD_S", held_s):
        gpu_trial_program.send_to_self(mpi, device, 8)
        try:
            gpu_trial_program.send_to_self(mpi, device, 8, is_held=True)
        except SystemExit as ended:
            return str(ended)
    return ""


@pytest.mark.parametrize("vendor", ["nccl", "rccl"])
@pytest.mark.parametrize("is_blocking", [True, False])
def test_an_mpi_that_waits_for_the_default_stream(gpu_ranks, doubles, vendor, is_blocking):
    double = doubles.double(vendor)
    given = {"gives": "seat", "environment": double.variables}

    (said,) = gpu_ranks.call(1, send_by_a_stream, double, is_blocking, **given)

    assert ("wait for the default stream" in said) == is_blocking, said
