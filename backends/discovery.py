"""Find the kind of GPU that a process may have, without loading anything: by files in ``/dev``."""

from __future__ import annotations

from pathlib import Path

from gpucoll import config
from gpucoll.backends.choice import VENDOR_BACKENDS, Seen
from gpucoll.errors import ArgumentError
from gpucoll.topology.cpus import FILE_SYSTEM, read_text

_DEVICE_FILES = {"cuda": ("dev/nvidiactl", "dev/dxg", "dev/nvhost-ctrl-gpu"), "rocm": ("dev/kfd",)}
_DRIVERS = {"cuda": "/libcuda.so", "rocm": "/libamdhip64.so"}
_INTEL = "0x8086"
"""Intel's number among the makers of PCI devices."""


def look_for_gpus(root: Path = FILE_SYSTEM) -> Seen:
    """Return the kind of GPU that this process may have, and how that was found out.

    The drivers are not loaded: that takes a second on large machines, and afterwards forked
    children of the process cannot use the GPU. So a GPU that is found here may still be unusable;
    the first call on GPU arrays finds that out.
    """
    if config.cpu_only():
        return Seen("", f"{config.CPU_ONLY} keeps this process to the CPU")
    if config.uses_host_devices():
        return Seen("host", f"{config.DEVICE}=host")
    if kind := config.variable(config.GPU_KIND):
        if kind not in VENDOR_BACKENDS:
            known = ", ".join(VENDOR_BACKENDS)
            raise ArgumentError(f"{config.GPU_KIND} must be one of {known}, but is {kind!r}")
        return Seen(kind, f"{config.GPU_KIND}={kind}")
    for kind, names in _DEVICE_FILES.items():
        for name in names:
            if (root / name).exists():
                return Seen(kind, f"there is {FILE_SYSTEM / name}")
    if found := _render_node_of_intel(root):
        return Seen("sycl", f"there is {FILE_SYSTEM / found}, of an Intel GPU")
    loaded = _maps(root)
    for kind, name in _DRIVERS.items():
        if name in loaded:
            return Seen(kind, "its driver is in the process already")
    return Seen("", "there are no device files of NVIDIA's, AMD's or Intel's driver")


def _render_node_of_intel(root: Path) -> str:
    """Return the device file of an Intel GPU, relative to the root; empty if there is none.

    Every vendor's driver makes such files, so sysfs tells whose they are.
    """
    for folder in sorted((root / "sys/class/drm").glob("renderD*")):
        node = f"dev/dri/{folder.name}"
        if read_text(folder / "device/vendor").strip() == _INTEL and (root / node).exists():
            return node
    return ""


def _maps(root: Path) -> str:
    """Return the list of files that are mapped into this process; empty without ``/proc``."""
    try:
        return (root / "proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
