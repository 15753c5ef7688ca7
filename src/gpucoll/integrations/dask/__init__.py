"""Functions on the workers of a Dask cluster, each with a communicator.

>>> from gpucoll.integrations.dask import run
>>> run(function, args=(2.0,), client=client)  # function(comm, 2.0) on every worker

distributed is imported when workers are first used. See `docs/engines.md`.
"""

from gpucoll.integrations.dask.workers import Workers, run

__all__ = ["Workers", "run"]
