"""``python -m gpucoll``: lists gpucoll's commands, and runs them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Final

from gpucoll.version import __version__

COMMANDS: Final = {
    "run": ("gpucoll.launcher.cli", "start a program on several ranks of this host"),
    "bench": ("gpucoll.bench.cli", "measure collectives and compare them with MPI and others"),
    "doctor": ("gpucoll.doctor.cli", "report what works on this machine, and what is missing"),
}
"""Name -> module with its ``main``, and its description."""

EXIT_USAGE = 2


def usage() -> str:
    """Return the text of ``--help``."""
    rows = "".join(f"  gpucoll-{name:8}{what}\n" for name, (_, what) in COMMANDS.items())
    return (
        f"gpucoll {__version__}: collectives between Python processes.\n\n{rows}\n"
        "Each command has --help, and also runs as python -m gpucoll run, bench or doctor.\n"
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
        module = importlib.import_module(COMMANDS[name][0])
        code: int = module.main(rest)
        return code
    else:
        known = ", ".join(COMMANDS)
        print(f"gpucoll: no command {name!r}; commands: {known} (see --help)", file=sys.stderr)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
