from __future__ import annotations

import io
import sys

import pytest

from gpucoll.bench.progress import Progress, way_to_show
from gpucoll.bench.time_left import Step


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def shown(stream):
    """Return the function that returns what was written since its last call."""

    def take():
        text = stream.getvalue()
        stream.seek(0)
        stream.truncate()
        return text

    return take


def run_of(progress, sizes=(4, 16, 64)):
    progress.plan([Step("call", size) for size in sizes], lambda call_s: 0.1)


@pytest.fixture
def line(clock, stream, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    progress = Progress("line", stream, clock)
    run_of(progress)
    return progress


def measure(progress, clock, what, seconds):
    """Measure a step in two rounds, after as much time again before them."""
    progress.begin(what, 2)
    clock.now_s += seconds
    for number in range(2):
        progress.end_round(number)
        clock.now_s += seconds / 2
    progress.end([1e-6])


def test_a_line_is_drawn_over_and_erased(line, clock, shown):
    line.begin("all_reduce float32 sum 4 B", 2)
    line.show("gpucoll, in place")
    text = "1/3: all_reduce float32 sum 4 B, gpucoll, in place"
    assert shown() == f"\r\x1b[K[{' ' * 16}] {text}"
    line.show("too soon after it")
    assert shown() == ""
    clock.now_s += 0.2
    line.end_round(1)
    line.show("gloo")
    assert shown().startswith(f"\r\x1b[K[{'#' * 3:<16}] 1/3: ")
    line.end()
    assert shown() == "\r\x1b[K"
    line.clear()
    assert shown() == ""


def test_it_is_erased_at_the_end_whatever_happens(line, shown):
    def interrupted():
        with line:
            line.show("starting gpucoll")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert shown().endswith("starting gpucoll\r\x1b[K")


@pytest.mark.parametrize("width", [1, 20, 40, 79, 80])
def test_it_never_wraps(line, clock, shown, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    measure(line, clock, "all_reduce float32 sum 4 B", 20)
    line.begin("all_reduce float32 sum 16 B", 2)
    line.show("gpucoll symmetric, out of place" * 4)
    text = shown().removeprefix("\r\x1b[K")
    assert len(text) == max(width - 3, 0)
    assert ("#" in text) is (width >= 80)
    assert "2/3, about 1 min left"[: max(width - 3, 0)] in text


def test_how_long_still(line, clock):
    line.begin("a", 4)
    assert line.left_s() is None
    line.end_round(0)
    clock.now_s += 10
    line.end_round(1)
    assert line.left_s() is None  # nothing is known of the steps that follow
    clock.now_s += 30
    line.end([1e-6])
    line.begin("b", 2)
    assert line.left_s() == pytest.approx(80)
    clock.now_s += 10
    assert line.left_s() == pytest.approx(70, rel=0.01)
    line.end_round(0)
    clock.now_s += 5
    line.end_round(1)
    assert line.left_s() == pytest.approx(45)
    line.end([1e-6])
    measure(line, clock, "c", 1)
    assert line.left_s() is None


def test_a_log_has_a_line_every_half_minute(clock, stream, shown):
    log = Progress("log", stream, clock)
    run_of(log)
    log.show("starting gpucoll")
    log.begin("barrier", 2)
    clock.now_s += 29
    log.show("gpucoll")
    assert shown() == ""
    clock.now_s += 1
    log.show("gloo")
    assert shown() == "gpucoll-bench: 1/3: barrier, gloo\n"
    log.show("gloo")
    log.clear()
    assert shown() == ""


def test_nothing_is_shown(clock, stream, shown):
    with Progress("", stream, clock) as silent:
        run_of(silent)
        measure(silent, clock, "a", 100)
        silent.show("gpucoll")
    assert shown() == ""


class Broken:
    def fileno(self):
        raise ValueError("closed")


@pytest.mark.parametrize("stderr", [None, Broken(), io.StringIO()])
def test_without_a_terminal(monkeypatch, stderr):
    monkeypatch.setattr(sys, "stderr", stderr)
    assert way_to_show(is_asked=False, is_table=True) == ""
    assert way_to_show(is_asked=True, is_table=True) == "log"
