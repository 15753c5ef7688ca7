"""Make ``import mpi4jax`` load this package, for programs that should not be changed."""

from __future__ import annotations

from gpucoll.integrations.aliases import Alias
from gpucoll.integrations.mpi4py import alias as of_mpi4py


def install() -> None:
    """Make ``import mpi4jax`` and ``import mpi4py`` load gpucoll's in this process from now on."""
    of_mpi4py.install()
    Alias("mpi4jax", __name__.rpartition(".")[0]).install()
