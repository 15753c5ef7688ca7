"""Run one file of JAX's ``tests/multiprocess`` on the ranks of gpucoll-run.

``gpucoll-run -n 4 one_file.py FILE [--gloo PORT] [argument of the file ...]``: without ``--gloo``
over gpucoll, with it over JAX's own Gloo, whose ranks meet at that port.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def main(path: str, *rest: str) -> None:
    """Give the file the arguments that JAX's own runner gives it."""
    port = "1"  # not used: the processes have met
    if rest[:1] == ("--gloo",):
        port, rest = rest[1], rest[2:]
    else:
        from gpucoll.integrations.jax import use_for_processes

        use_for_processes()
    sys.argv = [
        path,
        f"--num_processes={os.environ['GPUCOLL_WORLD_SIZE']}",
        f"--multiprocess_test_worker_id={os.environ['GPUCOLL_RANK']}",
        f"--multiprocess_test_controller_address=127.0.0.1:{port}",
        "--heartbeat_timeout=30",
        "--barrier_timeout=60",
        "--initialization_timeout=60",
        *rest,
    ]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
