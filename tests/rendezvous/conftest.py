"""Fresh ranks without a communicator, and what a process holds open."""

from __future__ import annotations

import os

import pytest
from tests.ranks import Reply


@pytest.fixture
def fresh(rank_server):
    """Fork ranks and call a function with their seats; return how it went on each."""

    def fresh(world_size, function, *args, only=(), dies=(), **options):
        with rank_server.fork(world_size) as pool:
            pool.start(function, *args, gives="seat", only=only, **options)
            replies = pool.collect(only=only)
        for rank, reply in zip(only or range(world_size), replies, strict=True):
            assert rank in dies or isinstance(reply, Reply), replies
        return [
            (reply.error or reply.result) if isinstance(reply, Reply) else reply
            for reply in replies
        ]

    return fresh


@pytest.fixture
def open_files():
    """Return what this process, or the rank that calls it, holds open."""
    return held_open


def held_open():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the folder itself
            continue
    return sorted(found)
