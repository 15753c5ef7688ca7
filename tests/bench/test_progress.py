from __future__ import annotations

import io
import sys

import pytest

from gpucoll.bench.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    stream = Terminal()
    progress = Progress(2, stream)
    progress.step("first")
    assert stream.getvalue() == f"\r\x1b[K[{'#' * 12:<24}]  50 % first"
    progress.clear()
    assert stream.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize(("stdout", "stderr"), [(Terminal, io.StringIO), (io.StringIO, Terminal)])
def test_a_pipe_gets_none(monkeypatch, stdout, stderr):
    monkeypatch.setattr(sys, "stdout", stdout())
    stream = stderr()
    progress = Progress(2, stream)
    progress.step("first")
    progress.clear()
    assert stream.getvalue() == ""
