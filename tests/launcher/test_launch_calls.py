"""gpucoll.launch as somebody calls it for the first time: names, functions, options of Python."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest

import gpucoll
from gpucoll.errors import ArgumentTypeError
from gpucoll.launcher.arguments import parse
from gpucoll.launcher.function import check_call

OPTIONS = ["-O", "-OO", "-X dev", "-W error::UserWarning", "-I", "-B"]

# What a rank of the caller's has, with a stand-in for the communicator.
PROGRAM = """
import contextlib, sys
sys.path[:0] = {path!r}
from gpucoll.launcher.function import run

def state(comm):
    import sys
    warned = [option for option in sys.warnoptions]
    return tuple(sys.flags), warned, sorted(sys._xoptions), sys.argv, sys.path

if __name__ == "__main__":
    for found in run(state, 2, (), {{}}, 60.0, "none", lambda: contextlib.nullcontext(0)):
        assert found == state(0), (found, state(0))
    print(state(0)[:3])
"""


class TestOptions:
    @pytest.mark.soak(quick=1)
    @pytest.mark.parametrize("options", [*OPTIONS, " ".join(OPTIONS)])
    def test_ranks_run_under_the_callers(self, options, tmp_path):
        program = tmp_path / "program.py"
        program.write_text(PROGRAM.format(path=sys.path))
        command = [sys.executable, *options.split(), str(program), "argument"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout


class TestNames:
    @pytest.mark.parametrize("name", ["np", "n", "nprocs", "world_size"])
    def test_of_the_number_of_ranks(self, name):
        with pytest.raises(ArgumentTypeError, match=f"no argument '{name}': .* is ranks=2$"):
            gpucoll.launch(print, **{name: 2})  # type: ignore[arg-type]

    def test_of_what_the_function_gets(self):
        with pytest.raises(ArgumentTypeError, match=r"kwargs=\{'scale': ...\}"):
            gpucoll.launch(print, 2, scale=2.0)  # type: ignore[arg-type]

    def test_np_of_the_command_line(self):
        assert parse(["-np", "2", "true"]).ranks == 2
        assert parse(["-np", "2", "true", "-np", "3"]).command[1:] == ["-np", "3"]


def no_communicator():
    pass


def one_more(comm, scale):
    pass


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function()

    return wrapper


class TestFunctions:
    @pytest.mark.parametrize(
        ("function", "args", "said"),
        [
            (
                no_communicator,
                (),
                r"no_communicator\(comm\), with the communicator first, but no_communicator\(\)",
            ),
            (one_more, (), r"one_more\(comm, scale\) cannot .*: missing a required arg.*'scale'"),
            (one_more, (1, 2), r"one_more\(comm, \*args, \*\*kwargs\).*too many positional"),
            (lambda: 1, (), r"<lambda>\(comm\)"),
        ],
    )
    def test_that_cannot_be_called_so_are_refused(self, function, args, said):
        with pytest.raises(ArgumentTypeError, match=said):
            gpucoll.launch(function, 2, args)

    @pytest.mark.parametrize(
        "function", [print, decorated(no_communicator), one_more, dict.fromkeys]
    )
    def test_others_pass(self, function):
        check_call(function, (2.0,), {})
