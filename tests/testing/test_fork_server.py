"""What the server has a child do, so that its forks stay small."""

from __future__ import annotations

import os

import pytest

from gpucoll.testing.fork_server import apart


def fail():
    raise ValueError("as expected")


def write_pid(path):
    path.write_text(str(os.getpid()))


def test_a_child_does_it(rank_server, tmp_path):
    path = tmp_path / "pid"
    assert rank_server.call(apart, write_pid, path)
    assert int(path.read_text()) not in (os.getpid(), rank_server.call(os.getpid))


@pytest.mark.parametrize("function", [fail, os.abort])
def test_a_child_that_fails(rank_server, function):
    assert not rank_server.call(apart, function)
    assert rank_server.call(abs, -1) == 1, "the server itself goes on"
