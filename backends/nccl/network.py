"""The network that the vendor's library uses between hosts, chosen if the user has not done so."""

from __future__ import annotations

import os
from pathlib import Path

from gpucoll import config
from gpucoll.topology.cpus import FILE_SYSTEM
from gpucoll.topology.gpu_network import described_nic, exactly, machine_of, setting_of

_chosen: list[str] = []
"""The value that NCCL_SOCKET_IFNAME was set to here; the library reads it once per process."""


def choose_interface(interface: str, root: Path = FILE_SYSTEM) -> None:
    """Make the library use the interface that links the hosts, unless the user chose one.

    Call this before the library reads the setting: when a unique id is made, or a rank joins.
    """
    if setting_of(config.NCCL_SOCKET_IFNAME, os.environ, root) is None:
        _chosen[:] = [exactly(interface)]
        os.environ[config.NCCL_SOCKET_IFNAME] = _chosen[0]


def describe(interface: str, pci_address: str, root: Path = FILE_SYSTEM) -> dict[str, str]:
    """Return facts about a GPU's path to other hosts: name -> sentence.

    Parameters
    ----------
    interface : str
        The interface by which this host is linked to the others.
    pci_address : str
        The GPU's PCI address.
    root : Path
        The file system whose ``/sys`` and ``/etc`` are read.
    """
    variables = dict(os.environ)
    name, nic = described_nic(machine_of(variables, root), pci_address)
    hca = setting_of(config.NCCL_IB_HCA, variables, root)
    if hca is not None:
        nic += f"; {config.NCCL_IB_HCA}={hca.value} of {hca.source} stands"
    elif name:
        nic += f"; {config.NCCL_IB_HCA}={name} would have this rank use it alone"
    return {"GPU network": _interface(interface, variables, root), "NIC of the GPU": nic}


def _interface(interface: str, variables: dict[str, str], root: Path) -> str:
    found = setting_of(config.NCCL_SOCKET_IFNAME, variables, root)
    if found is None:
        return f"the library chooses; the hosts are linked by {interface}"
    said = f"{config.NCCL_SOCKET_IFNAME}={found.value}"
    if [found.value] != _chosen:
        return f"{said} of {found.source} stands; the hosts are linked by {interface}"
    if found.value != exactly(interface):
        return f"{said}, set for an earlier communicator; the hosts are linked by {interface}"
    return f"{said}, set by gpucoll: the interface that links the hosts"
