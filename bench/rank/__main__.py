"""A rank of any library, as a process of its own: connects to the driver and does what it says.

Run by path, by the Python of the environment in which the library lives::

    /some/environment/bin/python .../gpucoll/bench/rank/__main__.py --library mpi --connect ...

gpucoll is not installed there, so its two outer packages are given as empty ones.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


def reach_own_package(library: str) -> None:
    """Make ``gpucoll.bench.rank`` importable, without gpucoll unless that is what is measured."""
    here = Path(__file__).parent
    # Python put this folder first on the path, where its files would shadow other modules.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").absolute() != here.absolute()]
    if library == "gpucoll":
        return
    for name, folders in (("gpucoll", []), ("gpucoll.bench", [str(here.parent)])):
        module = ModuleType(name)
        module.__path__ = folders
        sys.modules[name] = module


if __name__ == "__main__":
    reach_own_package(sys.argv[sys.argv.index("--library") + 1])
    from gpucoll.bench.rank.process import main

    sys.exit(main(sys.argv[1:]))
