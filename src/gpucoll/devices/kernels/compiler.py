"""NVRTC and hipRTC: the vendors' compilers as libraries. Neither needs a GPU or a driver."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpucoll import config
from gpucoll.devices.foreign_library import (
    Prototype,
    bind,
    files_of_wheels,
    loaded_copies,
    open_library,
)
from gpucoll.errors import BackendError, BackendUnavailableError
from gpucoll.hashing import blake2b

_PROGRAM = POINTER(c_void_p)
_TEXTS = POINTER(c_char_p)
_SIZE = POINTER(c_size_t)
_NAMES = {
    "version": "Version",
    "error_string": "GetErrorString",
    "create": "CreateProgram",
    "destroy": "DestroyProgram",
    "compile": "CompileProgram",
    "log_size": "GetProgramLogSize",
    "log": "GetProgramLog",
}
PROTOTYPES: Final = (
    Prototype("version", (POINTER(c_int), POINTER(c_int))),
    Prototype("error_string", (c_int,), c_char_p),
    Prototype("create", (_PROGRAM, c_char_p, c_char_p, c_int, _TEXTS, _TEXTS)),
    Prototype("destroy", (_PROGRAM,)),
    Prototype("compile", (c_void_p, c_int, _TEXTS)),
    Prototype("log_size", (c_void_p, _SIZE)),
    Prototype("log", (c_void_p, c_char_p)),
    Prototype("code_size", (c_void_p, _SIZE)),
    Prototype("code", (c_void_p, c_char_p)),
    Prototype("text_size", (c_void_p, _SIZE), since="NVRTC"),
    Prototype("text", (c_void_p, c_char_p), since="NVRTC"),
    Prototype("n_architectures", (POINTER(c_int),), since="NVRTC 11.2"),
    Prototype("architectures", (POINTER(c_int),), since="NVRTC 11.2"),
)
"""Both libraries have the same functions under different names; NVRTC has a few more."""
_LOG_CHARACTERS: Final = 4000


class Vendor(NamedTuple):
    """The differences between the compilers."""

    kind: str
    """The kind of devices."""
    name: str
    variable: str
    """The environment variable that names a copy."""
    symbols: Mapping[str, Sequence[str]]
    options: tuple[str, ...]
    """No operation is contracted: each is rounded separately, as on the CPU."""
    target_option: str
    remedy: str
    """What to do if there is none."""


def _symbols(prefix: str, **more: str) -> dict[str, tuple[str, ...]]:
    return {name: (prefix + ending,) for name, ending in {**_NAMES, **more}.items()}


VENDORS: Final = {
    "cuda": Vendor(
        kind="cuda",
        name="NVRTC",
        variable=config.NVRTC_LIBRARY,
        symbols=_symbols(
            "nvrtc",
            code_size="GetCUBINSize",
            code="GetCUBIN",
            text_size="GetPTXSize",
            text="GetPTX",
            n_architectures="GetNumSupportedArchs",
            architectures="GetSupportedArchs",
        ),
        options=("-std=c++17", "--fmad=false"),
        target_option="--gpu-architecture=",
        remedy="It comes with PyTorch, with the CUDA toolkit, and by itself: pip install "
        "nvidia-cuda-nvrtc-cu12 (CUDA 12) or nvidia-cuda-nvrtc (CUDA 13); or name a libnvrtc in "
        + config.NVRTC_LIBRARY,
    ),
    "rocm": Vendor(
        kind="rocm",
        name="hipRTC",
        variable=config.HIPRTC_LIBRARY,
        symbols=_symbols("hiprtc", code_size="GetCodeSize", code="GetCode"),
        options=("-std=c++17", "-ffp-contract=off"),
        target_option="--offload-arch=",
        remedy="It comes with ROCm and with PyTorch for ROCm; or name a libhiprtc in "
        + config.HIPRTC_LIBRARY,
    ),
}


def kind_of(target: str) -> str:
    """Return the kind of devices of a target: ``sm_90`` is for CUDA, ``gfx942`` for AMD."""
    return "cuda" if target.startswith("sm_") else "rocm"


class Compiler:
    """One copy of NVRTC or hipRTC.

    Attributes
    ----------
    path : str
        The path from which it was loaded.
    version : str
        The version that it reports: ``"12.9"``.
    identity : str
        A word that differs between copies that may generate different code.

    Raises
    ------
    BackendUnavailableError
        It cannot be loaded, or lacks functions.
    """

    def __init__(self, vendor: Vendor, path: str) -> None:
        self.vendor = vendor
        self.path = path
        try:
            library = open_library(path)
        except OSError as error:
            raise BackendUnavailableError(str(error)) from None
        self._functions = bind(library, PROTOTYPES, vendor.symbols)
        required = (row.name for row in PROTOTYPES if not row.since)
        if missing := [name for name in required if name not in self._functions]:
            symbols = ", ".join(vendor.symbols[name][0] for name in missing)
            raise BackendUnavailableError(f"{path} is no {vendor.name}, or too old: no {symbols}")
        major, minor = c_int(), c_int()
        self._functions["version"](ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"
        self.identity = self._identity()

    def __str__(self) -> str:
        return f"{self.vendor.name} {self.version} ({self.path})"

    def _identity(self) -> str:
        # hipRTC's version stayed 9.0 through many releases; its file name contains ROCm's version.
        real = os.path.realpath(self.path)
        try:
            about = f"{os.path.basename(real)} {os.stat(real).st_size}"
        except OSError:  # a name for the loader
            about = self.path
        digest = blake2b(f"{self.version} {about}".encode(), digest_size=4).hexdigest()
        return f"{self.vendor.name.lower()}-{self.version}-{digest}"

    @functools.cached_property
    def architectures(self) -> tuple[int, ...]:
        """NVIDIA's targets for which it makes machine code: 90 is sm_90. Empty if unknown."""
        count = c_int()
        if "architectures" not in self._functions:
            return ()
        self._check(self._functions["n_architectures"](ctypes.byref(count)), "say what it knows")
        numbers = (c_int * count.value)()
        self._check(self._functions["architectures"](numbers), "say what it knows")
        return tuple(sorted(numbers))

    def options(self, target: str) -> tuple[str, ...]:
        """Return the options for compiling kernels for a target."""
        return (*self.vendor.options, self.vendor.target_option + self._architecture(target))

    def _architecture(self, target: str) -> str:
        """Return the target; if it is newer than this NVRTC, the newest PTX that works for it."""
        number = re.fullmatch(r"sm_(\d+)", target)
        if not number or not self.architectures or int(number[1]) in self.architectures:
            return target
        older = [known for known in self.architectures if known < int(number[1])]
        if not older:
            raise BackendUnavailableError(
                f"{self} compiles for sm_{self.architectures[0]} and newer, not for {target}: use "
                "an older one"
            )
        return f"compute_{older[-1]}"

    def compile(self, source: str, target: str) -> bytes:
        """Return kernels as machine code for a target.

        For an NVIDIA GPU newer than this NVRTC it returns PTX, which the driver compiles.

        Raises
        ------
        BackendError
            The source does not compile; the compiler's text is in the message.
        """
        options = self.options(target)
        program = c_void_p()
        made = ctypes.byref(program), source.encode(), b"gpucoll", 0, None, None
        self._check(self._functions["create"](*made), "start")
        try:
            spelled = (c_char_p * len(options))(*(option.encode() for option in options))
            code = self._functions["compile"](program, len(options), spelled)
            if code:
                raise BackendError(
                    f"{self} cannot compile kernels for {target} ({' '.join(options)}): "
                    f"{self._text(code)}: {self._log(program)}"
                )
            is_text = options[-1].startswith(f"{self.vendor.target_option}compute_")
            return self._content(program, "text" if is_text else "code")
        finally:
            self._functions["destroy"](ctypes.byref(program))

    def _content(self, program: c_void_p, what: str) -> bytes:
        size = c_size_t()
        self._check(self._functions[f"{what}_size"](program, ctypes.byref(size)), "give its code")
        data = ctypes.create_string_buffer(size.value)
        self._check(self._functions[what](program, data), "give its code")
        return data.raw

    def _log(self, program: c_void_p) -> str:
        try:
            text = self._content(program, "log").rstrip(b"\0\n ").decode(errors="replace")
        except BackendError as error:
            return str(error)
        return text if len(text) <= _LOG_CHARACTERS else f"{text[:_LOG_CHARACTERS]} ..."

    def _check(self, code: int, what: str) -> None:
        if code:
            raise BackendError(f"{self} cannot {what}: {self._text(code)}")

    def _text(self, code: int) -> str:
        found: Any = self._functions["error_string"](code) or b"an error without a text"
        return f"{found.decode()} (code {code})"


@functools.cache
def compiler_of(kind: str, most_major: int = 0) -> Compiler:
    """Return the compiler for a kind of devices: the first copy that can be used.

    Parameters
    ----------
    kind : str
        ``"cuda"`` or ``"rocm"``.
    most_major : int
        Copies of later major versions come last, because their code may be too new for the driver.
        0: all versions are treated the same.

    Raises
    ------
    BackendUnavailableError
        There is none. The message lists what was tried, and what to install.
    """
    vendor = VENDORS[kind]
    if named := config.variable(vendor.variable):
        try:
            return Compiler(vendor, str(Path(named).absolute()))
        except BackendUnavailableError as error:
            raise BackendUnavailableError(
                f"{vendor.name}, which {vendor.variable} names, cannot be used: {error}"
            ) from None
    problems = []
    for path in candidates(kind, most_major):
        try:
            return Compiler(vendor, path)
        except BackendUnavailableError as error:
            problems.append(str(error))
    raise BackendUnavailableError(
        f"GPU kernels are compiled by {vendor.name}, which cannot be loaded: "
        f"{'; '.join(problems)}. {vendor.remedy}"
    )


# --- the places where copies are searched for -----------------------------------------------------


_WHEELS = {
    "cuda": ("nvidia/cu1[3-9]/lib/libnvrtc.so.1[3-9]", "nvidia/cuda_nvrtc/lib/libnvrtc.so.1[2-9]"),
    "rocm": ("_rocm_sdk_core/lib/libhiprtc.so.*",),
}
_FILE_NAMES = {
    "cuda": ("libnvrtc.so.13", "libnvrtc.so.12"),
    "rocm": ("libhiprtc.so.7", "libhiprtc.so.6"),
}
"""For the loader, which searches the system's folders, and those of LD_LIBRARY_PATH."""
_VARIABLES = {
    "cuda": ((config.CUDA_PATH, "lib64"), (config.CUDA_HOME, "lib64")),
    "rocm": ((config.ROCM_PATH, "lib"),),
}
"""The variables with the toolkit's location, and the folder in it."""
_FOLDERS = {"cuda": (f"{sys.prefix}/lib", "/usr/local/cuda/lib64"), "rocm": ("/opt/rocm/lib",)}
"""The folders of a conda environment in which the vendor's own packages put their copies."""


def candidates(kind: str, most_major: int = 0) -> list[str]:
    """Return the paths and names of copies that might exist, the best one first.

    A copy that is already in the process, such as PyTorch's or CuPy's, comes first. AMD's is
    searched for next to the HIP runtime in use, because they belong together.
    """
    found = dict.fromkeys(_all(kind))
    if not most_major:
        return list(found)
    return sorted(found, key=lambda path: _major(path) > most_major)


def _all(kind: str) -> Iterator[str]:
    stem = _FILE_NAMES[kind][0].partition(".so")[0]
    yield from loaded_copies(rf"{stem}\.so.*")
    if kind == "rocm":
        for runtime in loaded_copies(r"libamdhip64\.so.*"):
            yield from sorted(map(str, Path(runtime).parent.glob(f"{stem}.so*")))
    yield from files_of_wheels(_WHEELS[kind])
    named = [(config.variable(name), lib) for name, lib in _VARIABLES[kind]]
    for folder in [str(Path(root) / lib) for root, lib in named if root]:
        yield from (str(Path(folder) / name) for name in _FILE_NAMES[kind])
    yield from _FILE_NAMES[kind]
    for folder in _FOLDERS[kind]:
        yield from (str(Path(folder) / name) for name in _FILE_NAMES[kind])


def _major(path: str) -> int:
    found = re.search(r"\.so\.(\d+)", path)
    return int(found[1]) if found else 0
