"""``python -m gpucoll.algorithms``: print a schedule, its cost and its predicted time."""

from __future__ import annotations

import sys

from gpucoll.algorithms.cli import main

if __name__ == "__main__":
    sys.exit(main())
