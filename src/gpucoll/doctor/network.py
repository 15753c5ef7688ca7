"""The probe of where GPUs and NICs are attached, and of the kernel's support for GPUDirect RDMA."""

from __future__ import annotations

import json
import os
from pathlib import Path

from gpucoll import config
from gpucoll.doctor.facts import GpuDirect, GpuFound, GpuNetwork, GpuPlace, NicPlace, Topology
from gpucoll.doctor.host import cpu_list
from gpucoll.errors import ArgumentError
from gpucoll.topology.cpus import FILE_SYSTEM
from gpucoll.topology.gpu_network import exactly, setting_of
from gpucoll.topology.interfaces import interface_of, own_address
from gpucoll.topology.machine import Distance, Gpu, Machine, Nic, distance, gpu_label, nearest_nics
from gpucoll.topology.nccl_xml import read_xml
from gpucoll.topology.nvlinks import with_nvlinks
from gpucoll.topology.rdma import GpuFacts, KernelFacts, gpu_direct_rdma, read_kernel_facts
from gpucoll.topology.sysfs import read_machine

__all__ = ["gpu_direct", "gpu_network", "topology"]


def topology(nvlinks: str, root: Path = FILE_SYSTEM) -> Topology:
    """Return the topology, from the file that NCCL is told to read, or else from sysfs.

    Parameters
    ----------
    nvlinks : str
        The result of the probe of NVLinks, as JSON; a topology file takes precedence over it.
    root : Path
        The file system whose ``/sys``, ``/proc`` and ``/boot`` are read.
    """
    file, links = config.variable(config.NCCL_TOPO_FILE), json.loads(nvlinks)
    machine = read_xml(file) if file else with_nvlinks(read_machine(root), links or {})
    kernel = read_kernel_facts(root)
    nearest = nearest_nics(machine.gpus, machine)
    return Topology(
        source=machine.source,
        gpus=[
            _gpu(gpu, None if number is None else machine.nics[number])
            for gpu, number in zip(machine.gpus, nearest, strict=True)
        ],
        nics=[_nic(nic) for nic in machine.nics],
        gpu_to_gpu=[[gpu_label(a, b) for b in machine.gpus] for a in machine.gpus],
        gpu_to_nic=_gpu_to_nic(machine),
        knows_nvlinks=bool(file) or links is not None,
        peer_memory=kernel.peer_memory,
        kernel_release=kernel.release,
        has_dma_buf_options=kernel.has_dma_buf_options,
    )


def _gpu(gpu: Gpu, nic: Nic | None) -> GpuPlace:
    return GpuPlace(
        vendor=gpu.vendor,
        pci_address=gpu.place.address,
        driver=gpu.driver,
        numa_node=gpu.place.numa_node,
        cpus=cpu_list(gpu.place.cpus),
        nearest_nic=None if nic is None else nic.name,
        nearest_nic_distance=None if nic is None else distance(gpu.place, nic.place).name,
    )


def _nic(nic: Nic) -> NicPlace:
    return NicPlace(
        name=nic.name,
        pci_address=nic.place.address,
        is_rdma=nic.is_rdma,
        is_up=nic.is_up,
        speed_mbps=nic.speed_mbps,
        link_layer=nic.link_layer,
        numa_node=nic.place.numa_node,
        interfaces=list(nic.interfaces),
    )


def _gpu_to_nic(machine: Machine) -> list[list[str]]:
    return [[distance(gpu.place, nic.place).name for nic in machine.nics] for gpu in machine.gpus]


def gpu_direct(found: Topology, devices: list[GpuFound]) -> list[GpuDirect]:
    """Return for each GPU whether GPUDirect RDMA can be used; pure.

    Parameters
    ----------
    found : Topology
        The result of `topology`.
    devices : list of GpuFound
        What the drivers report about the GPUs that this process may use.
    """
    kernel = KernelFacts(
        found["peer_memory"], found["kernel_release"], found["has_dma_buf_options"]
    )
    told = {gpu["pci_address"]: gpu for gpu in devices}
    rdma = {nic["name"] for nic in found["nics"] if nic["is_rdma"]}
    verdicts = []
    for gpu in found["gpus"]:
        device = told.get(gpu["pci_address"])
        facts = GpuFacts(device["gpu_direct_rdma"], device["dma_buf"]) if device else GpuFacts()
        name = gpu["nearest_nic_distance"]
        nearest = Distance[name] if name and gpu["nearest_nic"] in rdma else None
        verdict = gpu_direct_rdma(gpu["vendor"], kernel, facts, nearest)
        verdicts.append(
            GpuDirect(
                pci_address=gpu["pci_address"],
                serves=verdict.serves,
                reason=verdict.reason,
                command=verdict.command,
            )
        )
    return verdicts


def gpu_network(root: Path = FILE_SYSTEM) -> GpuNetwork:
    """Return how NCCL or RCCL would reach other hosts, in a communicator that starts here.

    Parameters
    ----------
    root : Path
        The file system whose ``/etc`` is read.
    """
    try:
        interface: str | None = interface_of(own_address()).name
    except ArgumentError:  # GPUCOLL_INTERFACES names an interface that does not exist
        interface = None
    sockets = setting_of(config.NCCL_SOCKET_IFNAME, os.environ, root)
    adapters = setting_of(config.NCCL_IB_HCA, os.environ, root)
    chosen = exactly(interface) if interface else None
    return GpuNetwork(
        interface=interface,
        socket_ifname=chosen if sockets is None else sockets.value,
        socket_ifname_source=(chosen and "gpucoll") if sockets is None else sockets.source,
        ib_hca=None if adapters is None else adapters.value,
        ib_hca_source=None if adapters is None else adapters.source,
    )
