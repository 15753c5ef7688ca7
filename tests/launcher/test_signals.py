"""Signals: handed on to every rank, Ctrl-C once, a second one kills; Ctrl-Z stops the ranks too."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.waiting import until

from gpucoll.launcher.events import EventLoop
from gpucoll.launcher.signals import deferred_signals, handlers, woken_by_signals

# Waits for signals instead of handling them: a handler in Python that is due just before a pause()
# runs only after it.
COUNTS = """
names = {}
signals = {signal.Signals(number) for number in (1, 2, 10, 12, 15)}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print('ready', os.getpid(), 'end')
while 'SIGTERM' not in names:
    name = signal.Signals(signal.sigwait(signals)).name
    names[name] = names.get(name, 0) + 1
    print(name, names[name], 'end')
print(names)
"""

FORWARDED = [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM]


def test_every_signal_reaches_every_rank_once(start_run, script):
    running = start_run("-n", 2, script(COUNTS))
    running.wait_for_all(["[0] ready", "[1] ready"])
    for number in FORWARDED:
        running.send(number)
        running.wait_for_all([f"[{rank}] {number.name} 1 end" for rank in range(2)])
    code, out, _ = running.finish()
    assert code == 0
    counts = str({number.name: 1 for number in FORWARDED})
    assert all(f"[{rank}] {counts}" in out for rank in range(2))


# gpucoll-run as the foreground job of a terminal of its own, whose other end is standard input.
IN_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(int(sys.argv[1]), termios.TIOCSCTTY, 0)
del sys.argv[1]
from gpucoll.launcher import cli
cli.compile_kernels = lambda report: None
sys.exit(cli.main())
"""


def test_ctrl_c_at_a_terminal_reaches_a_rank_once(start, script):
    master, slave = os.openpty()
    try:
        command = [sys.executable, "-c", IN_A_TERMINAL, slave, "-n", 2, script(COUNTS)]
        running = start(command, stdin=slave, pass_fds=[slave], start_new_session=True)
        running.wait_for_all(["[0] ready", "[1] ready"])
        os.write(master, b"\x03")
        running.wait_for_all(["[0] SIGINT 1 end", "[1] SIGINT 1 end"])
        running.send(signal.SIGTERM)
        code, out, _ = running.finish()
    finally:
        os.close(master)
        os.close(slave)
    assert code == 0
    assert all(f"[{rank}] {{'SIGINT': 1, 'SIGTERM': 1}}" in out for rank in range(2))


def test_ctrl_c_ends_ranks_that_do_nothing_about_it(start_run, script):
    running = start_run("-n", 2, script("print('ready')\nwhile True: pass"))
    running.wait_for_all(["[0] ready", "[1] ready"])
    running.send(signal.SIGINT)
    code, _, err = running.finish()
    assert code == 128 + signal.SIGINT
    assert "was killed by SIGINT" in err
    assert "Traceback" in err  # the ranks' own
    assert "the cause" not in err  # it was the user


def test_ctrl_c_in_a_shell_reaches_what_a_rank_started(start_run, watched):
    running = start_run("-n", 1, "sh", "-c", "sleep 600 & echo pid $! end; wait")
    watched.add(running.wait_for(" end").split()[2])
    running.send(signal.SIGINT)
    assert running.finish()[0] == 128 + signal.SIGINT
    assert watched.all_ended()


def test_a_second_ctrl_c_kills(start_run, script, watched):
    program = script(COUNTS)
    running = start_run("-n", 2, "--grace", 600, program)
    for _ in range(2):
        watched.add(running.wait_for(" end").split()[2])
    running.send(signal.SIGINT)
    running.wait_for_all(["[0] SIGINT 1 end", "[1] SIGINT 1 end"])
    running.send(signal.SIGINT)
    code, _, err = running.finish()
    assert code == 128 + signal.SIGINT
    assert "ranks 0, 1 had to be ended, and were killed by SIGKILL" in err
    assert watched.all_ended()


def test_what_nohup_ignores_stays_ignored(start, script):
    program = script(
        "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, 'end')\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n"
        "print('ready')\n"
        "signal.sigwait({signal.SIGUSR1})\n"
    )
    code = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from gpucoll.launcher import cli; cli.compile_kernels = lambda report: None\n"
        "sys.exit(cli.main())"
    )
    running = start([sys.executable, "-c", code, "-n", 1, program])
    running.wait_for("[0] True end")
    running.wait_for("[0] ready")
    running.send(signal.SIGHUP)
    running.send(signal.SIGUSR1)
    assert running.finish()[0] == 0


def process_state(pid):
    """Return the kernel's letter for what a process does: T is stopped."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def children_of(pid):
    """Return the children of a process that have not ended."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in pids if process_state(child) != "Z"]


def test_ctrl_backslash_asks_why_and_the_ranks_go_on(start_run, script):
    running = start_run("-n", 2, script(COUNTS))
    ranks = {running.wait_for(" end").split()[2] for _ in range(2)}
    running.send(signal.SIGQUIT)
    until(lambda: {*children_of(running.pid)} > ranks)
    until(lambda: {*children_of(running.pid)} == ranks)
    running.send(signal.SIGUSR1)
    running.wait_for_all(["[0] SIGUSR1 1 end", "[1] SIGUSR1 1 end"])
    running.send(signal.SIGTERM)
    code, _, err = running.finish()
    assert code == 0
    assert "No rank is in a communicator: none has called init" in err


def test_ctrl_z_stops_the_ranks_and_they_go_on(start_run, script):
    running = start_run("-n", 2, script(COUNTS))
    pids = [int(running.wait_for(" end").split()[2]) for _ in range(2)]
    running.send(signal.SIGTSTP)
    status = os.waitid(os.P_PID, running.pid, os.WSTOPPED)
    assert status is not None
    assert status.si_code == os.CLD_STOPPED
    deadline = time.monotonic() + 20
    while any(process_state(pid) != "T" for pid in pids):  # sent already, about to take effect
        assert time.monotonic() < deadline
    running.send(signal.SIGCONT)
    running.send(signal.SIGUSR1)
    running.wait_for_all(["[0] SIGUSR1 1 end", "[1] SIGUSR1 1 end"])
    running.send(signal.SIGTERM)
    assert running.finish()[0] == 0


class TestDeferredSignals:
    def test_a_handler_runs_after_the_block(self):
        seen: list[int] = []
        with handlers({signal.SIGUSR1: seen.append}):
            with deferred_signals():
                signal.raise_signal(signal.SIGUSR1)
                signal.raise_signal(signal.SIGUSR1)
                assert seen == []
            assert seen == [signal.SIGUSR1]

    def test_a_keyboard_interrupt_comes_after_the_block(self):
        finished = False
        with pytest.raises(KeyboardInterrupt), deferred_signals():  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            finished = True
        assert finished

    def test_blocks_may_be_nested(self):
        finished = False
        with pytest.raises(KeyboardInterrupt), deferred_signals():  # noqa: PT012
            with deferred_signals():
                signal.raise_signal(signal.SIGINT)
            finished = True
        assert finished

    def test_also_when_the_block_fails(self):
        with pytest.raises(KeyboardInterrupt) as interrupt, deferred_signals():  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            raise ValueError
        assert isinstance(interrupt.value.__context__, ValueError)

    def test_handlers_are_put_back(self):
        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGUSR1)
        with deferred_signals():
            pass
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGUSR1)) == before


class TestWokenBySignals:
    def test_a_signal_wakes_the_loop(self):
        # Blocked here and taken by another thread: no system call of this one is interrupted.
        loop = EventLoop()
        seen: list[int] = []
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        sender = threading.Thread(target=signal_this_process, args=(signal.SIGUSR1,))
        try:
            with handlers({signal.SIGUSR1: seen.append}), woken_by_signals(loop):
                sender.start()
                loop.run_once()
                assert seen == [signal.SIGUSR1]
        finally:
            sender.join()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
            loop.close()

    def test_whoever_was_to_be_woken_before_is_woken_too(self):
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        loop = EventLoop()
        before = signal.set_wakeup_fd(write_end)
        try:
            with handlers({signal.SIGUSR1: lambda number: None}), woken_by_signals(loop):
                signal.raise_signal(signal.SIGUSR1)
                loop.run_once()
            assert os.read(read_end, 1) == bytes([signal.SIGUSR1])
            assert signal.set_wakeup_fd(before) == write_end
        finally:
            signal.set_wakeup_fd(before)
            loop.close()
            os.close(read_end)
            os.close(write_end)


def signal_this_process(number):
    """Send a signal that only this thread can take: the others have it blocked."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.pthread_kill(threading.get_ident(), number)
