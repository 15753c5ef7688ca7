"""The parser of gpucoll's commands."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from gpucoll.version import __version__

__all__ = ["OneLineParser"]


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake in one line, which the usage text would hide; has ``--version``."""

    def __init__(self, *, prog: str, **options: Any) -> None:
        super().__init__(prog=prog, allow_abbrev=False, **options)
        self.add_argument("--version", action="version", version=f"{prog} {__version__}")

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and exit with code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")
