"""``python -m gpucoll.integrations.mpi4py script.py``: run a program of mpi4py on gpucoll."""

from __future__ import annotations

import sys

from gpucoll.integrations.aliases import run_program
from gpucoll.integrations.mpi4py.alias import install

_USAGE = """usage: python -m gpucoll.integrations.mpi4py [-m MODULE | -c CODE | FILE] arguments...

Runs a program of mpi4py on gpucoll: `import mpi4py` finds gpucoll.integrations.mpi4py.
On four ranks: gpucoll-run -n 4 -m gpucoll.integrations.mpi4py FILE arguments..."""

if __name__ == "__main__":
    run_program(sys.argv[1:], _USAGE, install)
