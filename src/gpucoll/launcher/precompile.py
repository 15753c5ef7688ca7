"""``gpucoll precompile``: compile the kernels of this machine before a job needs them.

A node's first program compiles what the package has no machine code for (10 s to a minute). This
command does it when an image is built, or when a node starts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from gpucoll.command_line import OneLineParser

__all__ = ["main", "make_parser"]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = OneLineParser(
        prog="gpucoll precompile",
        description="Compile the loops and kernels that this machine needs, and keep them.",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME,...",
        help="also compile the GPU kernels for these targets: sm_90, gfx942, ... or here, for the "
        "GPUs of this machine",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    from gpucoll.backends.precompile import ensure_compiled

    given = make_parser().parse_args(arguments)
    try:
        was_needed = ensure_compiled(lambda line: print(line, file=sys.stderr))
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    print("compiled" if was_needed else "nothing to compile: all is there")
    if given.gpu is None:
        return 0
    from gpucoll.devices.kernels.precompile import main as for_gpus

    return for_gpus([] if given.gpu == "here" else ["--targets", given.gpu])
