"""Functions on the workers of a Ray cluster, each with a communicator.

>>> from gpucoll.integrations.ray import run
>>> run(function, args=(2.0,), world_size=4)  # function(comm, 2.0) on each of four actors

Ray is imported when workers are first used. See `docs/engines.md`.
"""

from gpucoll.integrations.ray.workers import Workers, run

__all__ = ["Workers", "run"]
