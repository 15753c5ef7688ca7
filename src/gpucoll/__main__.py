"""``gpucoll``, also as ``python -m gpucoll``: lists gpucoll's commands, and runs them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from gpucoll import bench
from gpucoll.command_line import run_printing
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
    **{
        f"bench {name}": Command(
            f"gpucoll.bench.{name}", f"gpucoll.bench.{name}:make_parser", description, False
        )
        for name, description in bench.COMMANDS.items()
    },
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


def usage() -> str:
    """Return the text of ``--help``."""
    rows = "".join(f"  gpucoll {name:15}{each.description}\n" for name, each in COMMANDS.items())
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
        main_of_command = importlib.import_module(COMMANDS[name].module).main
        return run_printing(f"gpucoll {name}", main_of_command, rest)
    else:
        known = ", ".join(COMMANDS)
        print(f"gpucoll: no command {name!r}; commands: {known} (see --help)", file=sys.stderr)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
