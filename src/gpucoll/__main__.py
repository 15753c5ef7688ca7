"""``gpucoll``, also as ``python -m gpucoll``: lists gpucoll's commands, and runs them."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from gpucoll.version import __version__

if TYPE_CHECKING:
    import argparse


class Command(NamedTuple):
    """One of gpucoll's commands."""

    module: str
    """Has ``main``, which takes the arguments and returns the exit code."""
    parser: str
    """The function that makes its parser: ``module:function``."""
    description: str
    has_program: bool = True
    """Whether it can also be started as ``gpucoll-NAME``."""

    def make_parser(self) -> argparse.ArgumentParser:
        """Return the parser of its arguments."""
        module, function = self.parser.split(":")
        parser: argparse.ArgumentParser = getattr(importlib.import_module(module), function)()
        return parser


COMMANDS: Final = {
    "run": Command(
        "gpucoll.launcher.cli",
        "gpucoll.launcher.arguments:make_parser",
        "start a program on several ranks of this host",
    ),
    "bench": Command(
        "gpucoll.bench.cli",
        "gpucoll.bench.argument_parser:build_parser",
        "measure collectives and compare them with MPI and others",
    ),
    "doctor": Command(
        "gpucoll.doctor.cli",
        "gpucoll.doctor.cli:make_parser",
        "report what works on this machine, and what is missing",
    ),
    "why": Command(
        "gpucoll.observe.why",
        "gpucoll.observe.why:make_parser",
        "say who makes a running job wait, and where",
        has_program=False,
    ),
    "top": Command(
        "gpucoll.observe.top",
        "gpucoll.observe.top:make_parser",
        "show what the ranks of a running job do, live",
        has_program=False,
    ),
    "trace": Command(
        "gpucoll.observe.trace",
        "gpucoll.observe.trace:make_parser",
        "record the calls of a running job for Perfetto",
        has_program=False,
    ),
    "metrics": Command(
        "gpucoll.observe.metrics",
        "gpucoll.observe.metrics:make_parser",
        "export the numbers of running jobs to Prometheus",
        has_program=False,
    ),
    "precompile": Command(
        "gpucoll.launcher.precompile",
        "gpucoll.launcher.precompile:make_parser",
        "compile what this machine needs, before a job does",
        has_program=False,
    ),
    "completion": Command(
        "gpucoll.completion",
        "gpucoll.completion:make_parser",
        "print the completion of these commands for a shell",
        has_program=False,
    ),
}

EXIT_USAGE = 2
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE
EXIT_NO_OUTPUT = os.EX_IOERR
"""What a command has found cannot be printed. No command gives this code another meaning."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def usage() -> str:
    """Return the text of ``--help``."""
    rows = "".join(f"  gpucoll {name:12}{each.description}\n" for name, each in COMMANDS.items())
    programs = [f"gpucoll-{name}" for name, each in COMMANDS.items() if each.has_program]
    return (
        f"gpucoll {__version__}: collectives between Python processes.\n\n{rows}\n"
        f"Each command has --help. {', '.join(programs[:-1])} and {programs[-1]} are the same.\n"
        "In a program: import gpucoll, then gpucoll.init().\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands, or list them; return the exit code."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name == "--version":
        print(f"gpucoll {__version__}")
    elif name in ("-h", "--help"):
        print(usage(), end="")
    elif name in COMMANDS:
        return _run(name, rest)
    else:
        known = ", ".join(COMMANDS)
        print(f"gpucoll: no command {name!r}; commands: {known} (see --help)", file=sys.stderr)
        return EXIT_USAGE
    return 0


def _run(name: str, arguments: Sequence[str]) -> int:
    """Run a command; return the exit code, also if what it prints cannot be written."""
    try:
        code: int = importlib.import_module(COMMANDS[name].module).main(arguments)
        if sys.stdout is not None:  # closed by a shell's >&-
            sys.stdout.flush()
    except BrokenPipeError:  # | head
        code = EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in _FULL:
            raise
        print(f"gpucoll {name}: cannot print the result: {error.strerror}", file=sys.stderr)
        code = EXIT_NO_OUTPUT
    else:
        return code
    # Otherwise Python would fail again when it flushes at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


if __name__ == "__main__":
    sys.exit(main())
