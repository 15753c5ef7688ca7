"""The calls that are collected inside a group, until its end."""

from __future__ import annotations

import threading
from typing import TypeVar

from gpucoll.calls.preparation import NOT_IN_GROUPS
from gpucoll.errors import ArgumentError, ArgumentTypeError, StateError
from gpucoll.wording import ONE_THREAD

_T = TypeVar("_T")


class Collected(list[_T]):
    """Calls of one kind, made by the thread that opened the group.

    Parameters
    ----------
    is_async : bool
        Whether the group starts its calls, each of which returns a `Work`.
    """

    def __init__(self, *, is_async: bool = False) -> None:
        super().__init__()
        self.is_async = is_async
        self.thread = threading.get_ident()


def check_in_group(collected: Collected[_T], name: str, async_op: bool, lasting: object) -> None:
    """Raise unless a call can be deferred to the end of a group."""
    if collected.thread != threading.get_ident():
        raise StateError(
            f"{name}: another thread has opened a group() on this communicator: {ONE_THREAD}"
        )
    if collected.is_async:
        if not async_op:
            raise ArgumentError(f"{name}: inside group(async_op=True) it needs async_op=True, too")
        return
    if async_op:
        raise ArgumentError(
            f"{name}: inside group() a call cannot be asynchronous by itself; open the group with "
            "group(async_op=True)"
        )
    if lasting is NOT_IN_GROUPS:
        raise ArgumentTypeError(
            f"{name} cannot be called like this inside group(): its result is an object, a "
            "number or a converted array, which cannot be filled at the end. Pass contiguous "
            "arrays, or call it outside"
        )
