"""Shamir's secret sharing over the integers modulo 2^255 - 19.

A secret is one number of the field. A share is always 32 bytes, little-endian. Python's integers do
not take constant time: whoever measures a client's time closely may learn something.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from gpucoll.errors import SecureSumError

PRIME = 2**255 - 19
SHARE_BYTES = 32


def draw(random: Callable[[int], bytes]) -> int:
    """Return a uniform number of the field, of what random(n_bytes) returns."""
    while True:
        value = int.from_bytes(random(SHARE_BYTES), "little") & (2**255 - 1)
        if value < PRIME:
            return value


def split(
    secret: int, points: Sequence[int], threshold: int, random: Callable[[int], bytes]
) -> list[bytes]:
    """Return the share at each point; any `threshold` of them give the secret, and fewer nothing.

    Parameters
    ----------
    secret : int
        At least 0, below `PRIME`.
    points : sequence of int
        Different numbers between 1 and `PRIME`.
    threshold : int
        The number of coefficients of the polynomial.
    random : callable
        random(n_bytes) returns random bytes.
    """
    coefficients = [secret, *(draw(random) for _ in range(threshold - 1))]
    shares = []
    for point in points:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * point + coefficient) % PRIME
        shares.append(to_bytes(value))
    return shares


def join(shares: Mapping[int, bytes]) -> int:
    """Return the secret of which these are all needed shares, by their points."""
    weights = _weights(tuple(shares))
    values = map(from_bytes, shares.values())
    return sum(w * value for w, value in zip(weights, values, strict=True)) % PRIME


@functools.lru_cache(maxsize=64)
def _weights(points: tuple[int, ...]) -> tuple[int, ...]:
    """Return Lagrange's weights for the value at 0; the same clients hold most secrets' shares."""
    weights = []
    for point in points:
        over, under = 1, 1
        for other in points:
            if other != point:
                over = over * other % PRIME
                under = under * (other - point) % PRIME
        weights.append(over * pow(under, -1, PRIME) % PRIME)
    return tuple(weights)


def to_bytes(value: int) -> bytes:
    """Return a number of the field as bytes."""
    return value.to_bytes(SHARE_BYTES, "little")


def from_bytes(share: bytes) -> int:
    """Return the number that bytes stand for; SecureSumError if it is not in the field."""
    value = int.from_bytes(share, "little")
    if value >= PRIME:
        raise SecureSumError("a share is no number of the field")
    return value
