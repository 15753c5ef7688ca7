"""``python -m gpucoll.integrations.jax FILE``: run a JAX program whose processes use gpucoll."""

from __future__ import annotations

import sys

from gpucoll.integrations.aliases import run_program
from gpucoll.integrations.jax.processes.start import leave, prepare, use_for_processes
from gpucoll.integrations.jax.processes.when_imported import AroundJax

_USAGE = """usage: python -m gpucoll.integrations.jax [-m MODULE | -c CODE | FILE] arguments...

Runs a JAX program: its collectives between processes, on CPUs, go through gpucoll.
On four ranks: gpucoll-run -n 4 -m gpucoll.integrations.jax FILE arguments..., or
GPUCOLL_JAX=1 gpucoll-run -n 4 FILE arguments..."""


def _prepare() -> None:
    sys.meta_path.insert(0, AroundJax(prepare, use_for_processes))


if __name__ == "__main__":
    try:
        run_program(sys.argv[1:], _USAGE, _prepare)
    except SystemExit as end:
        if end.code not in (None, 0):
            leave()
        raise
