"""``python tools/schedules``: print a schedule, its cost and its predicted time."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from schedules.cli import main

if __name__ == "__main__":
    sys.exit(main())
