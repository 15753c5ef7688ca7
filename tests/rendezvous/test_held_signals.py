"""Signals while descriptors change hands: their handlers run at known places."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from gpucoll.rendezvous.held_signals import held_signals


@pytest.fixture
def arrived():
    """The signals that a handler of this process has seen."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR1, before)


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)


def test_ctrl_c_is_raised_where_somebody_looks():
    with held_signals() as signals:
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            signals.check()


def test_what_nobody_looked_for_is_handled_at_the_end(arrived):
    handler = signal.getsignal(signal.SIGUSR1)
    with held_signals():
        interrupt(signal.SIGUSR1)
        interrupt(signal.SIGUSR1)
        assert arrived == []

    assert arrived == [signal.SIGUSR1] * 2
    assert signal.getsignal(signal.SIGUSR1) is handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_after_an_error_too(arrived):
    def fail():
        with held_signals():
            interrupt(signal.SIGUSR1)
            raise ValueError("of the block")

    with pytest.raises(ValueError, match="of the block"):
        fail()

    assert arrived == [signal.SIGUSR1]


def test_inside_of_another_the_outer_one_holds(arrived):
    with held_signals() as outer:
        with held_signals() as inner:
            assert inner is outer
            interrupt(signal.SIGUSR1)
        assert arrived == []
        inner.check()
        assert arrived == [signal.SIGUSR1]


def test_in_another_thread_nothing_is_held():
    handlers = []

    def look():
        with held_signals() as signals:
            handlers.append(signal.getsignal(signal.SIGINT))
            signals.check()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(10)

    assert handlers == [signal.default_int_handler]


def test_what_is_ignored_or_default_stays_so():
    with held_signals():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN
