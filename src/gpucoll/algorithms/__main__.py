"""``python -m gpucoll.algorithms``: print a schedule, what it costs and how long it takes."""

from __future__ import annotations

import sys

from gpucoll.algorithms.cli import main

if __name__ == "__main__":
    sys.exit(main())
