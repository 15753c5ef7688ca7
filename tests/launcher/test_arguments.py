"""The command line: what is understood, and one line for what is not."""

from __future__ import annotations

import sys

import pytest

from gpucoll.launcher.arguments import parse
from gpucoll.version import __version__


@pytest.fixture(autouse=True)
def program(tmp_path, monkeypatch):
    """Stand in a folder that has a script, an executable and a text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "solver").write_text("#!/bin/sh\n")
    (tmp_path / "solver").chmod(0o755)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("-n 2 train.py", [sys.executable, "train.py"]),
        (
            "-n 2 train.py -n 9 --bind x -m y --help",
            [sys.executable, "train.py", *["-n", "9", "--bind", "x", "-m", "y", "--help"]],
        ),
        ("-n 2 -m package.module -n 9", [sys.executable, "-m", "package.module", "-n", "9"]),
        ("-n 2 -mpackage.module x", [sys.executable, "-m", "package.module", "x"]),
        ("--bind none -n 2 ./solver --fast", ["./solver", "--fast"]),
        ("-n 2 -- train.py x", [sys.executable, "train.py", "x"]),
        ("-n2 --timeout=3 train.py -- x", [sys.executable, "train.py", "--", "x"]),
    ],
)
def test_the_program_keeps_its_own_options(line, command):
    options = parse(line.split())
    assert options.command == command
    assert options.ranks == 2


@pytest.mark.parametrize(
    ("line", "rest"),
    [("-n 2 train.py x", ["train.py", "x"]), ("-n 2 -m package.module", ["-m", "package.module"])],
)
def test_programs_for_jax(monkeypatch, line, rest):
    """What is no Python program stays as it is."""
    monkeypatch.setenv("GPUCOLL_JAX", "1")
    prepared = [sys.executable, "-m", "gpucoll.integrations.jax", *rest]
    assert parse(line.split()).command == prepared
    assert parse(["-n", "2", "./solver"]).command == ["./solver"]


def understood(line):
    """Return bind, prefix, timeout and grace time of a command line."""
    options = parse(line.split())
    return options.bind, options.prefix, options.timeout_s, options.grace_s


def test_options(monkeypatch):
    monkeypatch.delenv("GPUCOLL_BIND", raising=False)
    assert understood("-n 3 train.py") == ("auto", True, None, 5.0)
    line = "--ranks 3 --bind none --no-prefix --timeout 1.5 --grace 0 train.py"
    assert understood(line) == ("none", False, 1.5, 0.0)


def test_options_from_the_environment(monkeypatch):
    monkeypatch.setenv("GPUCOLL_BIND", "none")
    monkeypatch.setenv("GPUCOLL_GRACE_S", "0.25")
    assert understood("-n 1 train.py") == ("none", True, None, 0.25)
    assert understood("-n 1 --bind auto --grace 2 train.py") == ("auto", True, None, 2.0)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("", "-n"),
        ("train.py", "-n"),
        ("-n 2", "there is no program to run"),
        ("-n 2 -m", "-m"),
        ("-n", "-n"),
        ("-n 0 train.py", "'0'"),
        ("-n -1 train.py", "-n"),
        ("-n two train.py", "'two'"),
        ("-n 2 --bind sockets train.py", "sockets"),
        ("-n 2 --timeout soon train.py", "soon"),
        ("-n 2 --timeout inf train.py", "inf"),
        ("-n 2 --grace -1 train.py", "-1"),
        ("-n 2 --tiemout 3 train.py", "--tiemout"),
        ("-n 2 missing.py", "no such file: missing.py"),
        ("-n 2 ./missing", "no such program: ./missing"),
        ("-n 2 no-such-program-anywhere", "no such program: no-such-program-anywhere"),
        ("-n 2 ./notes.txt", "./notes.txt is neither a .py file nor executable"),
    ],
)
def test_a_wrong_line_gets_one_line(capsys, line, part):
    with pytest.raises(SystemExit) as exit_:
        parse(line.split())
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert part in err
    assert err.startswith("gpucoll-run: ")
    assert err.count("\n") == 1


def test_a_wrong_grace_time_in_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("GPUCOLL_GRACE_S", "long")
    with pytest.raises(SystemExit):
        parse(["-n", "1", "train.py"])
    assert "GPUCOLL_GRACE_S=long" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "part"), [("--help", "usage: gpucoll-run -n RANKS"), ("--version", __version__)]
)
def test_asked_for_information(capsys, option, part):
    with pytest.raises(SystemExit) as exit_:
        parse([option])
    assert exit_.value.code == 0
    assert part in capsys.readouterr().out
