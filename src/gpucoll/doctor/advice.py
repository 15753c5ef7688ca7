"""What is missing or wrong, and the exact command that helps, as pure functions of the facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpucoll import config
from gpucoll.doctor.choice import LIBRARIES, VENDOR_NAMES, used_library
from gpucoll.doctor.facts import Advice, DriverFound, LibraryFound, Package, Report

__all__ = ["NEEDED", "advise", "cuda_extra"]

NEEDED = ("NumPy", "Numba")
"""Packages without which nothing works."""
CUDA_EXTRAS = ((13, "cuda13"), (12, "cuda12"))
"""The driver's version of CUDA from which on an extra fits."""
OLDEST_CUDA_DRIVER = "525"
SMALL_SHM_BYTES = 256 << 20


def advise(report: Report) -> list[Advice]:
    """Return the advice, most important first, without advice whose command another one has."""
    found = [*_cpu_path(report), *_gpus(report), *_packages(report), *_rdma(report)]
    by_command = {advice["command"] or advice["why"]: advice for advice in reversed(found)}
    return [advice for advice in found if by_command[advice["command"] or advice["why"]] is advice]


def _advice(what: str, why: str, command: str | None = None) -> Advice:
    return Advice(what=what, why=why, command=command)


def cuda_extra(driver: DriverFound | None) -> str | None:
    """Return gpucoll's extra that fits an NVIDIA driver; None if the driver is too old."""
    interface = (driver["interface"] if driver else None) or ""
    major = interface.partition(".")[0]
    if not major.isdecimal():
        return None
    return next((extra for least, extra in CUDA_EXTRAS if int(major) >= least), None)


# --- the CPU path -------------------------------------------------------------------------------


def _cpu_path(report: Report) -> Iterator[Advice]:
    memory, test, cpus = report["memory"], report["self_test"], report["cpus"]
    for package in report["packages"] or ():
        if package["name"] in NEEDED and package["version"] is None:
            name = package["name"]
            yield _advice(
                name, "gpucoll needs it, but it is not installed", f"pip install {name.lower()}"
            )
    if memory is not None:
        if problem := memory["shared_memory_problem"]:
            yield _advice(
                "shared memory",
                f"a communicator cannot allocate its segment: {problem}",
                "docker run --shm-size=1g ..." if memory["memfd_problem"] else None,
            )
        elif memory["memfd_problem"] and (memory["dev_shm_bytes"] or 0) < SMALL_SHM_BYTES:
            yield _advice(
                "shared memory",
                f"memfd_create is forbidden ({memory['memfd_problem']}), and /dev/shm is small or "
                "missing: segments become files on disk",
                "docker run --shm-size=1g ...",
            )
    if test is not None and test["single_copy"] is False:
        yield _single_copy(memory["ptrace_scope"] if memory else None)
    if cpus is not None and cpus["quota"] is not None and cpus["quota"] < cpus["usable_count"]:
        yield _advice(
            "CPU quota",
            f"{cpus['usable_count']} CPUs are visible, but their time is limited to "
            f"{cpus['quota']:g}, so ranks are throttled; more than {cpus['ranks_at_once']} ranks "
            "share CPUs",
            f"docker run --cpus={cpus['usable_count']} ...",
        )


def _single_copy(scope: int | None) -> Advice:
    """Explain how to let ranks read each other's memory; without it, messages are copied twice."""
    why = (
        "ranks may not read each other's memory (process_vm_readv): large messages are copied twice"
    )
    if scope:
        return _advice(
            "single copy",
            f"{why}; kernel.yama.ptrace_scope is {scope}. The value 0 lets every process of a "
            "user read the others' memory: weigh the risk",
            "sudo sysctl kernel.yama.ptrace_scope=0",
        )
    return _advice("single copy", why, "docker run --cap-add SYS_PTRACE ...")


# --- GPUs and their libraries -------------------------------------------------------------------


def _gpus(report: Report) -> Iterator[Advice]:
    found = report["gpus"]
    if found is None:
        return
    present = {gpu["vendor"] for gpu in (report["topology"] or {"gpus": []})["gpus"]}
    for driver in found["drivers"]:
        vendor = driver["vendor"]
        devices = [device for device in found["devices"] if device["vendor"] == vendor]
        if devices:
            yield from _library(vendor, driver, report)
        # If there are GPUs of one vendor, one of the other is usually the processor's own graphics.
        elif not found["devices"] and (driver["kernel_module"] or vendor in present):
            yield _no_gpu(vendor, driver, found["visible_devices"])


def _no_gpu(vendor: str, driver: DriverFound, visible: Mapping[str, str]) -> Advice:
    """Advise on a machine with a GPU that this process cannot use."""
    what = f"{VENDOR_NAMES[vendor]} GPUs"
    why = f"the machine has GPUs, but this process cannot use them: {driver['problem']}"
    if config.CPU_ONLY in (driver["problem"] or ""):
        return _advice(what, why, f"unset {config.CPU_ONLY}")
    names = {
        "nvidia": (config.CUDA_VISIBLE_DEVICES,),
        "amd": (
            config.ROCR_VISIBLE_DEVICES,
            config.HIP_VISIBLE_DEVICES,
            config.CUDA_VISIBLE_DEVICES,
        ),
    }[vendor]
    for name in names:
        if name in visible:
            hidden = f"the machine has GPUs; {name}={visible[name]!r} may hide them"
            return _advice(what, hidden, f"unset {name}")
    if not driver["kernel_module"]:
        name = "NVIDIA's driver" if vendor == "nvidia" else "the module amdgpu"
        return _advice(what, f"{why}. The kernel has not loaded {name}")
    command = {
        "nvidia": "docker run --gpus all ...",
        "amd": "docker run --device /dev/kfd --device /dev/dri ...",
    }[vendor]
    return _advice(what, why, command)


def _library(vendor: str, driver: DriverFound, report: Report) -> Iterator[Advice]:
    name = LIBRARIES[vendor]
    copies = [copy for copy in report["libraries"] or () if copy["name"] == name]
    packages = report["packages"] or []
    wheels = [x["distribution"] or "" for x in _installed(packages, "NCCL wheel")]
    if vendor == "nvidia" and cuda_extra(driver) is None:
        yield _advice(
            "NVIDIA driver",
            f"it supports CUDA {driver['interface']}, but the wheels need 12 or newer: install "
            f"driver {OLDEST_CUDA_DRIVER} or newer from your distribution",
        )
    if report["libraries"] is not None and used_library(vendor, copies) is None:
        yield _missing_library(vendor, name, driver, packages, copies)
    elif vendor == "nvidia":
        yield from _wrong_wheel(driver, wheels)
    if len(wheels) > 1:
        yield _advice(
            "NCCL wheels",
            f"{' and '.join(wheels)} overwrite each other's files",
            f"pip uninstall -y {' '.join(wheels)} && pip install {_nccl_wheel(driver)}",
        )
    versions = {copy["version"] for copy in copies if copy["problem"] is None}
    if len(versions) > 1:
        yield _two_versions(name, copies)


def _missing_library(
    vendor: str,
    name: str,
    driver: DriverFound,
    packages: Sequence[Package],
    copies: Sequence[LibraryFound],
) -> Advice:
    refused = next((copy for copy in copies if copy["problem"]), None)
    why = (
        f"{refused['path']} ({refused['source']}) cannot be used: {refused['problem']}"
        if refused
        else f"it is needed for GPU arrays, but was not found ({_where(vendor)})"
    )
    if vendor == "amd":
        return _advice(name, why, "sudo apt install rccl")
    has_torch = any((x["built_for"] or "").startswith("CUDA") for x in packages)
    if has_torch or _installed(packages, "CuPy"):
        return _advice(name, why, f"pip install {_nccl_wheel(driver)}")
    extra = cuda_extra(driver)
    return _advice(name, why, f"pip install 'gpucoll[{extra}]'" if extra else None)


def _where(vendor: str) -> str:
    variable = config.NCCL_LIBRARY if vendor == "nvidia" else config.RCCL_LIBRARY
    return f"{variable} is not set, there is no wheel, and the loader does not find it"


def _nccl_wheel(driver: DriverFound) -> str:
    return f"nvidia-nccl-{(cuda_extra(driver) or 'cuda12').replace('cuda', 'cu')}"


def _wrong_wheel(driver: DriverFound, wheels: Sequence[str]) -> Iterator[Advice]:
    """Report if the only wheel is for a newer CUDA than the driver supports."""
    extra = cuda_extra(driver)
    if extra and wheels == ["nvidia-nccl-cu13"] and extra != "cuda13":
        yield _advice(
            "NCCL wheel",
            "nvidia-nccl-cu13 needs a driver that supports CUDA 13, but this one supports "
            f"{driver['interface']}",
            f"pip uninstall -y nvidia-nccl-cu13 && pip install {_nccl_wheel(driver)}",
        )


def _two_versions(name: str, copies: Sequence[LibraryFound]) -> Advice:
    listed = ", ".join(
        f"{copy['version']} ({copy['path']}{', used' if copy['is_used'] else ''})"
        for copy in copies
        if copy["problem"] is None
    )
    return _advice(
        f"two copies of {name}",
        f"{listed}: if another library loads the other copy into the same process, neither copy "
        "accepts the other's communicators and registered memory. gpucoll uses the copy that is "
        "loaded first; keep one version",
    )


# --- packages, RDMA -----------------------------------------------------------------------------


def _installed(packages: Sequence[Package], name: str) -> list[Package]:
    return [x for x in packages if x["name"] == name and x["distribution"] is not None]


def _packages(report: Report) -> Iterator[Advice]:
    packages, found = report["packages"], report["gpus"]
    if packages is None or found is None:
        return
    cupy = [x["distribution"] or "" for x in _installed(packages, "CuPy")]
    if len(cupy) > 1:
        yield _advice(
            "CuPy",
            f"{' and '.join(cupy)} are both installed and break each other; keep the one that fits "
            "the driver",
            f"pip uninstall -y {' '.join(cupy)}",
        )
    if cupy or any(x["built_for"] not in (None, "CPU") for x in packages):
        return  # a library for GPU arrays is installed
    vendors = {device["vendor"] for device in found["devices"]}
    for driver in found["drivers"]:
        if driver["vendor"] in vendors:
            extra = cuda_extra(driver) if driver["vendor"] == "nvidia" else "rocm"
            yield _advice(
                "CuPy",
                "there are GPUs, but no library for arrays on them (PyTorch and JAX also work)",
                f"pip install 'gpucoll[{extra}]'" if extra else None,
            )


def _rdma(report: Report) -> Iterator[Advice]:
    for verdict in report["gpu_direct_rdma"]:
        if verdict["command"]:
            yield _advice("GPUDirect RDMA", verdict["reason"], verdict["command"])
    memory, topology = report["memory"], report["topology"]
    has_rdma = topology is not None and any(nic["is_rdma"] for nic in topology["nics"])
    if has_rdma and memory is not None and memory["locked_bytes"] is not None:
        yield _advice(
            "locked memory",
            f"RDMA locks memory, but this process may lock only {memory['locked_bytes'] >> 20} MiB",
            "ulimit -l unlimited",
        )
