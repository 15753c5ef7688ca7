"""Programs on two ranks, started by torchrun as a user starts them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gpucoll

ROOT = Path(__file__).resolve().parents[4]
WAIT_S = 120.0
ENTRY_POINT = "[torch.backends]\ngpucoll = gpucoll.integrations.torch.registration:register\n"


@pytest.fixture(scope="session")
def path_of_ranks(tmp_path_factory):
    """Return a PYTHONPATH where `import torch` finds the backend, as where gpucoll is installed."""
    folders = [str(Path(gpucoll.__file__).parent.parent)]
    folders += filter(None, [os.environ.get("PYTHONPATH")])
    if not importlib.metadata.entry_points(group="torch.backends", name="gpucoll"):
        folder = tmp_path_factory.mktemp("installed")
        about = folder / f"gpucoll-{gpucoll.__version__}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Name: gpucoll\nVersion: {gpucoll.__version__}\n")
        (about / "entry_points.txt").write_text(ENTRY_POINT)
        folders.append(str(folder))
    return os.pathsep.join(folders)


@pytest.fixture
def torchrun(path_of_ranks, tmp_path):
    """Run a program on two ranks and return its output: ``torchrun("examples/torch/a.py")``."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")

    def torchrun(program, *options, **variables):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        process = subprocess.Popen(
            [*command, "--nproc-per-node", "2", str(ROOT / program), *map(str, options)],
            env={**os.environ, "PYTHONPATH": path_of_ranks, "OMP_NUM_THREADS": "1", **variables},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=WAIT_S)
        finally:
            if process.poll() is None:
                process.terminate()  # an agent ends its ranks
                try:
                    process.communicate(timeout=WAIT_S / 4)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
        assert process.returncode == 0, out + err
        assert not list(tmp_path.iterdir()), "the program left files where it was started"
        return out

    return torchrun


@pytest.fixture
def needed():
    """Skip a test whose packages are not installed; `requirements.txt` names their versions."""

    def needed(*packages):
        for package in packages:  # they are not imported here, where some take seconds
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed")

    return needed
