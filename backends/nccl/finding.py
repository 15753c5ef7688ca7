"""Find the vendor's library.

It is searched for in the following order. The first copy found is used or refused; no later one
silently takes its place:

1. the copy that this process has loaded already (PyTorch's, CuPy's): two copies of NCCL in one
   process share neither communicators nor memory, and are a known source of crashes;
2. the path in ``GPUCOLL_NCCL_LIBRARY`` (``GPUCOLL_RCCL_LIBRARY``);
3. the vendor's wheel, anywhere on Python's path;
4. what the system's loader finds.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator

from gpucoll import config
from gpucoll.backends.nccl.library import Candidate, Library, is_same_file
from gpucoll.backends.nccl.vendor import Vendor
from gpucoll.devices.foreign_library import files_of_wheels, loaded_copies, open_library
from gpucoll.errors import BackendUnavailableError

__all__ = ["candidates", "load", "vendor_of"]

_VENDORS = {"nccl": "gpucoll.backends.nccl.vendor", "rccl": "gpucoll.backends.rccl.vendor"}
"""The modules of the vendors' records, by name: RCCL's package imports this one."""
FOUND_BY_LOADER = "the system's loader finds it"


def candidates(vendor: Vendor) -> Iterator[Candidate]:
    """Yield the copies of a vendor's library, best first."""
    wanted = config.variable(vendor.variable)
    loaded = loaded_copies(vendor.pattern)
    if wanted and any(is_same_file(path, wanted) for path in loaded):
        loaded = [wanted]
    for path in loaded:
        yield Candidate(path, "this process had loaded it already")
    if wanted:
        yield Candidate(wanted, f"{vendor.variable} names it")
    for path in files_of_wheels(vendor.wheels):
        yield Candidate(path, "the wheel on Python's path")
    for name in vendor.file_names:
        yield Candidate(name, FOUND_BY_LOADER)


@functools.cache
def load(vendor_name: str) -> Library:
    """Return the vendor's library: one copy per process, found at the first call.

    Parameters
    ----------
    vendor_name : str
        ``"nccl"`` or ``"rccl"``.

    Raises
    ------
    BackendUnavailableError
        There is none, or it is not usable; the text gives cause and remedy. The next call searches
        again.
    """
    vendor = vendor_of(vendor_name)
    if config.cpu_only():
        raise BackendUnavailableError(
            f"{vendor.name} is not loaded: {config.CPU_ONLY} keeps this process to the CPU"
        )
    problems = []
    for candidate in candidates(vendor):
        if candidate.reason == FOUND_BY_LOADER:
            try:
                open_library(candidate.path)
            except OSError as error:
                problems.append(str(error))
                continue
        return Library(vendor, candidate)
    raise BackendUnavailableError(
        f"{vendor.name} is not found: no wheel on Python's path, no {vendor.variable}, and "
        f"{'; '.join(problems)}. What to do: {vendor.remedy}"
    )


def vendor_of(name: str) -> Vendor:
    """Return the record of ``"nccl"`` or ``"rccl"``."""
    vendor: Vendor = getattr(importlib.import_module(_VENDORS[name]), name.upper())
    return vendor
