"""The door of `grow`: what strangers cost there, and what it leaves behind."""

from __future__ import annotations

import os
import secrets
import socket
import time
from unittest import mock

import pytest

from gpucoll import config
from gpucoll.errors import AuthenticationError
from gpucoll.rendezvous import door
from gpucoll.rendezvous.door import Door
from gpucoll.rendezvous.door_caller import Caller
from gpucoll.rendezvous.door_place import find_door
from gpucoll.rendezvous.held_signals import HeldSignals
from gpucoll.rendezvous.notices import address

SAME = {"the version of gpucoll": "1"}


class Looks:
    """Counts how often a wait has looked."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1


@pytest.fixture
def place(monkeypatch):
    monkeypatch.setenv(config.JOB, secrets.token_hex(8))
    return find_door(None, None)


@pytest.fixture
def opened(place):
    made = Door(place, "rank 0 of 1", SAME)
    yield made
    made.close()


def stranger(place):
    """Return a connection that says nothing."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.connect(address(f"{place.token}#0"))
    return end


def looks_of(opened, wanted, wait_s, **given):
    """Return in how many turns a wait has ended."""
    look = Looks()
    opened.wait(wanted, wait_s, look, **given)
    return look.count


@pytest.fixture
def newcomer(place, opened):
    """A newcomer that has introduced itself."""
    caller = Caller(place, SAME, 5.0, HeldSignals())
    caller._call()
    opened.wait(1, 5.0, Looks(), is_limit=True)
    assert len(opened._waiting) == 1
    yield caller
    caller.close()


def test_a_silent_stranger_is_waited_for_once(place, opened):
    with mock.patch.object(door, "_INTRODUCING_S", 0.06), stranger(place):
        found = [looks_of(opened, 1, 0.0) for _ in range(4)]

    assert found[0] > 2
    assert found[1:] == [1, 1, 1]


def test_silent_strangers_do_not_hold_a_door_with_enough_newcomers(place, opened, newcomer):
    with stranger(place):
        assert looks_of(opened, 1, 60.0, is_limit=True) == 1
        with mock.patch.object(door, "_INTRODUCING_S", 0.06):
            assert 2 < looks_of(opened, 1, 60.0) < 50


def test_a_newcomer_that_reads_nothing_is_let_go(opened, newcomer):
    for _ in range(1000):
        opened.tell(opened._waiting, {"long": "x" * 10_000})
        if not opened._waiting:
            return
    raise AssertionError("the connection takes everything")


def test_a_forked_child_leaves_the_address_to_others(place):
    """So that the next rank 0, or this one after `shrink`, can open its door."""
    made = Door(place, "rank 0 of 1", SAME)
    ours, its = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        its.send(b"x")
        its.recv(1)  # until the parent closes its end
        os._exit(0)
    its.close()
    try:
        assert ours.recv(1) == b"x"
        made.close()
        Door(place, "rank 0 of 1", SAME).close()
    finally:
        ours.close()
        os.waitpid(pid, 0)


def test_a_program_that_closes_nothing_leaves_no_file(tmp_path):
    made = Door(find_door(f"file://{tmp_path}/meeting", None), "rank 0 of 1", SAME)
    assert os.listdir(tmp_path) == ["meeting.grow"]

    with mock.patch.object(os, "getpid", return_value=1):  # a forked child
        door._withdraw_all()
    assert os.listdir(tmp_path) == ["meeting.grow"]
    door._withdraw_all()
    assert os.listdir(tmp_path) == []
    made.close()


def test_a_newcomer_bears_other_meetings_at_a_port_for_a_while(place):
    """Ranks that are still in `init` at the same port turn it away."""
    caller = Caller(place, SAME, 60.0, HeldSignals())
    caller._place = find_door("tcp://127.0.0.1:1", None)

    for _ in range(100):
        caller._take_refusal("has another secret")
    later = caller._turned_away_at + 10.1
    with (
        mock.patch.object(time, "monotonic", return_value=later),
        pytest.raises(AuthenticationError, match=r"tcp://127\.0\.0\.1:1: rank 0 has"),
    ):
        caller._take_refusal("has another secret")
    caller.close()


def test_a_newcomer_that_is_turned_away_says_so_at_its_deadline(place):
    caller = Caller(place, SAME, 0.0, HeldSignals())
    caller._take_refusal("has another secret")

    with pytest.raises(AuthenticationError, match="rank 0 has another secret"):
        caller.next_message()
    caller.close()
