"""The vendor's library: its vendors, how a copy is found, its functions, exceptions for its codes.

A copy is searched for in the following order. The first one found is used or refused; no later one
silently takes its place:

1. the copy that this process has loaded already (PyTorch's, CuPy's): two copies of NCCL in one
   process share neither communicators nor memory, and are a known source of crashes;
2. the path in ``GPUCOLL_NCCL_LIBRARY`` (``GPUCOLL_RCCL_LIBRARY``);
3. the vendor's wheel, anywhere on Python's path;
4. what the system's loader finds.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from gpucoll import config, devices
from gpucoll.backends.choice import spelled
from gpucoll.backends.nccl.prototypes import PROTOTYPES, ncclResult_t, ncclUniqueId
from gpucoll.devices.foreign_library import (
    Prototype,
    bind,
    files_of_wheels,
    loaded_copies,
    open_library,
)
from gpucoll.errors import (
    BackendError,
    BackendUnavailableError,
    DeadlineError,
    GpucollError,
    PeerLostError,
)

Version = tuple[int, int, int]
IN_PROGRESS = int(ncclResult_t.ncclInProgress)

_ERRORS: Mapping[int, type[GpucollError]] = MappingProxyType(
    {ncclResult_t.ncclRemoteError: PeerLostError, ncclResult_t.ncclTimeout: DeadlineError}
)


class Vendor(NamedTuple):
    """A vendor's collectives library."""

    name: str
    """Its common name; in lower case the backend's name."""
    device_kind: str
    """The kind of GPUs that it serves, as in a Buffer's ``device``."""
    variable: str
    """The environment variable that names a copy."""
    pattern: str
    """Matches the file name of any copy."""
    wheels: tuple[str, ...]
    """Where Python packages keep their copies: patterns of paths, searched on Python's path."""
    file_names: tuple[str, ...]
    """File names for the loader, in this order."""
    minimum: Version
    """The oldest version that is accepted."""
    prototypes: tuple[Prototype, ...]
    spellings: Mapping[str, Sequence[str]]
    """Name in the table -> the symbols to look for, if there are several."""
    remedy: str
    """What to do if there is no library."""
    variables_to_mention: Mapping[str, str]
    """Environment variable -> the note to print if it is set."""
    variables_to_set: Mapping[str, str]
    """Environment variable that should be 1 -> the note to print if it is not."""
    errors: Mapping[int, type[GpucollError]] = _ERRORS
    """The exception for each code; every other code is a BackendError."""
    unique_id: type[ctypes.Structure] = ncclUniqueId
    """The id that rank 0 makes and every rank joins with."""


BLOCKING = (
    "it overrides how gpucoll makes communicators, so that a rank that never comes may not end in "
    "a DeadlineError: unset it"
)
NCCL = Vendor(
    name="NCCL",
    device_kind="cuda",
    variable=config.NCCL_LIBRARY,
    pattern=r"libnccl\.so(\.2.*)?",
    wheels=("nvidia/nccl/lib/libnccl.so.2",),
    file_names=("libnccl.so.2",),
    # 2.18 introduced ncclCommSplit, and is the first version with the complete prefix.
    minimum=(2, 18, 0),
    prototypes=PROTOTYPES,
    spellings=MappingProxyType({}),
    remedy="pip install nvidia-nccl-cu12 (or nvidia-nccl-cu13 for CUDA 13: never both, they "
    "overwrite each other), or name a copy in " + config.NCCL_LIBRARY,
    variables_to_mention=MappingProxyType({config.NCCL_COMM_BLOCKING: BLOCKING}),
    variables_to_set=MappingProxyType({}),
)
RCCL = Vendor(
    name="RCCL",
    device_kind="rocm",
    variable=config.RCCL_LIBRARY,
    pattern=r"librccl\.so(\.1.*)?",
    wheels=("_rocm_sdk_libraries*/lib/librccl.so.1",),
    file_names=("librccl.so.1", "/opt/rocm/lib/librccl.so.1"),
    # RCCL numbers its versions as the NCCL that it follows: 2.18 came with ROCm 6.0.
    minimum=(2, 18, 0),
    prototypes=PROTOTYPES,
    spellings=MappingProxyType({"ncclAlltoAll": ("ncclAlltoAll", "ncclAllToAll")}),
    remedy="it comes with ROCm (package rccl), or name a copy in " + config.RCCL_LIBRARY,
    variables_to_mention=MappingProxyType({config.NCCL_COMM_BLOCKING: BLOCKING}),
    variables_to_set=MappingProxyType(
        {
            config.HSA_NO_SCRATCH_RECLAIM: "on MI300 and newer (gfx942, gfx950) RCCL ends the "
            "process at its first communicator with some versions of ROCm's runtime, or is slow: "
            "set it to 1"
        }
    ),
)
"""AMD's values of the differences between the two libraries.

Never executed on an AMD GPU so far: tested with a double that has RCCL's names, and with a
comparison of the enumerations with those of the `rocm-bindings-systems` wheel.
"""
VENDORS = MappingProxyType({"nccl": NCCL, "rccl": RCCL})


class Candidate(NamedTuple):
    """A copy of the library that could be used."""

    path: str
    """A path, or a name for the loader."""
    reason: str
    """Why this copy is used: the sentence that the doctor prints."""


def is_same_file(path: str, other: str) -> bool:
    """Return whether both paths exist and are the same file."""
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


class Functions:
    """The library's functions, by their names in the table. They return 0 (ncclSuccess) or a code.

    A function that this copy lacks raises BackendUnavailableError, which names the version that has
    it.
    """

    def __init__(self, library: Library, bound: dict[str, Any]) -> None:
        self.__dict__.update(bound)
        self._library = library

    def __getattr__(self, name: str) -> Any:  # for functions that are not bound
        if name.startswith("_"):
            raise AttributeError(name)
        library = self._library
        since = {row.name: row.since for row in library.vendor.prototypes}
        if name not in since:
            raise AttributeError(f"{name} is not in the table of prototypes")
        raise BackendUnavailableError(
            f"{library} has no {name}, which came with {library.vendor.name} {since[name]}"
        )


class Library:
    """One loaded copy of NCCL or RCCL.

    Parameters
    ----------
    vendor : Vendor
        The library's vendor.
    candidate : Candidate
        The copy to load.

    Attributes
    ----------
    path, reason : str
        The path from which it was loaded, and why.
    version : tuple of int
        The version that it reports: (major, minor, patch).
    functions : Functions
        Its functions.
    absent : tuple of str
        Functions of the table that it lacks.

    Raises
    ------
    BackendUnavailableError
        It cannot be loaded, is too old, or lacks functions that its version should have.
    """

    def __init__(self, vendor: Vendor, candidate: Candidate) -> None:
        self.vendor = vendor
        self.reason = candidate.reason
        try:
            loaded = open_library(candidate.path)
        except OSError as error:
            raise BackendUnavailableError(
                f"{vendor.name} cannot be loaded from {candidate.path} ({candidate.reason}): "
                f"{error}"
            ) from None
        bound = bind(loaded, vendor.prototypes, vendor.spellings)
        self.path = _path_of(vendor, candidate.path)
        self.version = _version_of(vendor, candidate, bound)
        self._check_version()
        missing = {row.name: row.since for row in vendor.prototypes if row.name not in bound}
        self.absent = tuple(missing)
        self._present = frozenset(bound)
        self.functions = Functions(self, bound)
        if required := [name for name, since in missing.items() if not since]:
            symbols = ", ".join(vendor.spellings.get(name, (name,))[0] for name in required)
            raise BackendUnavailableError(
                f"{self} lacks {symbols}, which {vendor.name} has had since before "
                f"{spelled(vendor.minimum)}: it is no {vendor.name}, or was built without them"
            )

    def __str__(self) -> str:
        return f"{self.vendor.name} {spelled(self.version)} ({self.path})"

    def _check_version(self) -> None:
        if self.version < self.vendor.minimum:
            least = spelled(self.vendor.minimum)
            because = f" It is used because {self.reason}." if "already" in self.reason else ""
            raise BackendUnavailableError(
                f"{self} is too old: gpucoll needs {self.vendor.name} {least} or newer.{because} "
                f"What to do: {self.vendor.remedy}"
            )

    @property
    def version_text(self) -> str:
        """The version as dotted text: ``"2.28.9"``."""
        return spelled(self.version)

    @property
    def others(self) -> tuple[str, ...]:
        """Paths of other copies that are loaded in this process now."""
        copies = loaded_copies(self.vendor.pattern)
        return tuple(path for path in copies if not is_same_file(path, self.path))

    def has(self, name: str) -> bool:
        """Return whether this copy has a function of the table."""
        return name in self._present

    def notes(self) -> list[str]:
        """Return what a user should know about this copy and the environment: sentences."""
        found = []
        if others := self.others:
            found.append(
                f"this process has {len(others) + 1} copies of {self.vendor.name}: {self.path}, "
                f"which gpucoll uses ({self.reason}), and {', '.join(others)}. Communicators and "
                "registered memory of one are nothing to the other; install one version only"
            )
        wanted = config.variable(self.vendor.variable)
        if wanted and not is_same_file(wanted, self.path):
            found.append(
                f"{self.vendor.variable}={wanted} was not followed, since {self.reason}: "
                f"{self.path}. Preload the wanted copy, or import gpucoll first"
            )
        for variable, meaning in self.vendor.variables_to_mention.items():
            if value := config.variable(variable):
                found.append(f"{variable}={value}: {meaning}")
        for variable, meaning in self.vendor.variables_to_set.items():
            if config.variable(variable) != "1":
                found.append(f"{variable} is not set: {meaning}")
        return found

    # --- errors -----------------------------------------------------------------------------------

    def check(self, code: int, what: str, communicator: int = 0) -> None:
        """Raise the exception for a code; do nothing for success."""
        if code:
            raise self.error(code, what, communicator)

    def error(self, code: int, what: str, communicator: int = 0) -> GpucollError:
        """Return the exception for a code, with the library's own text; `what` names the call."""
        return self.vendor.errors.get(code, BackendError)(
            self._explanation(code, what, communicator)
        )

    def unavailable(self, code: int, what: str, communicator: int = 0) -> BackendUnavailableError:
        """Return the exception for a code while a communicator is made: it cannot serve here."""
        explanation = self._explanation(code, what, communicator)
        if reason := devices.unavailable(self.vendor.device_kind):
            explanation = f"{explanation}. {reason}"
        return BackendUnavailableError(explanation)

    def _explanation(self, code: int, what: str, communicator: int) -> str:
        functions = self.functions
        meaning = functions.ncclGetErrorString(code) or b"an error without a text"
        detail = functions.ncclGetLastError(communicator or None) or b""
        words = meaning.decode(errors="replace")
        if text := detail.decode(errors="replace").strip():
            words = f"{words}: {text}"
        return f"{what}: {words} (code {code} of {self})"

    # --- communicators ----------------------------------------------------------------------------

    def unique_id(self) -> bytes:
        """Return a new unique id: one rank makes it, and all ranks join with it."""
        made = self.vendor.unique_id()
        code = self.functions.ncclGetUniqueId(ctypes.byref(made))
        if code:
            raise self.unavailable(code, "ncclGetUniqueId")
        return bytes(made)

    def async_error(self, communicator: int) -> int:
        """Return the code of an error on a communicator, or 0, or `IN_PROGRESS`."""
        found = ctypes.c_int()
        code = self.functions.ncclCommGetAsyncError(communicator, ctypes.byref(found))
        return code or found.value


def _path_of(vendor: Vendor, name: str) -> str:
    """Return the path of a library that was opened by a path or by a name for the loader."""
    if os.path.sep in name:
        return name
    return next(
        (path for path in loaded_copies(vendor.pattern) if os.path.basename(path).startswith(name)),
        name,
    )


def _version_of(vendor: Vendor, candidate: Candidate, bound: dict[str, Any]) -> Version:
    """Return the version that the library reports: major * 10000 + minor * 100 + patch."""
    value = ctypes.c_int()
    if "ncclGetVersion" not in bound or bound["ncclGetVersion"](ctypes.byref(value)):
        raise BackendUnavailableError(
            f"{candidate.path} ({candidate.reason}) does not tell its version: it is no "
            f"{vendor.name}"
        )
    code = value.value
    if code < 10_000:  # up to 2.8: major * 1000
        return code // 1000, code // 100 % 10, code % 100
    return code // 10_000, code // 100 % 100, code % 100


# --- finding a copy -------------------------------------------------------------------------------


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
    return find(VENDORS[vendor_name])


def find(vendor: Vendor) -> Library:
    """Return the first copy of a vendor's library; raise as `load` does."""
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
