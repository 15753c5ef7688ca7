"""The data model of a host's GPUs and NICs, and of where each of them sits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

UNKNOWN_NODE = -1
"""The NUMA node of a device whose firmware names none, as the kernel writes it."""

SWITCH = "switch"
"""The other end of links that lead to an NVSwitch, not to a particular GPU."""


@dataclass(frozen=True)
class Place:
    """Where a PCI device sits.

    Attributes
    ----------
    address : str
        Domain, bus, device and function as sysfs writes them: ``"0000:3b:00.0"``.
    switches : tuple of str
        The PCIe switches between the CPU and the device, outermost first, each by the address of
        its upstream port.
    host_bridge : str or None
        The root of its PCI tree, such as ``"pci0000:3a"``; None if the source does not tell.
    numa_node : int
        NUMA node of the CPUs that it is attached to, or UNKNOWN_NODE.
    cpus : tuple of int
        CPUs close to it, in order; empty if they are not known.
    """

    address: str
    switches: tuple[str, ...] = ()
    host_bridge: str | None = None
    numa_node: int = UNKNOWN_NODE
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes
    ----------
    place : Place
        Where it sits.
    vendor : str
        ``"nvidia"`` or ``"amd"``.
    driver : str or None
        The kernel driver that is bound to it (``nvidia``, ``amdgpu``, ``vfio-pci``...).
    links : mapping
        PCI address of another GPU, or SWITCH -> number of NVLinks or XGMI links to it.
    """

    place: Place
    vendor: str
    driver: str | None = None
    links: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Nic:
    """One network device: an RDMA device, or an interface that does not belong to one.

    Attributes
    ----------
    name : str
        ``"mlx5_0"``, ``"eth0"``.
    place : Place
        Where it sits.
    is_rdma : bool
        Whether it has verbs (InfiniBand or RoCE).
    is_up : bool or None
        Whether a port is active; None if the source does not tell.
    speed_mbps : int or None
        Speed of its fastest port, in Mbit/s.
    link_layer : str or None
        ``"InfiniBand"`` or ``"Ethernet"``.
    interfaces : tuple of str
        Network interfaces over the same PCI function.
    """

    name: str
    place: Place
    is_rdma: bool
    is_up: bool | None = None
    speed_mbps: int | None = None
    link_layer: str | None = None
    interfaces: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """All GPUs and NICs of a host, each numbered by its position.

    Attributes
    ----------
    gpus : tuple of Gpu
        In PCI order, as ``nvidia-smi`` and ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` number them; if read
        from an XML file, in the order of its ``dev``.
    nics : tuple of Nic
        RDMA devices first, each kind by name.
    source : str
        Where the description was read from.
    """

    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    source: str


# --- distances ------------------------------------------------------------------------------------

# The classes are those of NCCL and of ``nvidia-smi topo -m``. They describe what lies between two
# devices; NCCL compares them with NCCL_NET_GDR_LEVEL and NCCL_P2P_LEVEL.


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
    """Several host bridges of one NUMA node.

    NCCL counts this as PHB. So do machines read from NCCL's XML, which does not name host bridges.
    """
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
        # They may still share a host bridge, if firmware names a node for one of them only.
        is_shared = a.host_bridge is not None and a.host_bridge == b.host_bridge
        return Distance.PHB if is_shared else Distance.SYS
    return Distance.PHB if a.host_bridge == b.host_bridge else Distance.NODE


def _slot(place: Place) -> str:
    return place.address.partition(".")[0]


def links_between(a: Gpu, b: Gpu) -> int:
    """Return the number of NVLinks or XGMI links between two GPUs, direct or through NVSwitches."""
    direct = a.links.get(b.place.address, 0) or b.links.get(a.place.address, 0)
    return direct or min(a.links.get(SWITCH, 0), b.links.get(SWITCH, 0))


def gpu_label(a: Gpu, b: Gpu) -> str:
    """Return the nearest connection of two GPUs: ``NV18``, ``XGMI``, or their distance's name."""
    if a.place.address != b.place.address and (links := links_between(a, b)):
        return f"NV{links}" if a.vendor == "nvidia" else "XGMI"
    return distance(a.place, b.place).name


def nearest_nics(gpus: Sequence[Gpu], machine: Machine) -> list[int | None]:
    """Return the number of the NIC that each GPU takes; None: there is no NIC.

    RDMA devices are preferred to plain interfaces, then NICs that are not known to be down, then
    the nearest, then the fastest. NICs that are equal in all of this are dealt out, so that two
    GPUs behind one switch with two NICs take one each. Every rank of a host computes the same
    result.

    Parameters
    ----------
    gpus : sequence of Gpu
        The GPUs that take part, in the order of their ranks.
    machine : Machine
        The machine whose NICs are dealt out.
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
