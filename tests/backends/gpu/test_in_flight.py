"""Calls under way: which of them have ended, found with few queries."""

from __future__ import annotations

import pytest

from gpucoll.backends.gpu.in_flight import first_pending


@pytest.mark.parametrize("n_calls", [0, 1, 2, 3, 100])
def test_the_first_pending_call(n_calls):
    for first in range(n_calls + 1):
        for pending in range(first, n_calls + 1):
            asked: list[int] = []

            def has_ended(call, pending=pending, asked=asked):
                asked.append(call)
                return call < pending

            assert first_pending(range(n_calls), first, has_ended) == pending
            assert len(asked) == len(set(asked)) <= 9
            if first == n_calls:
                assert asked == []
            elif pending == first:
                assert asked == [first]
            elif pending == n_calls:
                assert asked == sorted({first, n_calls - 1})
