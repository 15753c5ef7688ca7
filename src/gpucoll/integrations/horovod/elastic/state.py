"""What training consists of: kept at each commit, restored after a loss, handed to newcomers."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterable
from typing import Any

from gpucoll.integrations.horovod.elastic import membership
from gpucoll.integrations.horovod.elastic.news import NEWS, HostUpdateResult, read_news
from gpucoll.integrations.horovod.exceptions import HostsUpdatedInterrupt

__all__ = ["ObjectState", "State"]

Message = tuple[float, int]
"""When the places for ranks have changed, and how: a `HostUpdateResult`."""


class HostMessages(queue.Queue[Message]):
    """The messages that a state has not seen yet; the launcher's news are among them."""

    def __init__(self) -> None:
        super().__init__()
        self._path = os.environ.get(NEWS)
        self._serial = read_news(self._path).serial

    def empty(self) -> bool:
        """Return whether there is none."""
        news = read_news(self._path) if self._path else None
        if news is not None and news.serial > self._serial:
            self._serial = news.serial
            self.put((news.serial, news.update))
        return super().empty()


class State:
    """The part of a training state that is common to all frameworks.

    Parameters
    ----------
    bcast_object : callable
        Returns rank 0's value of its argument on every rank.
    get_rank : callable
        Returns this rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages = HostMessages()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Have functions called when the ranks have changed, before the state is exchanged."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to the ranks that there are now. Elastic training calls this."""
        self._host_messages = HostMessages()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Take note of a change, for the next `check_host_updates`."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Keep the state as it is, for `restore`; then `check_host_updates`."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Let newcomers in, and those go that are to leave. Every rank calls it at the same place.

        Raises
        ------
        HostsUpdatedInterrupt
            The ranks change, on every rank.
        """
        before = latest = self._last_updated_timestamp
        update = 0
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > latest:
                latest, update = timestamp, update | change
        before, latest, update = self._bcast_object((before, latest, update))
        self._last_updated_timestamp = latest
        if latest > before:
            raise HostsUpdatedInterrupt(update == HostUpdateResult.removed)
        if membership.lets_newcomers_in():
            raise HostsUpdatedInterrupt(skip_sync=False)

    def save(self) -> None:
        """Keep the state in this process's memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over rank 0's state, on every rank."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt objects to the ranks that there are now."""


class ObjectState(State):
    """A state of Python objects, which are its attributes.

    Parameters
    ----------
    bcast_object, get_rank : callable
        Those of `State`.
    **kwargs
        The attributes and their first values.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        self._saved_state = kwargs
        self._show()
        super().__init__(bcast_object, get_rank)

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        self._show()

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._show()

    def _show(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)
