"""Ranks of several hosts meet by a store that hands out the job's secret."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.ranks import Reply

from gpucoll import config
from gpucoll.config import environment
from gpucoll.errors import AbortedError, AuthenticationError

NO_SECRET = {config.SECRET: ""}


@dataclass(frozen=True)
class FolderStore:
    """Keys are files of a folder."""

    folder: Path
    given: str | None

    def set(self, key, value):
        new = self._path(key).with_suffix(".new")
        new.write_text(value)
        new.replace(self._path(key))

    def get(self, key):
        with contextlib.suppress(FileNotFoundError):
            return self._path(key).read_text()

    def delete(self, key):
        self._path(key).unlink(missing_ok=True)

    def secret(self):
        return self.given

    def _path(self, key):
        return self.folder / key.replace("/", "_")


class EndedStore(FolderStore):
    """One whose maker has given the job up."""

    def get(self, key):
        raise AbortedError("the job was given up")


def total(comm):
    return comm.all_reduce(1), "TCP" in str(comm.describe())


def differ(seat):
    """Have a variable of its own on each rank, which is not the job's secret."""
    with (
        environment({config.SECRET: f"rank {seat.rank}'s own, long enough"}),
        seat.init(meet_s=20.0) as comm,
    ):
        return comm.all_reduce(1)


@pytest.mark.parametrize("placed", ["ab", "aab", "aa"])
def test_ranks_meet_by_it_without_variables(hosts, tmp_path, placed):
    store = FolderStore(tmp_path, "0123456789abcdef" * 2)
    results = hosts.call(placed, total, meet=store, environment=NO_SECRET)

    assert results == [(len(placed), "b" in placed)] * len(placed)
    assert not list(tmp_path.iterdir())


def test_it_goes_before_the_variables(hosts, tmp_path):
    store = FolderStore(tmp_path, "0123456789abcdef" * 2)

    assert hosts.call("ab", differ, meet=store, gives="seat") == [2, 2]


def test_ranks_with_different_ones_do_not_meet(hosts, tmp_path):
    def meet(seat):
        mine = FolderStore(tmp_path, f"of rank {seat.rank}, which is long enough")
        with pytest.raises(AuthenticationError):
            seat.init(meet_s=2.0, meet=mine)
        return True

    replies = hosts.replies("ab", meet, gives="seat")
    # Which of the two is told first is a matter of time: the other one may run into its deadline.
    assert any(isinstance(reply, Reply) and reply.result is True for reply in replies), replies


def test_without_one_all_ranks_are_told(hosts, tmp_path):
    def meet(seat):
        with pytest.raises(
            AuthenticationError, match="ranks 0, 1 of 2 must talk to other hosts over TCP"
        ):
            seat.init()
        return True

    store = FolderStore(tmp_path, None)
    assert hosts.call("ab", meet, meet=store, gives="seat", environment=NO_SECRET) == [True] * 2


def test_a_store_can_end_the_meeting(hosts, tmp_path):
    def meet(seat):
        with pytest.raises(AbortedError, match="the job was given up"):
            seat.init()
        return True

    store = EndedStore(tmp_path, "0123456789abcdef" * 2)
    assert hosts.call("ab", meet, meet=store, gives="seat") == [True] * 2
