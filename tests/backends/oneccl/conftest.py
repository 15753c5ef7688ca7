"""oneCCL with its CPU plug-in: libraries out of packages of PyPI, which are not installed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.calls.gpu.host_devices import HostDevices, _HostGpus, in_rank

from gpucoll import config

_REQUIREMENTS = Path(__file__).parents[2] / "integrations" / "requirements" / "oneccl.txt"
_FETCH_S = 180
_TAKEN = {
    "oneccl": ("libccl.so.2", "libccl_legacy_cpu.so"),
    "oneccl_cpu": ("libccl.so.1",),  # that of oneccl needs SYCL
    "mpich": ("libfabric.so.1",),
}
"""Package -> the libraries that are taken out of it."""


def variables_of(library: Path, folder: Path) -> dict[str, str]:
    """Return the environment of ranks whose oneCCL is this one, on Host devices."""
    return {
        config.CPU_ONLY: "0",
        config.DEVICE: "host",
        config.ONECCL_LIBRARY: str(library),
        "CCL_OFI_LIBRARY_PATH": str(folder / "libfabric.so.1"),
        "CCL_LOG_LEVEL": "error",
        "FI_PROVIDER": "tcp",
    }


@pytest.fixture(scope="session")
def oneccl_folder(tmp_path_factory):
    """Where oneCCL's libraries are; skips where they cannot be had.

    ``GPUCOLL_TEST_ENVIRONMENTS`` names a folder whose ``oneccl`` has them already.
    """
    kept = Path(os.environ.get("GPUCOLL_TEST_ENVIRONMENTS", "/nowhere")) / "oneccl"
    if kept.exists():
        return kept
    folder = tmp_path_factory.mktemp("oneccl")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    try:
        done = subprocess.run(
            [*command, "-r", str(_REQUIREMENTS)],
            capture_output=True,
            text=True,
            timeout=_FETCH_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"the packages of oneCCL could not be fetched within {_FETCH_S} s")
    if done.returncode:
        pytest.skip(f"the packages of oneCCL cannot be fetched: {done.stderr.strip()[-300:]}")
    for package, names in _TAKEN.items():
        (wheel,) = folder.glob(f"{package}-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            for name in names:
                member = next(each for each in packed.namelist() if each.endswith(f"/{name}"))
                (folder / name).write_bytes(packed.read(member))
        wheel.unlink()
    return folder


@pytest.fixture(scope="module")
def oneccl_ranks(rank_server):
    """Ranks that load oneCCL, which stays in them: apart from those of other tests."""
    from tests.ranks import Pools

    pools = Pools(rank_server)
    yield pools
    pools.close()


@pytest.fixture
def oneccl(oneccl_ranks, oneccl_folder):
    """Where tests run: ranks with Host devices, and oneCCL's CPU plug-in."""
    variables = variables_of(oneccl_folder / "libccl.so.2", oneccl_folder)
    return _HostGpus(oneccl_ranks, HostDevices(variables=variables), in_rank)
