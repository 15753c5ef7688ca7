"""The loop around an elastic training function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gpucoll.integrations.horovod.elastic import membership
from gpucoll.integrations.horovod.elastic.notification import notification_manager
from gpucoll.integrations.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["run", "run_fn"]

Function = Callable[..., Any]


def run(func: Function) -> Function:
    """Make a training function go on when ranks are lost, come or leave.

    Parameters
    ----------
    func : callable
        Called with a `State` first. It is called again after each change, when all ranks, the new
        ones too, have the same state: rank 0's last commit.

    Notes
    -----
    A program makes no collective calls between `init` and the call of this function: newcomers
    would make them while the others exchange the state.
    """
    return run_fn(func, membership.reset)


def run_fn(func: Function, reset: Callable[[], object]) -> Function:
    """Make a training function elastic, with a function that renews the ranks."""

    @functools.wraps(func)
    def elastic(state: Any, *args: Any, **kwargs: Any) -> Any:
        is_changed = skips_sync = False
        notification_manager.register_listener(state)
        try:
            while True:
                try:
                    if is_changed:
                        reset()
                        state.on_reset()
                    if not skips_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HorovodInternalError:
                    state.restore()
                    skips_sync = False
                except HostsUpdatedInterrupt as update:
                    skips_sync = update.skip_sync
                is_changed = True
        finally:
            notification_manager.remove_listener(state)

    return elastic
