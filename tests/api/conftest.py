"""Processes for tests of communicators that lose ranks or win them."""

from __future__ import annotations

import pytest


@pytest.fixture
def fresh(rank_server):
    """Call a function on seats of fresh processes, of which some may end; return the replies."""

    def call(count, function, *args, but=()):
        with rank_server.fork(count) as pool:
            pool.start(function, *args, gives="seat")
            going = [rank for rank in range(count) if rank not in but]
            replies = pool.collect(only=going)
            if but:
                pool.kill()
            return replies

    return call
