"""The parser of gpucoll's commands, and the numbers that their options take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from gpucoll.version import __version__

__all__ = ["OneLineParser", "at_least_one", "seconds_between"]


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
