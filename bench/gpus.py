"""The GPUs that ranks are measured on: one for each rank, or shared through the direct backend."""

from __future__ import annotations

import importlib.util

from gpucoll import config
from gpucoll.backends.choice import KINDS
from gpucoll.bench.rank.arrays import TEST_ARRAY, NoGpuError
from gpucoll.doctor.facts import Gpus
from gpucoll.doctor.isolation import Question, ask
from gpucoll.topology import usable_cpu_count

__all__ = ["check_installed", "default_ranks", "ranks_on_gpus"]

INTEL = KINDS["oneccl"]
LOOK_S = 30.0
"""Drivers take a second or two to start on machines with many GPUs."""
EXTRAS = {"cupy": "'gpucoll[cuda13]' (or [cuda12], [rocm])", "torch": "torch"}


def check_installed(array: str) -> None:
    """Raise NoGpuError if the array library is missing, or another device is selected."""
    if array == TEST_ARRAY:
        return
    if array != "numpy" and config.uses_host_devices():
        raise NoGpuError(
            f"--array {array}: {config.DEVICE} is set to host, which makes gpucoll use its test "
            f"device: unset it, or use --array {TEST_ARRAY}"
        )
    if importlib.util.find_spec(array) is None:
        raise NoGpuError(f"--array {array}: not installed here: pip install {EXTRAS[array]}")


def default_ranks() -> int:
    """Return the default number of ranks on CPUs."""
    return min(max(usable_cpu_count(), 2), 8)


def ranks_on_gpus(array: str, ranks: int | None, backend: str = "auto") -> int:
    """Return the number of ranks to measure: `ranks`, or one for each GPU.

    Raises
    ------
    NoGpuError
        There are too few GPUs.
    """
    check_installed(array)
    if array == TEST_ARRAY:
        return ranks or default_ranks()
    # in another process, since a driver may hang
    ((found, problem),) = ask([Question("gpus", (), LOOK_S)])
    if found is None:
        raise NoGpuError(f"--array {array}: the search for GPUs failed: {problem}")
    gpus: Gpus = found
    if gpus["kind"] == INTEL:
        if ranks is None:
            raise NoGpuError(
                f"--array {array}: give --ranks N, one for each Intel GPU: gpucoll-bench does not "
                "count them"
            )
        return ranks
    count = len(gpus["devices"])
    if not count:
        raise NoGpuError(f"--array {array} needs a GPU, but none was found: {gpus['kind_reason']}")
    shares = gpus["may_share"] or backend not in KINDS
    if ranks is not None and ranks > count and not shares:
        raise NoGpuError(
            f"--array {array} --ranks {ranks}: with {backend} each rank needs a GPU of its own, "
            f"but this process sees {count}; --backend direct lets ranks share one"
        )
    return ranks or count
