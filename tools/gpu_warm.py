"""Compile what all other steps of tools/gpu_check.py need, on all CPUs at once.

::

    python tools/gpu_warm.py

On a machine that has compiled nothing yet, the first `init` takes up to a minute, and the first
call of each kind takes a moment; other steps would exceed their limits. The results are kept in
`GPUCOLL_CACHE_DIR` as usual; if they are all there, this takes seconds.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent

LOOPS = """
import importlib, sys
from gpucoll.kernels.cpu import jit
importlib.import_module(sys.argv[1])
for loop in jit.loops_of(sys.argv[1]):
    assert loop.address
"""
"""Loops that most programs do not need, and that are compiled on first use."""

CUPY = """
import cupy
x = cupy.arange(12, dtype="float32").reshape(3, 4)
cupy.ascontiguousarray(x.T)
x.fill(1)
cupy.asnumpy(x.astype("float16") + 1)
assert bool((x == 1).all())
"""
"""Some of CuPy's own kernels."""


def first() -> dict[str, list[str]]:
    """Return the commands that need no others, by name."""
    return {
        "the CPU's loops": [sys.executable, "-m", "gpucoll.backends.precompile"],
        "the GPU's kernels": [sys.executable, "-m", "gpucoll.devices.kernels.precompile"],
        "CuPy's kernels": [sys.executable, "-c", CUPY],
    }


def then(output: Path) -> dict[str, list[str]]:
    """Return the commands that need the CPU's loops: all reductions on the host, other loops."""
    from gpucoll.backends.precompile import MODULES_WHEN_USED

    command = [sys.executable, "-m", "gpucoll.launcher.cli", "-n", "2"]
    command += [str(HERE / "gpu_collectives.py"), "--backend", "direct", "--staged"]
    command += ["--array", "host-device", "--output", str(output)]
    loops = {name: [sys.executable, "-c", LOOPS, name] for name in MODULES_WHEN_USED}
    return {"reductions on the host": command, **loops}


def run(commands: Mapping[str, Sequence[str]]) -> int:
    """Run all commands at once; report how each one ended, and return how many failed."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        logs = {name: Path(folder, str(number)) for number, name in enumerate(commands)}
        processes = {}
        for name, command in commands.items():
            with open(logs[name], "wb") as log:
                processes[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        failed = 0
        while processes:
            for name, process in list(processes.items()):
                try:
                    process.wait(0.05)
                except subprocess.TimeoutExpired:
                    continue
                del processes[name]
                failed += process.returncode != 0
                text = logs[name].read_text(encoding="utf-8", errors="replace").strip()
                last = "\n".join(text.splitlines()[-20 if process.returncode else -1 :])
                elapsed_s = time.monotonic() - begin
                how = "ready" if process.returncode == 0 else "FAILED"
                print(f"{name}: {how} after {elapsed_s:.1f} s: {last}", flush=True)
    return failed


def main() -> int:
    """Run the command line and return its exit code."""
    failed = run(first())
    with tempfile.TemporaryDirectory() as folder:
        failed += run(then(Path(folder) / "rows.json"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
