"""Whether GPUDirect RDMA can serve, on kernels made of files."""

from __future__ import annotations

import pytest
from tests.topology.machines import write

from gpucoll.topology.machine import Distance
from gpucoll.topology.rdma import GpuFacts, KernelFacts, gpu_direct_rdma, read_kernel_facts

NEW, OLD = "6.8.0-50-generic", "5.4.0"
ASKED = GpuFacts(gpu_direct_rdma=True, dma_buf=True)


@pytest.mark.parametrize(
    ("vendor", "path"),
    [
        ("nvidia", "sys/module/nvidia_peermem/version"),
        ("nvidia", "sys/kernel/mm/memory_peers/nv_mem/version"),
        ("nvidia", "sys/kernel/mm/memory_peers/nv_mem_nc/version"),
        ("amd", "sys/kernel/mm/memory_peers/amdkfd/version"),
        ("amd", "sys/kernel/memory_peers/amdkfd/version"),
        ("amd", "sys/memory_peers/amdkfd/version"),
    ],
)
def test_every_place_of_peer_memory(tmp_path, vendor, path):
    write(tmp_path / path, "1.0")
    facts = read_kernel_facts(tmp_path)
    assert facts.peer_memory == {vendor: f"/{path}"}
    verdict = gpu_direct_rdma(vendor, facts, GpuFacts(), Distance.PXB)
    assert verdict.serves is True
    assert path in verdict.reason


def test_the_module_goes_before_older_ones(tmp_path):
    write(tmp_path / "sys/kernel/mm/memory_peers/nv_mem/version", "1.0")
    write(tmp_path / "sys/module/nvidia_peermem/version", "1.0")
    facts = read_kernel_facts(tmp_path)
    assert facts.peer_memory == {"nvidia": "/sys/module/nvidia_peermem/version"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, None),
        ("CONFIG_DMABUF_MOVE_NOTIFY=y\nCONFIG_PCI_P2PDMA=y", True),
        ("CONFIG_DMABUF_MOVE_NOTIFY=y\n# CONFIG_PCI_P2PDMA is not set", False),
    ],
)
def test_the_options_of_the_kernel(tmp_path, options, expected):
    write(tmp_path / "proc/sys/kernel/osrelease", NEW)
    if options:
        write(tmp_path / f"boot/config-{NEW}", options)
    assert read_kernel_facts(tmp_path).has_dma_buf_options is expected


@pytest.mark.parametrize(
    ("vendor", "release", "options", "gpu", "serves", "reason"),
    [
        ("nvidia", NEW, None, ASKED, True, "by DMA-BUF"),
        ("nvidia", OLD, None, ASKED, False, "Linux 5.4.0 cannot map"),
        ("nvidia", NEW, None, GpuFacts(True, False), False, "its driver has no DMA-BUF"),
        ("nvidia", NEW, None, GpuFacts(), None, "was not asked"),
        ("nvidia", NEW, None, GpuFacts(False, True), False, "this GPU cannot"),
        ("amd", NEW, True, GpuFacts(), True, "by DMA-BUF"),
        ("amd", NEW, False, GpuFacts(), False, "the kernel lacks"),
        ("amd", OLD, True, GpuFacts(), False, "the kernel lacks"),
        ("amd", NEW, None, GpuFacts(), None, "cannot be read"),
    ],
)
def test_without_peer_memory(vendor, release, options, gpu, serves, reason):
    verdict = gpu_direct_rdma(vendor, KernelFacts({}, release, options), gpu, Distance.PIX)
    assert verdict.serves is serves
    assert reason in verdict.reason


def test_the_command_that_helps():
    facts = KernelFacts({}, NEW, None)
    verdict = gpu_direct_rdma("nvidia", facts, GpuFacts(True, False), Distance.PIX)
    assert verdict.command == "sudo modprobe nvidia-peermem"


def test_no_rdma_device():
    facts = KernelFacts({"nvidia": "/sys/module/nvidia_peermem/version"}, NEW, None)
    assert gpu_direct_rdma("nvidia", facts, ASKED, None).serves is False


@pytest.mark.parametrize(
    ("nearest", "is_used"), [(Distance.PIX, True), (Distance.PXB, True), (Distance.PHB, False)]
)
def test_from_far_away_it_is_not_used(nearest, is_used):
    facts = KernelFacts({"nvidia": "/sys/module/nvidia_peermem/version"}, NEW, None)
    verdict = gpu_direct_rdma("nvidia", facts, ASKED, nearest)
    assert verdict.serves is True
    assert ("NCCL_NET_GDR_LEVEL" in verdict.reason) is not is_used
