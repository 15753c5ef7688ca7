"""Collective communication between Python processes: arrays behind one communicator.

>>> import gpucoll
>>> with gpucoll.init() as comm:
...     total = comm.all_reduce(x)

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from gpucoll.version import __version__

if TYPE_CHECKING:
    from gpucoll.api.communicator import Communicator
    from gpucoll.api.description import Description
    from gpucoll.api.initialise import init
    from gpucoll.api.joining import join
    from gpucoll.api.messages import Message
    from gpucoll.calls.message_work import MessageWork
    from gpucoll.calls.plan import Plan
    from gpucoll.calls.wait_for_several import wait_all, wait_any
    from gpucoll.calls.work import Work
    from gpucoll.compression import Compression
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
        RendezvousDeadlineError,
        RendezvousError,
        SecureSumError,
        SharedMemoryError,
        ShrinkError,
        StateError,
        TooFewClientsError,
        UsageError,
    )
    from gpucoll.launcher.function import launch
    from gpucoll.types import ANY_SOURCE, ANY_TAG, ReduceOp

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
    "Compression",
    "DeadlineError",
    "Description",
    "GpucollError",
    "LaunchError",
    "Message",
    "MessageWork",
    "MismatchError",
    "PeerLostError",
    "Plan",
    "ReduceOp",
    "RendezvousDeadlineError",
    "RendezvousError",
    "SecureSumError",
    "SharedMemoryError",
    "ShrinkError",
    "StateError",
    "TooFewClientsError",
    "UsageError",
    "Work",
    "__version__",
    "init",
    "join",
    "launch",
    "wait_all",
    "wait_any",
]

_HOMES = {
    "ANY_SOURCE": "types",
    "ANY_TAG": "types",
    "Communicator": "api.communicator",
    "Compression": "compression",
    "Description": "api.description",
    "Message": "api.messages",
    "MessageWork": "calls.message_work",
    "Plan": "calls.plan",
    "ReduceOp": "types",
    "Work": "calls.work",
    "init": "api.initialise",
    "join": "api.joining",
    "launch": "launcher.function",
    "wait_all": "calls.wait_for_several",
    "wait_any": "calls.wait_for_several",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: ``import gpucoll`` loads almost nothing."""
    if name not in __all__:
        if name.startswith("_") or importlib.util.find_spec(f"gpucoll.{name}") is not None:
            # `from gpucoll import module` first looks up the attribute, then imports the module.
            raise AttributeError(f"module 'gpucoll' has no attribute {name!r}")
        from gpucoll.api.names_elsewhere import missing_from_package

        raise AttributeError(missing_from_package(name, __all__))
    module = importlib.import_module(f"gpucoll.{_HOMES.get(name, 'errors')}")
    value = globals()[name] = getattr(module, name)  # the next look costs 2 us less
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
