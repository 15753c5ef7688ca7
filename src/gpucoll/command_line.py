"""The parser of gpucoll's commands, the numbers that their options take, and how they print."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from gpucoll.version import __version__

__all__ = ["OneLineParser", "at_least_one", "run_printing", "seconds_between"]

EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE
EXIT_NO_OUTPUT = os.EX_IOERR
"""What a command has found cannot be printed. No command gives this code another meaning."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake in one line, which the usage text would hide; has ``--version``."""

    def __init__(self, *, prog: str, **options: Any) -> None:
        super().__init__(prog=prog, allow_abbrev=False, **options)
        self.add_argument("--version", action="version", version=f"{prog} {__version__}")

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and exit with code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def seconds_between(least: float, most: float) -> Callable[[str], float]:
    """Return a function that parses a time of so many seconds."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"a number of seconds from {least:g} to {most:g}; got {text!r}"
            )
        return value

    return parse


def at_least_one(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def run_printing(name: str, main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run a command; return the exit code, also if what it prints cannot be written."""
    try:
        code = main(arguments)
        if sys.stdout is not None:  # closed by a shell's >&-
            sys.stdout.flush()
    except BrokenPipeError:  # | head
        code = EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in _FULL:
            raise
        print(f"{name}: cannot print the result: {error.strerror}", file=sys.stderr)
        code = EXIT_NO_OUTPUT
    else:
        return code
    # Otherwise Python would fail again when it flushes at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
