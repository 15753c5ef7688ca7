"""``python -m gpucoll``: which commands there are, and the same commands under its own name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpucoll.__main__ import COMMANDS
from gpucoll.version import __version__


def said(*arguments):
    """Return exit code, stdout and stderr of ``python -m gpucoll``."""
    command = [sys.executable, "-m", "gpucoll", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_lists_the_commands(arguments):
    code, out, err = said(*arguments)

    assert (code, err) == (0, "")
    assert out.startswith(f"gpucoll {__version__}: ")
    assert all(f"  gpucoll {name} " in out for name in COMMANDS)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], "gpucoll"),
        (["run"], "gpucoll-run"),
        (["bench"], "gpucoll-bench"),
        (["doctor"], "gpucoll-doctor"),
        (["bench", "compare"], "gpucoll-bench compare"),
        *(
            ([name], f"gpucoll {name}")
            for name, each in COMMANDS.items()
            if not each.has_program and " " not in name
        ),
    ],
)
def test_every_command_has_a_version(arguments, name):
    assert said(*arguments, "--version") == (0, f"{name} {__version__}\n", "")


def test_a_command_keeps_its_arguments_and_exit_code():
    code, out, err = said("run", "-n", "2", "--no-prefix", "sh", "-c", "exit 5")

    assert (code, out) == (5, "")
    assert "ended with exit code 5" in err


def test_no_such_command():
    code, out, err = said("launch")

    assert (code, out) == (2, "")
    known = (
        "run, bench, bench report, bench compare, doctor, why, top, trace, metrics, precompile, "
        "completion"
    )
    assert err == f"gpucoll: no command 'launch'; commands: {known} (see --help)\n"


def test_output_that_cannot_be_written():
    """A reader that leaves ends the command as in a shell; a full disk has its own exit code."""
    words = [sys.executable, "-m", "gpucoll", "completion", "bash"]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed, open("/dev/full", "wb") as full:
        ended = subprocess.run(words, stdout=closed, stderr=subprocess.PIPE, timeout=60)
        assert (ended.returncode, ended.stderr) == (141, b"")
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, timeout=60)
    expected = "gpucoll completion: cannot print the result: No space left on device\n"
    assert (ended.returncode, ended.stderr.decode()) == (74, expected)
