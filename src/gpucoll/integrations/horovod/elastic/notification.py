"""Who hears that ranks have come or are to leave."""

from __future__ import annotations

from typing import Protocol

__all__ = ["WorkerNotificationManager", "notification_manager"]


class Listener(Protocol):
    """What is told; a `State` is one."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Take note of a change."""


class WorkerNotificationManager:
    """Passes changes on to the states of running training functions.

    States look for the launcher's news by themselves; this is for programs with a source of their
    own, and for tests.
    """

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def init(self, *_: object, **__: object) -> None:
        """Do nothing: there is no service to start."""

    def register_listener(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        self._listeners.remove(listener)

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Tell all listeners."""
        for listener in self._listeners:
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()
