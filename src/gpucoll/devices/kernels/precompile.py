"""Compile all kernels ahead, for GPUs that need not be present.

::

    python -m gpucoll.devices.kernels.precompile --targets sm_90,gfx942

Otherwise a kernel is compiled at its first launch, and kept. This command compiles all of them,
with one process per CPU, and kernels of one file together. Programs that find them kept need no
compiler.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

from gpucoll import config, devices
from gpucoll.devices.kernels import images
from gpucoll.devices.kernels.compiler import compiler_of, kind_of
from gpucoll.devices.kernels.images import compile_group
from gpucoll.errors import BackendUnavailableError, GpucollError
from gpucoll.kernels.gpu.catalogue import groups

TARGETS = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx1100")
"""Targets for which every kernel is known to compile (docs/gpu_kernels.md)."""
_TARGET = re.compile(r"sm_\d+|gfx[0-9a-f]+(:[a-z]+[+-])*")


def targets_here() -> list[str]:
    """Return the targets of the GPUs of this process."""
    found = (
        devices.open_device(kind, number).target
        for kind in ("cuda", "rocm")
        for number in range(devices.device_count(kind))
    )
    return list(dict.fromkeys(found))


def precompile(
    targets: Sequence[str], report: Callable[[str], None] = print, n_processes: int | None = None
) -> bool:
    """Compile all kernels for each target, and keep them; return whether all succeeded.

    Parameters
    ----------
    targets : sequence of str
        ``"sm_90"``, ``"gfx942"``; AMD's with modes (``"gfx942:sramecc+:xnack-"``) or for all modes.
    report : callable
        Receives a line of text for each target.
    n_processes : int, optional
        Number of processes that compile at once; by default the number of CPUs.

    Raises
    ------
    BackendUnavailableError
        There is no folder in which to keep them.
    """
    if images.folder() is None:
        raise BackendUnavailableError(
            "there is no folder for compiled kernels to which no other user can write: name one "
            f"by {config.CACHE_DIR}"
        )
    spawn = multiprocessing.get_context("spawn")  # compilers must not be forked
    done = [True]
    with ProcessPoolExecutor(n_processes or len(os.sched_getaffinity(0)), spawn) as pool:
        for target in targets:
            begun_s = time.monotonic()
            try:
                compiler = compiler_of(kind_of(target))
                sizes = list(pool.map(_compile, range(len(groups())), [target] * len(groups())))
            except GpucollError as error:
                report(f"{target}: failed: {error}")
                done.append(False)
                continue
            report(
                f"{target}: {sum(map(len, groups()))} kernels, {sum(sizes) / 1e6:.1f} MB, by "
                f"{compiler} in {time.monotonic() - begun_s:.1f} s, in {images.folder()}"
            )
    return all(done)


def _compile(place: int, target: str) -> int:
    """Compile one group, in a separate process; return its size in bytes."""
    return len(compile_group(groups()[place], target).content)


def _targets(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if not _TARGET.fullmatch(name):
            raise argparse.ArgumentTypeError(f"{name!r} is no target such as sm_90 or gfx942")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m gpucoll.devices.kernels.precompile",
        description="Compile gpucoll's GPU kernels ahead. No GPU is needed for that.",
    )
    parser.add_argument(
        "--targets",
        type=_targets,
        metavar="NAME,...",
        help=f"what to compile for, such as {','.join(TARGETS)} (default: the GPUs that are here)",
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: one a CPU)")
    given = parser.parse_args(arguments)
    targets = given.targets or targets_here()
    if not targets:
        parser.error("there is no GPU here: say what to compile for, by --targets")
    try:
        return 0 if precompile(targets, n_processes=given.jobs) else 1
    except GpucollError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
