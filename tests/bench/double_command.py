"""``gpucoll-bench`` with the double in gpucoll's place, as a process to be interrupted."""

from __future__ import annotations

import sys
from pathlib import Path

from gpucoll.bench import cli, starts

starts.OWN_LIBRARY = str(Path(__file__).with_name("double_library.py"))
cli.compile_kernels = lambda: None
sys.exit(cli.main())
