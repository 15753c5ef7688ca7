"""A meeting point in a store of keys and values that all ranks share: torch's, or another."""

from __future__ import annotations

import contextlib
import copy
import datetime
import inspect
import os
from collections.abc import Callable
from typing import Any, TypeAlias

from gpucoll.errors import ArgumentTypeError, GpucollError, RendezvousError
from gpucoll.rendezvous.addresses import join_address
from gpucoll.rendezvous.meeting_points import SharedPoint
from gpucoll.topology.interfaces import means_loopback
from gpucoll.transport.tcp.secret import check_secret, job_secret

__all__ = ["StorePoint", "TorchrunPoint", "given_secret"]

_WAIT = datetime.timedelta(milliseconds=50)
_CONNECT = datetime.timedelta(seconds=2)
AnyStore: TypeAlias = Any
"""A store of torch's, or another: `StorePoint` says which methods it needs."""


class StorePoint(SharedPoint):
    """The key ``gpucoll/NAME#NUMBER/address`` of a store.

    The store needs ``set(key, value)`` and ``get(key)``; values come back as bytes or str.
    ``check([key])`` finds out whether the key is there. If the store has no ``check``,
    ``wait([key], timedelta)`` does, which raises when the time is over. If it has neither, ``get``
    does. A ``get`` that finds no key may block for as long as the store's own limit; it should
    return None or raise at once. Errors of gpucoll's own that the store raises end the meeting. Any
    other error means that the store cannot be read at the moment.

    If the store has ``secret()``, this returns the job's secret, as bytes or str, or None.

    Parameters
    ----------
    store : object
        The store; the caller keeps it.
    name : str
        The meeting's name.
    text : str
        A description of the store, for messages.
    """

    def __init__(self, store: AnyStore, name: str = "", text: str = "") -> None:
        super().__init__(name, text or _described(store))
        self._store, self._prefix = store, "gpucoll"

    @property
    def key(self) -> str:
        """The key of rank 0's address."""
        return f"{self._prefix}/{super().key}/address"

    def named(self, word: str) -> StorePoint:
        """Return a point for one meeting, which `word` tells apart from all others of this name."""
        point = copy.copy(self)
        point._name = f"{self._name}/{word}"
        return point

    def leads_to(self) -> str | None:
        """Return the store's own host if it has one; else rank 0's, once it is known.

        Rank 0 may give a store in its own process the loopback address, which leads to no other
        host.
        """
        host = getattr(self._store, "host", None)
        if isinstance(host, str) and host and not means_loopback(host):
            return host
        return super().leads_to()

    def secret(self) -> bytes | None:
        """Return the secret that the store's creator has put into it.

        None if it has none. gpucoll itself puts no secret into a store, because it is not known who
        can read the store.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            The store returns something that is not a secret.
        """
        if self._secret is None and callable(ask := getattr(self._store, "secret", None)):
            given = ask()
            if given is not None:
                self._secret = _checked(given, f"secret() of {self.text}")
        return self._secret

    def _opened(self) -> AnyStore:
        return self._store

    def set(self, key: str, text: str) -> None:
        """Set a key; RendezvousError: the store raised an error."""
        try:
            self._opened().set(key, text)
        except GpucollError:
            raise
        except Exception as error:  # the store's own kinds
            raise RendezvousError(
                f"the key {key!r} of {self.text} cannot be set: {_said(error)}"
            ) from error

    def get(self, key: str) -> str:
        """Return a key's value; empty: it is not set, or the store cannot be read."""
        self.trouble = ""
        try:
            store = self._opened()
            value = store.get(key) if _is_there(store, key) else None
        except LookupError:
            return ""
        except GpucollError:
            raise
        except Exception as error:  # the store's own kinds
            self.trouble = f"{self.text} cannot be asked: {_said(error)}"
            return ""
        if not value:
            return ""
        return value if isinstance(value, str) else bytes(value).decode(errors="replace")

    def delete(self, key: str) -> None:
        """Delete a key; if the store cannot delete keys, set it to nothing."""
        with contextlib.suppress(Exception):  # the store may be gone, with the job
            store = self._opened()
            for name in ("delete_key", "delete"):
                if callable(delete := getattr(store, name, None)):
                    with contextlib.suppress(NotImplementedError):
                        delete(key)
                        return
            store.set(key, "")


class TorchrunPoint(StorePoint):
    """The store by which torchrun's agents met, at ``MASTER_ADDR:MASTER_PORT``.

    Parameters
    ----------
    host, port
        Address of the store.
    name : str
        The meeting's name.
    attempt : str
        The number of torchrun's attempt; the store outlives attempts.
    """

    def __init__(self, host: str, port: int, name: str = "", attempt: str = "0") -> None:
        super().__init__(None, name, f"torchrun's store at {join_address(host, port)}")
        self._host, self._port, self._prefix = host, port, f"gpucoll/{attempt}"

    def leads_to(self) -> str | None:
        """Return the store's host."""
        return None if means_loopback(self._host) else self._host

    def _opened(self) -> AnyStore:
        """Connect to the store. torch is imported only here."""
        if self._store is None:
            from torch.distributed import TCPStore

            self._store = TCPStore(
                self._host, self._port, is_master=False, timeout=_CONNECT, wait_for_workers=False
            )
        return self._store


def given_secret(point: object) -> bytes | None:
    """Return the job's secret: the store's own, set by the program, or else the variables'."""
    return (point.secret() if isinstance(point, StorePoint) else None) or job_secret()


def _is_there(store: AnyStore, key: str) -> bool:
    if callable(check := getattr(store, "check", None)):
        return bool(check([key]))
    wait = getattr(store, "wait", None)
    if callable(wait) and _takes_two(wait):
        try:
            wait([key], _WAIT)
        except Exception:  # each store has its own error for a timeout
            return False
    return True


def _described(store: AnyStore) -> str:
    kind = type(store)
    owner = "torch's" if kind.__module__.partition(".")[0] == "torch" else "the store"
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    at = f" at {join_address(host, port)}" if isinstance(host, str) and port else ""
    path = getattr(store, "path", None)
    return f"{owner} {kind.__name__}{at}" + (f" in {os.fspath(path)}" if path and not at else "")


def _takes_two(wait: Callable[..., object]) -> bool:
    """Return whether a store's wait takes a timeout; a compiled one tells it by its docstring."""
    try:
        inspect.signature(wait).bind([""], _WAIT)
    except TypeError:
        return False
    except ValueError:
        return "timedelta" in (getattr(wait, "__doc__", None) or "")
    return True


def _checked(given: object, where: str) -> bytes:
    """Return the secret that a store has returned, checked."""
    if isinstance(given, str):
        given = given.encode()
    if not isinstance(given, bytes):
        raise ArgumentTypeError(f"{where} must return bytes or str; got {type(given).__name__}")
    return check_secret(given, where)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]
