"""An mpiexec for ranks that need none: ``mpiexec -n P program...``; one that fails ends all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    place = sys.argv.index("-n")
    command = sys.argv[place + 2 :]
    ranks = [
        subprocess.Popen(command, env={**os.environ, "PMI_RANK": str(rank)})
        for rank in range(int(sys.argv[place + 1]))
    ]
    try:
        for _ in ranks:
            _, status = os.wait()
            if status:
                return 9
    finally:
        for rank in ranks:
            rank.kill()
    return 0


sys.exit(main())
