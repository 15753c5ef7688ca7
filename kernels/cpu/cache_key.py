"""The name under which compiled loops are kept: of all that their machine code depends on."""

from __future__ import annotations

import functools
import hashlib
import platform
from importlib import metadata
from pathlib import Path

from gpucoll import config

__all__ = ["COMPILED_FOLDERS", "key", "processor"]

_PACKAGE = Path(config.__file__).parent
COMPILED_FOLDERS = (
    "kernels/cpu",
    "transport/shared",
    "memory",
    "entries",
    "group/host",
    "backends/cpu/host",
    "backends/gpu",
)
"""Where compiled functions are, below the package."""
_FURTHER_SOURCES = ("types.py", "arrays/numpy_struct.py")
_ABOUT_PROCESSOR = {
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),  # x86
    *("features", "cpu implementer", "cpu variant", "cpu part"),  # Arm
    *("cpu", "isa", "uarch"),  # others
}


@functools.cache
def key() -> str:
    """Return the name of these loops: of the sources, what compiles them, and the processor.

    Neither the place of the package nor the age of its files counts, so that the virtual
    environments of a user share what is compiled.
    """
    digest = hashlib.sha256()
    for file in _source_files():
        digest.update(str(file.relative_to(_PACKAGE)).encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    versions = [metadata.version(name) for name in ("numba", "llvmlite", "numpy")]
    python = f"{platform.python_implementation()} {platform.python_version()}"
    for text in (*versions, python, processor(), config.code_settings()):
        digest.update(text.encode() + b"\0")
    return f"loops-{digest.hexdigest()[:16]}"


def _source_files() -> list[Path]:
    files = [file for name in COMPILED_FOLDERS for file in (_PACKAGE / name).glob("*.py")]
    return sorted(files) + [_PACKAGE / name for name in _FURTHER_SOURCES]


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return what machine code depends on: the first processor's model and features.

    It says nothing of how fast it runs just now, or how many there are.
    """
    lines: list[str] = []
    try:
        with open(cpuinfo, encoding="utf-8", errors="replace") as file:
            for line in file:  # the kernel writes one processor at a time: the first is cheap
                name, _, value = line.partition(":")
                if not line.strip() and lines:
                    break
                if name.strip().lower() in _ABOUT_PROCESSOR:
                    lines.append(f"{name.strip()}={' '.join(sorted(value.split()))}")
    except OSError:
        lines = []
    return "\n".join([platform.machine(), *(lines or [platform.processor()])])
