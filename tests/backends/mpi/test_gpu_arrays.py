"""backend="mpi" with GPU arrays on real MPIs: between GPUs where MPI knows their memory."""

from __future__ import annotations

import pytest

PROGRAM = "tests/backends/mpi/gpu_program.py"
ON_HOST_DEVICES = {"GPUCOLL_DEVICE": "host", "GPUCOLL_CPU_ONLY": "0"}


@pytest.fixture
def on_devices(mpi, tmp_path):
    """Run functions of the program over Host devices."""
    (tmp_path / "trials").mkdir(0o700)
    given = {**ON_HOST_DEVICES, "GPUCOLL_TEST_FOLDER": str(tmp_path / "trials")}
    return lambda n_ranks, *names, **more: mpi.run(n_ranks, PROGRAM, *names, **given, **more)


def ended_well(result, n_ranks):
    code, output = result
    assert code == 0, output
    assert output.count("has ended well") == n_ranks, output


def test_collectives(on_devices):
    ended_well(on_devices(2, "cases", "by_kernels", "pieces", "streams", "staged", "trial"), 2)


def test_between_hosts(on_devices):
    ended_well(on_devices(3, "between_hosts", GPUCOLL_TEST_HOSTS="aba"), 3)


def test_rings_between_hosts(on_devices):
    told = {"GPUCOLL_TEST_HOSTS": "aab", "GPUCOLL_MPI_GPU_ARRAYS": "staged"}
    ended_well(on_devices(3, "rings", **told), 3)


@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
def test_what_mpi_does_not_end(on_devices):
    _, output = on_devices(2, "left_with_requests")

    assert output.count("as expected") == 2, output


@pytest.mark.parametrize(
    ("mpi", "vendor", "hosts"),
    [("openmpi", "nccl", "ab"), ("mpich", "rccl", "aa")],
    indirect=["mpi"],
)
def test_gpus_of_a_vendor(mpi, doubles, vendor, hosts, tmp_path):
    """Asked, tried in a process of its own by one rank of a host, used: over a driver's double."""
    double = doubles.double(vendor)
    (tmp_path / "trials").mkdir(0o700)
    run_with = {
        **double.variables,
        "GPUCOLL_GPU_KIND": double.kind,
        "GPUCOLL_TEST_HOSTS": hosts,
        "GPUCOLL_TEST_FOLDER": str(tmp_path / "trials"),
        "GPUCOLL_TEST_DOUBLES": str(double.driver.parent),
        "GPUCOLL_TEST_SAYS": str(doubles.mpi(cuda=1, hip=1)),
        "LD_LIBRARY_PATH": f"{mpi.environment()['LD_LIBRARY_PATH']}:{double.driver.parent}",
    }
    ended_well(mpi.run(2, PROGRAM, "doubled", **run_with), 2)
