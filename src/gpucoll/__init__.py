"""Collectives for Python arrays behind one communicator.

>>> import gpucoll
>>> with gpucoll.init() as comm:
...     total = comm.all_reduce(x)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gpucoll.version import __version__

if TYPE_CHECKING:
    from gpucoll.communicator import Communicator
    from gpucoll.description import Description
    from gpucoll.errors import (
        AbortedError,
        ArgumentError,
        ArgumentTypeError,
        AuthenticationError,
        BackendError,
        BackendUnavailableError,
        DeadlineError,
        GpucollError,
        LaunchError,
        MismatchError,
        PeerLostError,
        RendezvousError,
        StateError,
        UsageError,
    )
    from gpucoll.initialise import init
    from gpucoll.launcher.function import launch
    from gpucoll.plan import Plan
    from gpucoll.point_to_point import Message
    from gpucoll.types import ANY_SOURCE, ANY_TAG, ReduceOp
    from gpucoll.work import Work

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "AbortedError",
    "ArgumentError",
    "ArgumentTypeError",
    "AuthenticationError",
    "BackendError",
    "BackendUnavailableError",
    "Communicator",
    "DeadlineError",
    "Description",
    "GpucollError",
    "LaunchError",
    "Message",
    "MismatchError",
    "PeerLostError",
    "Plan",
    "ReduceOp",
    "RendezvousError",
    "StateError",
    "UsageError",
    "Work",
    "__version__",
    "init",
    "launch",
]

_HOMES = {
    "ANY_SOURCE": "types",
    "ANY_TAG": "types",
    "Communicator": "communicator",
    "Description": "description",
    "Message": "point_to_point",
    "Plan": "plan",
    "ReduceOp": "types",
    "Work": "work",
    "init": "initialise",
    "launch": "launcher.function",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: ``import gpucoll`` loads next to nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'gpucoll' has no attribute {name!r}")
    module = importlib.import_module(f"gpucoll.{_HOMES.get(name, 'errors')}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
