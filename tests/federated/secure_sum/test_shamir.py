"""Shares of a secret: enough of them give it, fewer are independent of it."""

from __future__ import annotations

import itertools

import pytest
from tests.federated.secure_sum.playing import Seeded

from gpucoll import SecureSumError
from gpucoll.federated.secure_sum import shamir
from gpucoll.federated.secure_sum.shamir import PRIME


def value_at(coefficients, point):
    return sum(c * pow(point, power, PRIME) for power, c in enumerate(coefficients)) % PRIME


def test_shares_are_values_of_the_polynomial():
    points = [1, 2, 7, 1000]
    coefficients = [12345, *(shamir.draw(random) for random in [Seeded("s")] for _ in range(2))]

    shares = shamir.split(12345, points, 3, Seeded("s"))

    assert [int.from_bytes(s, "little") for s in shares] == [
        value_at(coefficients, point) for point in points
    ]


@pytest.mark.parametrize("secret", [0, 1, PRIME - 1, 2**254 + 3])
def test_every_choice_of_enough_shares_gives_the_secret(secret):
    points = range(1, 7)
    shares = dict(zip(points, shamir.split(secret, points, 3, Seeded(secret)), strict=True))
    assert {len(share) for share in shares.values()} == {shamir.SHARE_BYTES}

    for size in (3, 4, 6):
        for chosen in itertools.permutations(points, size) if size == 3 else [points[:size]]:
            assert shamir.join({point: shares[point] for point in chosen}) == secret


def test_fewer_shares_fit_every_secret():
    """Two of three needed shares, and any secret, lie on one polynomial."""
    shares = shamir.split(5, [1, 2], 3, Seeded("few"))
    for secret in (5, 6, PRIME - 1):
        # The third share that would make this the secret.
        weights = shamir._weights((1, 2, 3))
        known = sum(w * int.from_bytes(s, "little") for w, s in zip(weights, shares, strict=False))
        third = (secret - known) * pow(weights[2], -1, PRIME) % PRIME
        assert shamir.join({1: shares[0], 2: shares[1], 3: shamir.to_bytes(third)}) == secret


def test_draws_are_below_the_prime():
    given = iter([b"\xff" * 32, shamir.to_bytes(PRIME), shamir.to_bytes(PRIME - 1)])
    assert shamir.draw(lambda size: next(given)) == PRIME - 1


def test_numbers_outside_of_the_field_are_refused():
    with pytest.raises(SecureSumError, match="no number of the field"):
        shamir.from_bytes(shamir.to_bytes(PRIME))
