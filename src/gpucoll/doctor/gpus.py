"""Probe GPUs and load their drivers. Runs only in a separate process."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import cast

from gpucoll import config, devices
from gpucoll.backends.discovery import look_for_gpus
from gpucoll.devices.driver import Driver, DriverDevice
from gpucoll.devices.kernels.compiler import compiler_of
from gpucoll.doctor.facts import DriverFound, GpuFound, Gpus
from gpucoll.errors import BackendUnavailableError
from gpucoll.topology.cpus import FILE_SYSTEM, read_text

__all__ = ["VENDORS", "gpus"]

VENDORS = {"cuda": "nvidia", "rocm": "amd"}
"""Kind of device -> vendor."""


def gpus(root: Path = FILE_SYSTEM) -> Gpus:
    """Return the drivers of both vendors, and the GPUs that they offer to this process."""
    found = [gpu for kind in VENDORS for gpu in devices_of(kind)]
    seen = look_for_gpus(root)
    return Gpus(
        kind=seen.kind,
        kind_reason=seen.reason,
        may_share=config.variable(config.NCCL_MULTI_RANK_GPU_ENABLE) == "1",
        drivers=[_driver_found(kind, root) for kind in VENDORS],
        devices=found,
        visible_devices=config.visible_devices(),
    )


def devices_of(kind: str) -> list[GpuFound]:
    """Return the GPUs of one kind as the driver reports them; none if it does not start."""
    return [_device(kind, number) for number in range(devices.device_count(kind))]


def _load(kind: str) -> Driver:
    """Return a driver that `devices.unavailable` has found to work."""
    return cast(Driver, importlib.import_module(devices.KINDS[kind]).load())


def _device(kind: str, number: int) -> GpuFound:
    # `devices.open_device` would make a context, which takes memory on each GPU.
    device = DriverDevice(_load(kind), number)
    identity = device.identity
    major, minor = (device.attribute(f"compute_capability_{part}") for part in ("major", "minor"))
    is_cuda = kind == "cuda" and major is not None
    return GpuFound(
        vendor=VENDORS[kind],
        number=number,
        name=identity.name,
        uuid=identity.uuid,
        pci_address=identity.pci_bus_id,
        architecture=f"sm_{major}{minor}" if is_cuda else None,
        gpu_direct_rdma=_yes(device.attribute("gpu_direct_rdma")),
        dma_buf=_yes(device.attribute("dma_buf")),
        stream_wait_value=_yes(device.attribute("stream_wait_value")),
    )


def _yes(value: int | None) -> bool | None:
    return None if value is None else value != 0


def _driver_found(kind: str, root: Path) -> DriverFound:
    problem = devices.unavailable(kind)
    module, is_open = kernel_module(kind, root)
    compiler, compiler_problem = (None, None) if problem else _compiler(kind)
    return DriverFound(
        vendor=VENDORS[kind],
        kernel_module=module,
        is_open=is_open,
        interface=None if problem else _interface(kind),
        toolkit=toolkit(kind, root),
        problem=problem or None,
        compiler=compiler,
        compiler_problem=compiler_problem,
    )


def _compiler(kind: str) -> tuple[str | None, str | None]:
    """Return the copy of NVRTC or hipRTC that compiles the GPU's kernels, or why there is none."""
    most_major = int((_interface(kind)).partition(".")[0]) if kind == "cuda" else 0
    try:
        found = compiler_of(kind, most_major)
    except BackendUnavailableError as error:
        return None, str(error)
    return f"{found.vendor.name} {found.version} ({found.path})", None


def _interface(kind: str) -> str:
    """Return the version of CUDA or HIP that the driver supports."""
    version = _load(kind).number("driver_version")
    major, minor = (1000, 10) if kind == "cuda" else (10_000_000, 100_000)
    return f"{version // major}.{version % major // minor}"


def kernel_module(kind: str, root: Path = FILE_SYSTEM) -> tuple[str | None, bool | None]:
    """Return the version of the kernel module, and whether it is the open one (NVIDIA)."""
    if kind == "rocm":
        if version := read_text(root / "sys/module/amdgpu/version").strip():
            return version, True
        is_there = (root / "sys/module/amdgpu").is_dir()
        return ("part of the kernel", True) if is_there else (None, None)
    text = read_text(root / "proc/driver/nvidia/version")
    match = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", text)
    return (match[1], "Open Kernel Module" in text) if match else (None, None)


def toolkit(kind: str, root: Path = FILE_SYSTEM) -> str | None:
    """Return the version of an installed CUDA toolkit or ROCm; gpucoll needs neither."""
    if kind == "rocm":
        return read_text(root / "opt/rocm/.info/version").strip() or None
    try:
        return str(json.loads(read_text(root / "usr/local/cuda/version.json"))["cuda"]["version"])
    except (KeyError, TypeError, ValueError):
        return None
