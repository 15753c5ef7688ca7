"""What ``backend="auto"`` takes for which arrays, and why: pure functions of what was found."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpucoll.backends import BACKENDS
from gpucoll.doctor.facts import Choice, Driver, GpuFound, LibraryFound

__all__ = ["LIBRARIES", "NEVER_ON_AMD", "VENDOR_NAMES", "choices", "used_library"]

HOST_ARRAYS = "host arrays"
GPU_ARRAYS = "GPU arrays"
SHARED_GPU = "several ranks on a GPU"
NEVER_ON_AMD = "gpucoll has never been executed on an AMD GPU"

VENDOR_NAMES = {"nvidia": "NVIDIA", "amd": "AMD"}
VENDOR_BACKENDS = {"nvidia": "nccl", "amd": "rccl"}
LIBRARIES = {"nvidia": "NCCL", "amd": "RCCL"}
"""Vendor -> its collectives library."""
SHARING_VERSION = (2, 30)
"""NCCL from here on can be told to take several ranks on one GPU."""


def used_library(vendor: str, libraries: Sequence[LibraryFound] | None) -> LibraryFound | None:
    """Return the copy of the vendor's library that gpucoll takes; None where it takes none."""
    name = LIBRARIES[vendor]
    return next((x for x in libraries or () if x["name"] == name and x["is_used"]), None)


def choices(
    cpu_path_works: bool,
    drivers: Sequence[Driver] | None,
    devices: Sequence[GpuFound],
    libraries: Sequence[LibraryFound] | None,
    served: Collection[str] = BACKENDS,
) -> list[Choice]:
    """Return one row for each kind of arrays.

    Parameters
    ----------
    cpu_path_works : bool
        What the self-test said.
    drivers, devices, libraries
        What the probes found; None where a probe failed.
    served : collection of str
        The backends of this version of gpucoll.
    """
    reason = "the CPU backend, between processes of one host"
    if not cpu_path_works:
        reason += "; but it does not work here: see the self-test"
    host = Choice(arrays=HOST_ARRAYS, backend="cpu", reason=reason)
    one = _one_gpu_a_rank(drivers, devices, libraries, served)
    rows = [host, one]
    if one["backend"] is not None:
        rows.append(_shared_gpu(one["backend"], used_library(devices[0]["vendor"], libraries)))
    return rows


def _one_gpu_a_rank(
    drivers: Sequence[Driver] | None,
    devices: Sequence[GpuFound],
    libraries: Sequence[LibraryFound] | None,
    served: Collection[str],
) -> Choice:
    def refused(reason: str) -> Choice:
        return Choice(arrays=GPU_ARRAYS, backend=None, reason=reason)

    if drivers is None:
        return refused("the drivers did not answer")
    vendors = sorted({device["vendor"] for device in devices})
    if not vendors:
        return refused("this process has no GPU")
    if len(vendors) > 1:
        return refused("GPUs of two vendors: no vendor's library moves arrays between them")
    (vendor,) = vendors
    backend = VENDOR_BACKENDS[vendor]
    if backend not in served:
        return refused(f"this version of gpucoll has no {backend} backend")
    library = used_library(vendor, libraries)
    if library is None:
        return refused(f"{backend} would serve, but {LIBRARIES[vendor]} cannot be used (see below)")
    reason = (
        f"GPUs of {VENDOR_NAMES[vendor]}, one a rank, through {library['name']} "
        f"{library['version']}"
    )
    if vendor == "amd":
        reason += f"; {NEVER_ON_AMD}"
    return Choice(arrays=GPU_ARRAYS, backend=backend, reason=reason)


def _shared_gpu(backend: str, library: LibraryFound | None) -> Choice:
    reason = f"{backend.upper()} refuses them: start one rank per GPU"
    version = (library["version"] or "") if library else ""
    if backend == "nccl" and _numbers(version) >= SHARING_VERSION:
        reason += ", or try NCCL_MULTI_RANK_GPU_ENABLE=1 (experimental)"
    elif backend == "nccl":
        reason += "; NCCL 2.30 and later have an experimental way"
    return Choice(arrays=SHARED_GPU, backend=None, reason=reason)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
