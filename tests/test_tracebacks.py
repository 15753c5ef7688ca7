"""What a user reads of an error that nobody caught."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import traceback

import pytest

import gpucoll
from gpucoll.api import initialise
from gpucoll.errors import GpucollError, LaunchError, PeerLostError
from gpucoll.tracebacks import chain, shortened

WRONG_CALL = """
import gpucoll

def train():
    gpucoll.init(backend="fast")

train()
"""
OTHER_ERROR = """
import gpucoll

try:
    gpucoll.init(backend="fast")
except gpucoll.UsageError:
    pass

class Odd:
    def __eq__(self, other):
        raise KeyError("odd")
    __hash__ = None

gpucoll.init(backend=Odd())
"""


def stderr_of(tmp_path, text, **variables):
    program = tmp_path / "train.py"
    program.write_text(text)
    environment = {**os.environ, **variables}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1
    return done.stderr


def test_of_a_wrong_call_the_users_lines(tmp_path):
    shown = stderr_of(tmp_path, WRONG_CALL)
    assert shown.count("  File ") == 2
    assert "train()" in shown
    assert 'gpucoll.init(backend="fast")' in shown
    assert "gpucoll.errors.ArgumentError: backend must be one of" in shown.splitlines()[-1]


def test_all_lines_where_they_are_asked_for(tmp_path):
    shown = stderr_of(tmp_path, WRONG_CALL, GPUCOLL_FULL_TRACEBACKS="1")
    assert "in parse\n" in shown
    assert shown.count("  File ") > 2


def test_an_error_that_is_not_gpucolls_keeps_its_lines(tmp_path):
    shown = stderr_of(tmp_path, OTHER_ERROR)
    assert "in parse\n" in shown
    assert "in __eq__\n" in shown


def test_a_hook_of_the_programs_is_left_alone(tmp_path):
    hook = "import sys\nsys.excepthook = lambda *_: sys.stderr.write('mine')\n"
    assert stderr_of(tmp_path, hook + WRONG_CALL) == "mine"


def raised(function):
    with pytest.raises(GpucollError) as caught:
        function()
    return caught.value


def wrong_call():
    gpucoll.init(backend="fast")


def test_the_error_itself_stays_whole():
    error = raised(wrong_call)
    before = traceback.format_exception(error)
    with shortened(error):
        assert len(traceback.extract_tb(error.__traceback__)) == 2
    assert traceback.format_exception(error) == before


def test_what_it_came_of_is_shortened_too():
    def wrapping():
        try:
            wrong_call()
        except GpucollError as error:
            raise PeerLostError("lost") from error

    error = raised(wrapping)
    with shortened(error):
        shown = "".join(traceback.format_exception(error))
    assert "in parse\n" not in shown
    assert shown.count("in wrong_call\n") == 1


def test_an_interrupt_in_a_call_is_shortened(monkeypatch):
    interrupt = functools.partial(signal.raise_signal, signal.SIGINT)
    monkeypatch.setattr(initialise, "check_dependencies", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        gpucoll.init()
    with shortened(caught.value):
        assert traceback.extract_tb(caught.value.__traceback__)[-1].filename == __file__


def test_an_error_of_a_rank_is_shortened_in_its_launcher():
    error = ValueError("the reason")
    error.__cause__ = LaunchError("rank 1 failed")
    assert [type(each) for each in chain(error)] == [ValueError, LaunchError]
    try:
        raise error
    except ValueError:
        with shortened(error):
            assert traceback.extract_tb(error.__traceback__)[-1].filename == __file__
