"""KVStore "gpucoll" for MXNet 1.9.1: ``gluon.Trainer(..., kvstore="gpucoll")``, and for Module.

Importing this package registers the store. See `docs/mxnet.md`. MXNet was retired in 2023.
"""

# ruff: noqa: E402  # MXNet needs a name of NumPy before it is imported

from __future__ import annotations

from gpucoll.integrations.old_numpy import restore

restore()

from gpucoll.integrations.mxnet.store import Gpucoll, broadcast_parameters, register

__all__ = ["Gpucoll", "broadcast_parameters"]

register()
