"""How far apart two devices are, and which NIC each GPU takes.

The classes are those of NCCL and of ``nvidia-smi topo -m``, by what lies on the way between two
devices: NCCL compares them with NCCL_NET_GDR_LEVEL and NCCL_P2P_LEVEL.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from gpucoll.topology.machine import SWITCH, Gpu, Machine, Nic, Place

__all__ = ["Distance", "distance", "gpu_label", "links_between", "nearest_nics"]


class Distance(IntEnum):
    """What lies between two devices; a smaller one is nearer."""

    SELF = 0
    """The same device."""
    PIX = 1
    """One PCIe switch."""
    PXB = 2
    """Several PCIe switches, but not the CPU."""
    PHB = 3
    """The CPU's host bridge."""
    NODE = 4
    """Several host bridges of one NUMA node. NCCL counts it as PHB, and so does what is read from
    its XML, which does not name host bridges."""
    SYS = 5
    """The link between NUMA nodes."""


def distance(a: Place, b: Place) -> Distance:
    """Return what lies between two places of one host."""
    if a.address == b.address:
        return Distance.SELF
    if a.switches and b.switches and a.switches[-1] == b.switches[-1]:
        return Distance.PIX
    if _slot(a) == _slot(b):  # functions of one card
        return Distance.PIX
    if set(a.switches) & set(b.switches):
        return Distance.PXB
    if a.numa_node != b.numa_node:
        # Of one host bridge in spite of it? Only where firmware names a node for one of them.
        is_shared = a.host_bridge is not None and a.host_bridge == b.host_bridge
        return Distance.PHB if is_shared else Distance.SYS
    return Distance.PHB if a.host_bridge == b.host_bridge else Distance.NODE


def _slot(place: Place) -> str:
    return place.address.partition(".")[0]


def links_between(a: Gpu, b: Gpu) -> int:
    """Return the number of NVLinks or XGMI links between two GPUs, directly or by NVSwitches."""
    direct = a.links.get(b.place.address, 0) or b.links.get(a.place.address, 0)
    return direct or min(a.links.get(SWITCH, 0), b.links.get(SWITCH, 0))


def gpu_label(a: Gpu, b: Gpu) -> str:
    """Return the nearest way between two GPUs: ``NV18``, ``XGMI``, or the PCI distance's name."""
    if a.place.address != b.place.address and (links := links_between(a, b)):
        return f"NV{links}" if a.vendor == "nvidia" else "XGMI"
    return distance(a.place, b.place).name


def nearest_nics(gpus: Sequence[Gpu], machine: Machine) -> list[int | None]:
    """Return the number of the NIC that each GPU takes; None where there is none.

    RDMA devices go before plain interfaces, those that are not known to be down before others; then
    the nearest, then the fastest. NICs that are equal in all of this are dealt out, so that two
    GPUs behind one switch with two NICs take one each. Every rank of a host computes the same.

    Parameters
    ----------
    gpus : sequence of Gpu
        Those that take part, in the order of their ranks.
    machine : Machine
        Whose NICs are dealt out.
    """
    taken = [0] * len(machine.nics)
    choices: list[int | None] = []
    for gpu in gpus:
        ranked = [
            (_drawbacks(gpu, nic), taken[number], number) for number, nic in enumerate(machine.nics)
        ]
        if not ranked:
            choices.append(None)
            continue
        number = min(ranked)[2]
        taken[number] += 1
        choices.append(number)
    return choices


def _drawbacks(gpu: Gpu, nic: Nic) -> tuple[bool, bool, int, int]:
    return (
        not nic.is_rdma,
        nic.is_up is False,
        distance(gpu.place, nic.place),
        -(nic.speed_mbps or 0),
    )
