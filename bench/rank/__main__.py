"""A rank of any library as a separate process, which executes the driver's commands.

The Python of the library's environment runs this file by its path::

    /some/environment/bin/python .../gpucoll/bench/rank/__main__.py --library mpi --connect ...

gpucoll is not installed there, so empty packages stand in for its two outer packages.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


def reach_own_package(library: str) -> None:
    """Make ``gpucoll.bench.rank`` importable, without gpucoll unless gpucoll is measured."""
    here = Path(__file__).parent
    # Python puts this folder first on the path, where its files would shadow other modules.
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
