"""``python -m gpucoll.integrations.jax.mpi4jax script.py``: run a program of mpi4jax on gpucoll."""

from __future__ import annotations

import sys

from gpucoll.integrations.aliases import run_program
from gpucoll.integrations.jax.mpi4jax.alias import install

_USAGE = """usage: python -m gpucoll.integrations.jax.mpi4jax [-m MODULE | -c CODE | FILE] ...

Runs a program of mpi4jax on gpucoll: `import mpi4jax` finds gpucoll.integrations.jax.mpi4jax, and
`import mpi4py` finds gpucoll.integrations.mpi4py.
On four ranks: gpucoll-run -n 4 -m gpucoll.integrations.jax.mpi4jax FILE arguments..."""

if __name__ == "__main__":
    run_program(sys.argv[1:], _USAGE, install)
