"""Doubles of NCCL, RCCL, the GPU drivers and their compilers: real libraries with the real names.

They work over host memory; what is compiled for a GPU is host code, which the driver's double runs.

Compiled with the system's C compiler when a test first asks for one; without a compiler those tests
are skipped. What they do is said at the head of ``nccl_double.c``, ``device_double.c`` and
``rtc_double.c``.

>>> def function(seat, double):                 # in a rank
...     control = double.load()                 # from here on gpucoll finds them
...     control.fail_at(3, code=1, function="ncclAllReduce")
>>> double = doubles.double("nccl")             # the fixture `doubles`, in pytest's process
>>> gpu_ranks.call(2, function, double, gives="seat", environment=double.variables)
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpucoll import config

__all__ = ["CUDA", "HIP", "HIPRTC", "NVRTC", "Builder", "Control", "Double", "Graph", "run_python"]

SOURCES = Path(__file__).resolve().parent
OPTIONS = ("-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-shared", "-fPIC")


class Builder:
    """Compiles doubles into a folder, each variant once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._compiler = shutil.which(os.environ.get("CC", "cc"))
        self._made: dict[tuple[str, ...], Path] = {}

    def double(self, vendor: str = "nccl", without: Sequence[str] = ()) -> Double:
        """Return the doubles of a vendor's library and driver.

        Parameters
        ----------
        vendor : str
            ``"nccl"`` or ``"rccl"``.
        without : sequence of str
            Functions that the library lacks. RCCL's always lacks ncclAlltoAll, which is spelled
            ncclAllToAll there.
        """
        defines = [f"-DWITHOUT_{name}" for name in without]
        if vendor == "rccl":
            library = self._compile(
                "nccl_double.c", "librccl.so.1", "-DRCCL", "-DWITHOUT_ncclAlltoAll", *defines
            )
            driver = self._compile("device_double.c", HIP, "-DHIP")
            return Double(vendor, library, driver, self._rtc(HIPRTC, "-DHIP"))
        library = self._compile("nccl_double.c", "libnccl.so.2", *defines)
        return Double(vendor, library, self._compile("device_double.c", CUDA), self._rtc(NVRTC))

    def mpi(self, **says: int) -> Path:
        """Return an MPI that says, and does, nothing but this: ``mpi(cuda=1, rocm=0)``."""
        defines = [f"-D{kind.upper()}_SUPPORT={value}" for kind, value in says.items()]
        return self._compile("mpi_double.c", "libmpi_says.so.1", *defines)

    def oneccl(self, *defines: str) -> Path:
        """Return oneCCL's double, for one rank; ``oneccl_double.c`` says what it does."""
        return self._compile("oneccl_double.c", "libccl.so.2", *defines)

    def _rtc(self, soname: str, *defines: str) -> Path | None:
        """Return the compiler's double; None without a C++ compiler behind it."""
        found = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
        if found is None:
            return None
        source = (SOURCES / "rtc_double.c").read_bytes() + found.encode()
        version = f"-DVERSION_MINOR={zlib.crc32(source) % 10**6}"
        return self._compile("rtc_double.c", soname, f'-DCXX_COMPILER="{found}"', version, *defines)

    def _compile(self, source: str, soname: str, *defines: str) -> Path:
        if self._compiler is None:
            pytest.skip("no C compiler (cc) for the doubles of NCCL and the GPU drivers")
        key = (source, soname, *defines)
        if key not in self._made:
            path = self._folder / f"{len(self._made)}" / soname
            path.parent.mkdir(parents=True)
            command = [self._compiler, *OPTIONS, *defines, f"-Wl,-soname,{soname}", "-o", str(path)]
            # -Bsymbolic: CUDA's and HIP's double have functions of the same name.
            command += [
                "-fvisibility=hidden",
                "-Wl,-Bsymbolic",
                str(SOURCES / source),
                "-pthread",
                "-lm",
                "-ldl",
            ]
            made = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert made.returncode == 0, f"{' '.join(command)}\n{made.stderr}"
            self._made[key] = path
        return self._made[key]


CUDA = "libcuda.so.1"
HIP = "libamdhip64.so.6"
NVRTC = "libnvrtc.so.12"
HIPRTC = "libhiprtc.so.6"


@dataclass(frozen=True)
class Double:
    """A library and its driver, compiled; can be sent to other processes."""

    vendor: str
    library: Path
    driver: Path
    rtc: Path | None = None
    """The compiler of kernels; None where the system has no C++ compiler for it."""

    @property
    def kind(self) -> str:
        """Kind of the devices, as in a Buffer's ``device``."""
        return "cuda" if self.vendor == "nccl" else "rocm"

    @property
    def variables(self) -> dict[str, str]:
        """The environment in which gpucoll takes these for the real ones, once they are loaded."""
        variable = config.NCCL_LIBRARY if self.vendor == "nccl" else config.RCCL_LIBRARY
        compiler = config.NVRTC_LIBRARY if self.vendor == "nccl" else config.HIPRTC_LIBRARY
        found = {} if self.rtc is None else {compiler: str(self.rtc)}
        return {variable: str(self.library), config.CPU_ONLY: "0", **found}

    @property
    def search_path(self) -> dict[str, str]:
        """The environment in which the loader of a new process finds them by their names."""
        return {"LD_LIBRARY_PATH": f"{self.library.parent}:{self.driver.parent}"}

    def load(self) -> Control:
        """Load both into this process, where they stay: only in processes of the test's own."""
        return Control(self)


class Control:
    """The settings of doubles that this process has loaded."""

    def __init__(self, double: Double) -> None:
        self.double = double
        self._rtc: Any = None
        self.driver: Any = ctypes.CDLL(str(double.driver), mode=ctypes.RTLD_GLOBAL)
        self.library: Any = ctypes.CDLL(str(double.library))
        names = self.library.ncclDoubleCalls, self.library.ncclDoubleGet, self.driver.double_get
        for function in names:
            function.restype, function.argtypes = ctypes.c_long, [ctypes.c_char_p]
        for name in ("ncclDoubleRegistrations", "ncclDoubleCommunicators"):
            self.library[name].restype = ctypes.c_long
        for function in (self.library.ncclDoubleSet, self.driver.double_set):
            function.argtypes = [ctypes.c_char_p, ctypes.c_long]
        self.library.ncclDoubleFailAt.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
        self.driver.double_trace.restype = ctypes.c_char_p
        self.driver.double_disturbance.restype = ctypes.c_char_p
        self.driver.double_capture_begin.argtypes = [ctypes.c_void_p]
        self.driver.double_capture_end.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)]
        self.driver.double_graph_launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.driver.double_graph_destroy.argtypes = [ctypes.c_void_p]

    # --- the library ------------------------------------------------------------------------------

    @contextmanager
    def library_set(self, **values: int) -> Iterator[None]:
        """Change settings of the library for a while; ``nccl_ranks.h`` lists them."""
        before = {key: self.library.ncclDoubleGet(key.encode()) for key in values}
        for key, value in values.items():
            assert self.library.ncclDoubleSet(key.encode(), value) == 0, key
        try:
            yield
        finally:
            for key, value in before.items():
                self.library.ncclDoubleSet(key.encode(), value)

    def fail_at(self, call: int, code: int, function: str = "") -> None:
        """Have the how-manieth call from now on fail, of one function or of all; 0: none."""
        self.library.ncclDoubleFailAt(function.encode(), call, code)

    def calls(self, function: str) -> int:
        """Return how often this process called a function."""
        return int(self.library.ncclDoubleCalls(function.encode()))

    @property
    def registrations(self) -> int:
        """How many buffers and windows are registered in this process."""
        return int(self.library.ncclDoubleRegistrations())

    @property
    def communicators(self) -> int:
        """How many communicators of this process were neither destroyed nor aborted."""
        return int(self.library.ncclDoubleCommunicators())

    # --- the compiler -----------------------------------------------------------------------------

    @property
    def rtc(self) -> Any:
        """The compiler of kernels, loaded: ``double_rtc_set``, ``double_rtc_get``."""
        if self._rtc is None:
            if self.double.rtc is None:
                pytest.skip(
                    "no C++ compiler (g++, clang++) for the double of the kernels' compiler"
                )
            self._rtc = ctypes.CDLL(str(self.double.rtc))
            self._rtc.double_rtc_get.restype = ctypes.c_long
        return self._rtc

    @property
    def compilations(self) -> int:
        """How often this process has compiled kernels."""
        return int(self.rtc.double_rtc_get(b"compilations"))

    # --- the driver -------------------------------------------------------------------------------

    def driver_set(self, key: str, value: int) -> None:
        """Change a setting of the driver; ``device_state.h`` lists them."""
        assert self.driver.double_set(key.encode(), value) == 0, key

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no stream of this process go on within the block: what is enqueued waits."""
        self.driver_set("hold", 1)
        try:
            yield
        finally:
            self.driver_set("hold", 0)

    @contextmanager
    def driver_calls(self) -> Iterator[list[tuple[str, list[int]]]]:
        """Give the list of calls of the driver within the block, in order, when it is over.

        Each with its numbers; those that ``device_double.c`` notes. Not more than 64 KiB of text.
        """
        calls: list[tuple[str, list[int]]] = []
        self.driver_set("trace", 1)
        try:
            yield calls
        finally:
            self.driver_set("trace", 0)
            for line in self.driver.double_trace().decode().splitlines():
                name, *numbers = line.split()
                calls.append((name, [int(number) for number in numbers]))

    def count(self, what: str) -> int:
        """Return how many ``streams``, ``events`` or ``modules`` there are.

        Or how many bytes of ``memory`` are in use, or how many ``launches`` there were.
        """
        return int(self.driver.double_get(what.encode()))

    @contextmanager
    def captured(self, stream: int) -> Iterator[Graph]:
        """Capture what the block enqueues on a stream, and whatever that stream draws in."""
        graph = Graph(self.driver)
        gc.collect()  # what other tests have left would be freed meanwhile, which ends a capture
        assert self.driver.double_capture_begin(stream) == 0
        try:
            yield graph
        finally:
            handle = ctypes.c_void_p()
            graph.code = self.driver.double_capture_end(stream, ctypes.byref(handle))
            graph.handle = handle.value or 0


class Graph:
    """What was captured; `code` says whether that went well, 0 or the driver's code."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.handle = 0
        self.code = 0

    def launch(self, stream: Any) -> None:
        """Enqueue it all once more, on a stream or what has its number as `ptr`."""
        by = self._driver.double_disturbance().decode()
        assert self.handle, f"nothing was captured: code {self.code}, ended last by {by or 'none'}"
        number = getattr(stream, "ptr", stream)
        assert self._driver.double_graph_launch(self.handle, number) == 0

    def close(self) -> None:
        """Let go of it."""
        if self.handle:
            self._driver.double_graph_destroy(self.handle)
            self.handle = 0


def run_python(code: str, **variables: str) -> str:
    """Run code in a new Python process with variables set; return what it printed."""
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
