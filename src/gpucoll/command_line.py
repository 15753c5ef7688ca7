"""The parser of gpucoll's commands."""

from __future__ import annotations

import argparse
from typing import NoReturn

__all__ = ["OneLineParser"]


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake in one line, which the usage text would hide."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and exit with code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")
