"""The GPUs that ranks are measured on: one for each, or shared through the direct backend."""

from __future__ import annotations

import importlib.util

from gpucoll import config
from gpucoll.backends.choice import KINDS
from gpucoll.bench.rank.arrays import TEST_ARRAY, NoGpuError
from gpucoll.doctor.facts import Gpus
from gpucoll.doctor.isolation import Question, ask
from gpucoll.topology import usable_cpu_count

__all__ = ["check_installed", "default_ranks", "ranks_on_gpus"]

LOOK_S = 30.0
"""A driver starts in a second or two on machines with many GPUs."""
EXTRAS = {"cupy": "'gpucoll[cuda13]' (or [cuda12], [rocm])", "torch": "torch"}


def check_installed(array: str) -> None:
    """Raise NoGpuError where the library of the arrays is not there, or another device is meant."""
    if array == TEST_ARRAY:
        return
    if array != "numpy" and config.uses_host_devices():
        raise NoGpuError(
            f"--array {array}: {config.DEVICE} says host, which has gpucoll use its test device: "
            f"unset it, or give --array {TEST_ARRAY}"
        )
    if importlib.util.find_spec(array) is None:
        raise NoGpuError(f"--array {array}: not installed here: pip install {EXTRAS[array]}")


def default_ranks() -> int:
    """Return how many ranks are measured on CPUs, where nobody says it."""
    return min(max(usable_cpu_count(), 2), 8)


def ranks_on_gpus(array: str, ranks: int | None, backend: str = "auto") -> int:
    """Return how many ranks are measured: as many as were asked for, or one for each GPU.

    Raises
    ------
    NoGpuError
        It cannot be.
    """
    check_installed(array)
    if array == TEST_ARRAY:
        return ranks or default_ranks()
    ((found, problem),) = ask([Question("gpus", (), LOOK_S)])  # a driver may hang
    if found is None:
        raise NoGpuError(f"--array {array}: GPUs could not be looked for: {problem}")
    gpus: Gpus = found
    count = len(gpus["devices"])
    if not count:
        raise NoGpuError(f"--array {array} needs a GPU, and there is none: {gpus['kind_reason']}")
    shares = gpus["may_share"] or backend not in KINDS
    if ranks is not None and ranks > count and not shares:
        raise NoGpuError(
            f"--array {array} --ranks {ranks}: with {backend} each rank needs a GPU of its own, "
            f"and this process sees {count}; --backend direct lets ranks share one"
        )
    return ranks or count
