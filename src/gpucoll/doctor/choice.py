"""Which backend ``backend="auto"`` uses for which arrays, and why: pure functions of the facts.

The choice is made by `gpucoll.backends.choice`, as in a communicator. This module adds what a
communicator would only find out in its first call on GPU arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpucoll.backends import BACKENDS
from gpucoll.backends.choice import (
    DIRECT,
    LIBRARY_NAMES,
    Found,
    ObstacleError,
    Seen,
    choose,
    instead,
    obstacle,
)
from gpucoll.doctor.facts import Choice, DriverFound, GpuFound, Gpus, LibraryFound

__all__ = [
    "INTEL_LIBRARY",
    "LIBRARIES",
    "NEVER_ON_AMD",
    "NEVER_ON_INTEL",
    "VENDOR_NAMES",
    "choices",
    "used_library",
]

HOST_ARRAYS = "host arrays"
GPU_ARRAYS = "GPU arrays"
SHARED_GPU = "shared GPU"
"""Arrays on a GPU that several ranks share."""
_BOTH = (GPU_ARRAYS, SHARED_GPU)
NEVER_ON_AMD = "gpucoll has never been executed on an AMD GPU"
NEVER_ON_INTEL = "gpucoll has never been executed on an Intel GPU"
_INTEL = "oneccl"
"""The backend of Intel GPUs, which the probes of drivers do not look for."""
INTEL_LIBRARY = LIBRARY_NAMES[_INTEL]

VENDOR_NAMES = {"nvidia": "NVIDIA", "amd": "AMD"}
LIBRARIES = {"nvidia": "NCCL", "amd": "RCCL"}
"""Vendor -> its collectives library; the name of its backend is the same in lower case."""
_VENDORS = {name.lower(): vendor for vendor, name in LIBRARIES.items()}


def used_library(vendor: str, libraries: Sequence[LibraryFound] | None) -> LibraryFound | None:
    """Return the copy of the vendor's library that gpucoll uses; None if it uses none."""
    name = LIBRARIES[vendor]
    return next((x for x in libraries or () if x["name"] == name and x["is_used"]), None)


def choices(
    cpu_path_works: bool,
    gpus: Gpus | None,
    libraries: Sequence[LibraryFound] | None,
    served: Collection[str] = BACKENDS,
) -> list[Choice]:
    """Return one row for each kind of arrays.

    Parameters
    ----------
    cpu_path_works : bool
        The result of the self-test.
    gpus, libraries
        The results of the probes; None if a probe failed.
    served : collection of str
        The backends of this version.
    """
    reason = "between processes of one host, through shared memory"
    if not cpu_path_works:
        reason += "; but this does not work here: see the self-test"
    rows = [Choice(arrays=HOST_ARRAYS, backend="cpu", reason=reason)]
    if gpus is None:
        return [*rows, _refused(GPU_ARRAYS, "the drivers did not answer")]
    return [*rows, *_of_gpus(gpus, libraries, served)]


def _of_gpus(
    gpus: Gpus, libraries: Sequence[LibraryFound] | None, served: Collection[str]
) -> list[Choice]:
    """Return the rows of GPU arrays: for one GPU per rank, and for several ranks on one GPU."""
    pick = choose("auto", [Seen(gpus["kind"], gpus["kind_reason"])], served).gpu
    if not pick.backend:
        return [_refused(GPU_ARRAYS, pick.reason)]
    if pick.backend == DIRECT:
        return [Choice(arrays=arrays, backend=DIRECT, reason=pick.reason) for arrays in _BOTH]
    if pick.backend == _INTEL:
        return [_of_intel(pick.reason, libraries)]
    vendor = _VENDORS[pick.backend]
    devices = [device for device in gpus["devices"] if device["vendor"] == vendor]
    library = used_library(vendor, libraries)
    if not devices:
        driver = next(x for x in gpus["drivers"] if x["vendor"] == vendor)
        return [_refused(GPU_ARRAYS, _without_gpu(pick.backend, driver))]
    warning = f"; {NEVER_ON_AMD}" if vendor == "amd" else ""
    if library is None:
        why = f"{pick.backend} would be chosen, but {LIBRARIES[vendor]} cannot be used (see below)"
        if instead("auto", ObstacleError(why, has_gpus=True), pick, served) is None:
            return [_refused(GPU_ARRAYS, why)]
        return [Choice(arrays=arrays, backend=DIRECT, reason=why + warning) for arrays in _BOTH]
    reason = f"one GPU per rank, through {library['name']} {library['version']} ({pick.reason})"
    row = Choice(arrays=GPU_ARRAYS, backend=pick.backend, reason=reason + warning)
    return [row, _shared(pick.backend, devices[0], library, gpus["may_share"], served)]


def _of_intel(reason: str, libraries: Sequence[LibraryFound] | None) -> Choice:
    """Return the row of Intel GPUs; whether SYCL sees them, the first call finds out."""
    name = INTEL_LIBRARY
    used = next((x for x in libraries or () if x["name"] == name and x["is_used"]), None)
    if used is None:
        return _refused(
            GPU_ARRAYS, f"{_INTEL} would be chosen, but {name} cannot be used (see below)"
        )
    text = f"one GPU per rank, through {name} {used['version']} ({reason}); {NEVER_ON_INTEL}"
    return Choice(arrays=GPU_ARRAYS, backend=_INTEL, reason=text)


def _refused(arrays: str, reason: str) -> Choice:
    return Choice(arrays=arrays, backend=None, reason=reason)


def _without_gpu(backend: str, driver: DriverFound) -> str:
    return f"{backend} would be chosen, but this process has no GPU: {driver['problem']}"


def _shared(
    backend: str, device: GpuFound, library: LibraryFound, may_share: bool, served: Collection[str]
) -> Choice:
    """Return the backend of two ranks on one GPU, or why they are refused."""
    version = tuple(int(part) for part in (library["version"] or "").split(".") if part.isdecimal())
    found = Found("", "first", device["uuid"], device["name"], version, may_share)
    reason = obstacle(backend, [found, found], served)
    if reason and DIRECT in served:
        return Choice(arrays=SHARED_GPU, backend=DIRECT, reason=reason)
    if reason:
        return _refused(SHARED_GPU, reason)
    reason = "NCCL_MULTI_RANK_GPU_ENABLE=1 allows it (experimental)"
    return Choice(arrays=SHARED_GPU, backend=backend, reason=reason)
