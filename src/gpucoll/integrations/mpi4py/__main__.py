"""``python -m gpucoll.integrations.mpi4py script.py``: run a program of mpi4py on gpucoll."""

from __future__ import annotations

import runpy
import sys

from gpucoll.integrations.mpi4py.alias import install

_USAGE = """usage: python -m gpucoll.integrations.mpi4py [-m MODULE | -c CODE | FILE] arguments...

Runs a program of mpi4py on gpucoll: `import mpi4py` finds gpucoll.integrations.mpi4py.
On four ranks: gpucoll-run -n 4 -m gpucoll.integrations.mpi4py FILE arguments..."""


def main(arguments: list[str]) -> None:
    """Run the file, module or code that the arguments name."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        sys.exit(0 if arguments else 2)
    install()
    if arguments[0] in ("-m", "-c"):
        if len(arguments) < 2:
            print(_USAGE, file=sys.stderr)
            sys.exit(2)
        kind, what, *rest = arguments
        sys.argv = [what if kind == "-m" else "-c", *rest]
        sys.path.insert(0, "")
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102  # as python -c does
        return
    sys.argv = arguments
    sys.path.insert(0, str(__import__("pathlib").Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
