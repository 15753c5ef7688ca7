"""Signals while descriptors change hands: their handlers run at known places."""

from __future__ import annotations

import enum
import os
import signal
import sys
import threading

import pytest

import gpucoll
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


def test_every_handler_runs_and_is_put_back_though_one_raises(arrived):
    handler = signal.getsignal(signal.SIGUSR1)

    def be_interrupted():
        with held_signals():
            interrupt()
            interrupt(signal.SIGUSR1)

    with pytest.raises(KeyboardInterrupt):
        be_interrupted()

    assert arrived == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_could_not_be_put_back_still_hands_on(arrived, monkeypatch):
    """An interrupt may come while handlers are being put back: the others are not lost by that."""
    handler = signal.getsignal(signal.SIGUSR1)
    put_back = signal.signal

    def fail_once(number, function):
        if function is handler:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return put_back(number, function)

    monkeypatch.setattr(signal, "signal", fail_once)
    with pytest.raises(KeyboardInterrupt), held_signals():
        pass

    interrupt(signal.SIGUSR1)
    assert arrived == [signal.SIGUSR1]
    with held_signals():
        interrupt(signal.SIGUSR1)
        assert len(arrived) == 1
    assert len(arrived) == 2
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_no_python_runs_where_numpy_would_drop_an_interrupt():
    """Until Python 3.12 an enum beside NumPy's number has its class's __getattr__ called."""
    called = []
    comm = gpucoll.init()
    sys.setprofile(lambda frame, event, _: called.append((event, frame.f_code)))
    try:
        comm.barrier(timeout_s=10)
        comm.duplicate().close()
        comm.check()
    finally:
        sys.setprofile(None)
    comm.close()

    functions = [code for event, code in called if event == "call"]
    assert len(functions) > 100
    names = [code.co_name for code in functions if code.co_filename == enum.__file__]
    assert "__getattr__" not in names
