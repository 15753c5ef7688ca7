"""``python -m gpucoll.doctor``: the same as ``gpucoll-doctor``."""

from __future__ import annotations

import sys

from gpucoll.doctor.cli import main

if __name__ == "__main__":
    sys.exit(main())
