"""Find out whether a NIC can read and write a GPU's memory itself (GPUDirect RDMA).

There are two ways: a module through which the GPU's driver gives addresses to the NIC's driver
(peer memory), or a DMA-BUF that the NIC's driver maps (Linux 5.12 and later). This module checks
what NCCL and RCCL check (NVIDIA/nccl and ROCm/rccl, ``src/transport/net_ib.cc``, and
``src/misc/rocmwrap.cc``). The caller passes what only the GPU's driver knows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gpucoll.topology.cpus import FILE_SYSTEM, read_text
from gpucoll.topology.machine import Distance

PEER_MEMORY = {
    "nvidia": (
        "sys/module/nvidia_peermem/version",
        "sys/kernel/mm/memory_peers/nv_mem/version",
        "sys/kernel/mm/memory_peers/nv_mem_nc/version",
    ),
    # The directory depends on the versions of the kernel and of the NIC's driver.
    "amd": (
        "sys/kernel/mm/memory_peers/amdkfd/version",
        "sys/kernel/memory_peers/amdkfd/version",
        "sys/memory_peers/amdkfd/version",
    ),
}
"""Vendor -> files, one of which exists if its GPUs are registered for peer memory."""

DMA_BUF_SINCE = (5, 12)
"""The first kernel whose verbs can register a DMA-BUF."""

DMA_BUF_OPTIONS = ("CONFIG_DMABUF_MOVE_NOTIFY=y", "CONFIG_PCI_P2PDMA=y")
"""Options with which a kernel must be built, so that AMD's driver exports DMA-BUFs for NICs."""

GPU_DIRECT_LEVEL = Distance.PXB
"""NCCL's default for NCCL_NET_GDR_LEVEL: beyond it, data goes through the host's memory."""


@dataclass(frozen=True)
class KernelFacts:
    """The kernel's facts.

    Attributes
    ----------
    peer_memory : dict
        Vendor -> the file that shows its peer memory module, as an absolute path.
    release : str
        The kernel's version.
    has_dma_buf_options : bool or None
        Whether it was built with DMA_BUF_OPTIONS; None if its configuration cannot be read.
    """

    peer_memory: dict[str, str]
    release: str
    has_dma_buf_options: bool | None


@dataclass(frozen=True)
class GpuFacts:
    """The GPU driver's facts; None if it was not asked or does not tell.

    Attributes
    ----------
    gpu_direct_rdma : bool or None
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED.
    dma_buf : bool or None
        CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED.
    """

    gpu_direct_rdma: bool | None = None
    dma_buf: bool | None = None


class Verdict(NamedTuple):
    """Whether GPUDirect RDMA can be used (None: unknown), why, and what to do."""

    serves: bool | None
    reason: str
    command: str | None = None


def read_kernel_facts(root: Path = FILE_SYSTEM) -> KernelFacts:
    """Return the facts of this host's kernel.

    Parameters
    ----------
    root : Path
        The file system whose ``/sys``, ``/proc`` and ``/boot`` are read.
    """
    found = {
        vendor: f"/{path}"
        for vendor, paths in PEER_MEMORY.items()
        for path in reversed(paths)  # the first one that exists stays
        if (root / path).exists()
    }
    release = read_text(root / "proc/sys/kernel/osrelease").strip()
    options = read_text(root / f"boot/config-{release}").splitlines()
    has_options = all(option in options for option in DMA_BUF_OPTIONS) if options else None
    return KernelFacts(found, release, has_options)


def gpu_direct_rdma(
    vendor: str, kernel: KernelFacts, gpu: GpuFacts, nearest: Distance | None
) -> Verdict:
    """Return whether one GPU can use GPUDirect RDMA.

    Parameters
    ----------
    vendor : str
        ``"nvidia"`` or ``"amd"``.
    kernel, gpu : KernelFacts, GpuFacts
        The known facts.
    nearest : Distance or None
        Distance from the GPU to its nearest RDMA device; None: there is no such device.

    Returns
    -------
    Verdict
        The verdict does not take into account the NIC's firmware, an IOMMU in between, or access
        control in PCIe switches: a measurement is more reliable.
    """
    if nearest is None:
        return Verdict(False, "no RDMA device")
    if gpu.gpu_direct_rdma is False:
        return Verdict(False, "the GPU's driver reports that this GPU cannot")
    verdict = _amd(kernel) if vendor == "amd" else _nvidia(kernel, gpu)
    if verdict.serves and nearest > GPU_DIRECT_LEVEL:
        far = (
            f"{verdict.reason}; but the nearest NIC is {nearest.name} away, and by default only up "
            f"to {GPU_DIRECT_LEVEL.name} is used (NCCL_NET_GDR_LEVEL)"
        )
        return Verdict(True, far)
    return verdict


def _nvidia(kernel: KernelFacts, gpu: GpuFacts) -> Verdict:
    if path := kernel.peer_memory.get("nvidia"):
        return Verdict(True, f"by peer memory ({path})")
    can_map = _is_at_least(kernel.release, DMA_BUF_SINCE)
    if gpu.dma_buf and can_map:
        return Verdict(
            True, f"by DMA-BUF (the GPU's driver has it, and so has Linux {kernel.release})"
        )
    if gpu.dma_buf is None and can_map:
        return Verdict(
            None, "no peer memory module, and the GPU's driver was not asked for DMA-BUF"
        )
    missing = (
        "its driver has no DMA-BUF" if can_map else f"Linux {kernel.release} cannot map DMA-BUF"
    )
    return Verdict(
        False,
        f"the module nvidia_peermem is not loaded, and {missing}",
        "sudo modprobe nvidia-peermem",
    )


def _amd(kernel: KernelFacts) -> Verdict:
    if path := kernel.peer_memory.get("amd"):
        return Verdict(True, f"by peer memory ({path})")
    if kernel.has_dma_buf_options is None:
        return Verdict(
            None, "no peer memory registration, and the kernel's configuration cannot be read"
        )
    if kernel.has_dma_buf_options and _is_at_least(kernel.release, DMA_BUF_SINCE):
        return Verdict(
            True, "by DMA-BUF (the kernel has it; RCCL uses it with NCCL_DMABUF_ENABLE=1)"
        )
    return Verdict(
        False, "no peer memory registration, and the kernel lacks " + " or ".join(DMA_BUF_OPTIONS)
    )


def _is_at_least(release: str, wanted: tuple[int, int]) -> bool:
    match = re.match(r"(\d+)\.(\d+)", release)
    return match is not None and (int(match[1]), int(match[2])) >= wanted
