"""``python -m gpucoll.integrations.horovod script.py``: run a program of Horovod on gpucoll."""

from __future__ import annotations

import sys

from gpucoll.integrations.aliases import run_program
from gpucoll.integrations.horovod.alias import install

_USAGE = """usage: python -m gpucoll.integrations.horovod [-m MODULE | -c CODE | FILE] arguments...

Runs a program of Horovod on gpucoll: `import horovod` finds gpucoll.integrations.horovod.
On four ranks: gpucoll-run -n 4 -m gpucoll.integrations.horovod FILE arguments..."""

if __name__ == "__main__":
    run_program(sys.argv[1:], _USAGE, install)
