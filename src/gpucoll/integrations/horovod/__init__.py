"""Horovod's API over gpucoll: ``import gpucoll.integrations.horovod.torch as hvd``.

Programs written for Horovod run unchanged, on any of gpucoll's backends: `docs/horovod.md`.
"""

__version__ = "0.28.1"
