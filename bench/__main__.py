"""``python -m gpucoll.bench``: the command ``gpucoll-bench`` in a form that launchers can start."""

from __future__ import annotations

import sys

from gpucoll.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
