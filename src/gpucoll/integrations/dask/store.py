"""The store through which ranks on Dask's workers meet: keys that the cluster's scheduler keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gpucoll import AbortedError

if TYPE_CHECKING:
    from distributed import Client, Security

__all__ = ["Store"]

_ANSWER_S = 30.0


class Store:
    """Dask's variables, each with an event that is set with it.

    A variable alone is not enough: reading one that is not set makes the scheduler log a traceback.

    Parameters
    ----------
    scheduler : str
        The scheduler's address.
    security : distributed.Security
        The worker's security settings.
    secret : str
        The run's secret.
    is_given_up : callable
        Returns whether the driver has ended the run.
    """

    def __init__(
        self, scheduler: str, security: Security, secret: str, is_given_up: Callable[[], bool]
    ) -> None:
        self._scheduler, self._security = scheduler, security
        self._secret, self._is_given_up = secret, is_given_up
        self._client: Any = None
        self._keys: set[str] = set()

    @property
    def host(self) -> str | None:
        """The scheduler's address, so that rank 0 listens on the interface that leads there."""
        return urlsplit(self._scheduler).hostname

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        from distributed import Event, Variable

        client = self._opened(key)
        Variable(key, client=client).set(value)
        Event(key, client=client).set()

    def get(self, key: str) -> str | None:
        """Return a key's value; None if it is not set."""
        from distributed import Event, Variable

        client = self._opened(key)
        if not Event(key, client=client).is_set():
            return None
        value: str = Variable(key, client=client).get(timeout=_ANSWER_S)
        return value

    def delete(self, key: str) -> None:
        """Delete a key."""
        from distributed import Event, Variable

        client = self._opened(key)
        Event(key, client=client).clear()
        Variable(key, client=client).delete()
        self._keys.discard(key)

    def secret(self) -> str:
        """Return the run's secret."""
        return self._secret

    def close(self) -> None:
        """Delete what a failed meeting has left, and disconnect. Raises nothing."""
        client, self._client = self._client, None
        if client is None:
            return
        from distributed import Event, Variable

        with contextlib.suppress(Exception):  # the scheduler may be gone
            for key in self._keys:
                Event(key, client=client).clear()
                Variable(key, client=client).delete()
        with contextlib.suppress(Exception):
            client.close()

    def _opened(self, key: str) -> Client:
        """Return the client for a call about a key.

        Raises
        ------
        AbortedError
            The driver has ended the run.
        """
        from distributed import Client

        if self._is_given_up():
            raise AbortedError(
                "the driver has ended the run: a rank has failed, or the time was over"
            )
        self._keys.add(key)
        if self._client is None:
            self._client = Client(
                self._scheduler, security=self._security, set_as_default=False, name="gpucoll"
            )
        return self._client
