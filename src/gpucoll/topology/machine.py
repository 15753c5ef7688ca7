"""The data model of a host's GPUs and NICs, and of where each of them sits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["SWITCH", "UNKNOWN_NODE", "Gpu", "Machine", "Nic", "Place"]

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
