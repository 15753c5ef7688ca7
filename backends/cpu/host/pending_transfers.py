"""Requests that were started together, for the code that waits for them or checks them."""

from __future__ import annotations

from typing import Any, Protocol

from gpucoll.backends.cpu.host.message_rows import Rows
from gpucoll.backends.protocol import MessageRequest


class _Table(Protocol):
    """The part of `MessageTable` that pending transfers use."""

    room_error: Exception | None
    under_way: set[PendingTransfers]

    def wait(self, rows: Rows, count: int, timeout_s: float | None) -> bool:
        """Wait for rows that were started; return whether they are over."""

    def withdraw(self, rows: Rows) -> bool:
        """Withdraw one row; return whether that was possible."""


class PendingTransfers:
    """Requests that were started together: `gpucoll.backends.protocol.Transfers`."""

    __slots__ = ("_kept", "_rows", "_table", "requests")

    def __init__(
        self, table: _Table, rows: Rows, requests: list[MessageRequest], kept: Any
    ) -> None:
        self._table = table
        self._rows = rows
        self._kept = kept
        self.requests = requests

    def is_over(self) -> bool:
        """Return whether all of them are over, without trying to make progress."""
        return self._rows.are_over(len(self.requests))

    def look(self) -> bool:
        """Take all pending messages a step further; return whether these requests are over."""
        return self.is_over() or self._table.wait(self._rows, len(self.requests), 0.0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all of them are over, or `timeout_s` has passed; return whether they are."""
        return self.is_over() or self._table.wait(self._rows, len(self.requests), timeout_s)

    def settle(self) -> None:
        """Write the outcome into the requests; they must be over."""
        error = self._table.room_error
        for place, request in enumerate(self.requests):
            self._rows.settle(place, request, error)
        self._kept = None
        self._table.under_way.discard(self)

    def withdraw(self) -> bool:
        """Withdraw the only request; return False if it is over or another rank may see it."""
        if len(self.requests) != 1 or not self._table.withdraw(self._rows):
            return False
        self._kept = None
        self._table.under_way.discard(self)
        return True
