"""Digests of names and signatures: what travels in their place."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from gpucoll.integrations.horovod.engine.request import Request

__all__ = ["Digests"]


class Digests:
    """Gives requests their digests, and remembers those of names that come again.

    Parameters
    ----------
    capacity : int
        How many; then all are forgotten, since unnamed tensors never come again.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._known: dict[Hashable, tuple[int, int]] = {}

    def give(self, request: Request) -> None:
        """Set the request's `key` and `digest`."""
        signature = request.signature()
        what = request.name, signature
        found = self._known.get(what)
        if found is None:
            found = digest(request.name), digest(signature)
            if len(self._known) >= self._capacity:
                self._known.clear()
            if self._capacity:
                self._known[what] = found
        request.key, request.digest = found


def digest(what: object) -> int:
    """Return 64 bits that are the same on every rank."""
    whole = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(whole, "little", signed=True)
