"""What work that takes long shows, where, and that nothing there can harm the work."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading

import pytest

from gpucoll import config, progress
from gpucoll.progress import Display, Progress
from gpucoll.terminal import ERASE_LINE

WAIT_S = 10.0


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def redirect(monkeypatch):
    """Return a function that replaces stderr: pytest undoes it where a fixture does."""

    def replace(stream):
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return replace


@pytest.fixture
def shown():
    """Return the list of all that is shown, as (text, whether it stays)."""
    texts = []
    before = progress.show_by(lambda *shown: texts.append(shown))
    yield texts
    progress.show_by(before)


class TestLog:
    def test_a_line_every_ten_seconds(self, clock, redirect):
        stderr = redirect(io.StringIO())
        display = Display(clock=clock)
        for second in range(22):
            clock.now = 100.0 + second
            display(f"{second} s", False)
        assert stderr.getvalue() == "0 s\n10 s\n20 s\n"

    def test_what_stays_is_always_written(self, clock, redirect):
        stderr = redirect(io.StringIO())
        display = Display(clock=clock)
        display("begun", False)
        display("ended", True)
        display("", True)
        display("ended again", True)
        assert stderr.getvalue() == "begun\nended\nended again\n"


class TestTerminal:
    def test_each_text_replaces_the_one_before(self, clock, redirect):
        stderr = redirect(io.StringIO())
        display = Display(in_place=True, clock=clock)
        display("1 s", False)
        display("2 s", False)
        display("ended", True)
        display("said", True)
        assert stderr.getvalue() == f"{ERASE_LINE}1 s{ERASE_LINE}2 s{ERASE_LINE}ended\nsaid\n"

    def test_an_empty_text_erases(self, redirect):
        stderr = redirect(io.StringIO())
        display = Display(in_place=True)
        display("", True)
        assert stderr.getvalue() == ""
        display("1 s", False)
        display("", True)
        assert stderr.getvalue() == f"{ERASE_LINE}1 s{ERASE_LINE}"

    def test_a_text_fits_the_line(self, redirect, monkeypatch):
        stderr = redirect(io.StringIO())
        monkeypatch.setenv("COLUMNS", "5")
        Display(in_place=True)("123456789", False)
        assert stderr.getvalue() == f"{ERASE_LINE}1234"

    def test_is_recognised(self, redirect, monkeypatch):
        monkeypatch.setenv("TERM", "xterm")
        before = progress.show_by()
        master, slave = os.openpty()
        with open(master, "rb", buffering=0) as screen, open(slave, "w") as stream:
            redirect(stream)
            assert progress.is_at_terminal()
            Display()("1 s", False)
            Display()("ended", True)
            assert read(screen, b"ended\r\n") == f"{ERASE_LINE}1 sended\r\n".encode()
            monkeypatch.setenv("TERM", "dumb")
            assert not progress.is_at_terminal()
            Display()("1 s", False)
            assert read(screen, b"\r\n") == b"1 s\r\n"
        progress.show_by(before)


def read(screen, end):
    """Read what a terminal shows, up to an end."""
    seen = b""
    while not seen.endswith(end):
        assert select.select([screen], [], [], WAIT_S)[0], seen
        seen += screen.read(100)
    return seen


class Strange:
    """A stderr of somebody's own."""

    def write(self, text):
        raise RuntimeError


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


def broken():
    reading, writing = os.pipe()
    os.close(reading)
    return open(writing, "w", buffering=1)


class TestBadStderr:
    @pytest.mark.parametrize("make", [lambda: None, closed, broken, Strange])
    @pytest.mark.parametrize("stays", [False, True])
    def test_harms_nothing(self, redirect, make, stays):
        stream = redirect(make())
        Display()("text", stays)
        if make is broken:
            with pytest.raises(BrokenPipeError):
                stream.close()

    def test_a_full_pipe_gets_nothing(self, redirect, monkeypatch):
        monkeypatch.setattr(progress, "WRITE_S", 0.01)
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, b"x" * 4096)
        os.set_blocking(writing, True)
        with open(reading, "rb", buffering=0) as rest, open(writing, "w") as stream:
            redirect(stream)
            for stays in (False, True):
                Display()("no room", stays)
            assert set(rest.read(1 << 20)) == {ord("x")}
            Display()("room", True)
            assert rest.read(100) == b"room\n"


class TestProgress:
    def test_shows_nothing_in_its_first_second(self, clock, shown):
        with Progress("compiling", clock) as work:
            clock.now += 0.9
            work.tick()
            work.ended = "compiled"
        assert shown == []

    def test_shows_how_far_it_is(self, clock, shown):
        with Progress("compiling", clock) as work:
            clock.now += 1.2
            work.tick()
            work.extent = lambda: "1 of 2 functions"
            clock.now += 10
            work.tick()
            work.ended = "compiled"
        assert shown == [
            ("compiling, 1 s", False),
            ("compiling: 1 of 2 functions, 11 s", False),
            ("compiled", True),
        ]

    def test_that_fails_ends_its_text(self, clock, shown):
        work = Progress("compiling", clock)
        with contextlib.suppress(ZeroDivisionError), work:
            clock.now += 2
            work.ended = "compiled"
            _ = 1 / 0
        assert shown == [("", True)]

    def test_within_another_shows_nothing(self, clock, shown):
        with Progress("outer", clock) as outer:
            with Progress("inner", clock) as inner:
                clock.now += 2
                inner.ended = "inner"
            outer.ended = "outer"
        with Progress("next", clock) as following:
            clock.now += 2
            following.ended = "next"
        assert shown == [("outer", True), ("next", True)]

    @pytest.mark.parametrize(("value", "n_texts"), [("0", 0), ("1", 1), ("", 1)])
    def test_is_turned_off(self, clock, shown, monkeypatch, value, n_texts):
        monkeypatch.setenv(config.PROGRESS, value)
        with Progress("compiling", clock):
            clock.now += 2
        assert len(shown) == n_texts
        progress.say("a warning")
        assert shown[n_texts:] == [("a warning", True)]

    def test_a_thread_shows_it_and_ends(self, shown, monkeypatch):
        monkeypatch.setattr(progress, "QUIET_S", 0.0)
        monkeypatch.setattr(progress, "REDRAW_S", 0.001)
        asked = threading.Semaphore(0)

        def extent():
            asked.release()
            raise OSError  # does not end the thread

        with Progress("compiling") as work:
            work.extent = extent
            assert all(asked.acquire(timeout=WAIT_S) for _ in range(2))
            work.extent = str
        assert not work._thread.is_alive()
        assert {text.partition(",")[0] for text, stays in shown if not stays} <= {"compiling"}

    def test_without_a_thread(self, clock, shown, monkeypatch):
        def start(_):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", start)
        with Progress("compiling", clock) as work:
            clock.now += 2
            work.ended = "compiled"
        assert shown == [("compiled", True)]

    def test_in_a_fork(self, clock):
        with Progress("in the parent", clock):
            pid = os.fork()
            if pid == 0:
                with Progress("in the child", clock) as work:
                    os._exit(not work._has_turn)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
