"""The interface and NIC that the vendor's library uses between hosts, and where that is set.

NCCL and RCCL read the same variables. NCCL_SOCKET_IFNAME names the interface over which their ranks
find each other, and over which they send if there is no RDMA device. By default the library takes
the first interface that it considers suitable; on hosts with several networks that is often not the
program's. NCCL_IB_HCA names RDMA devices. By default all are used, the nearest to each GPU first.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from gpucoll import config
from gpucoll.topology.cpus import FILE_SYSTEM, read_text
from gpucoll.topology.machine import Machine, Nic, distance, nearest_nics
from gpucoll.topology.nccl_xml import read_xml
from gpucoll.topology.sysfs import read_machine

_FILE = "etc/nccl.conf"


class Setting(NamedTuple):
    """The value of one of the library's variables."""

    value: str
    source: str
    """``"the environment"``, or the file that the value is from."""


def exactly(interface: str) -> str:
    """Return the value of NCCL_SOCKET_IFNAME that names this interface only.

    Without ``=`` it would be a prefix, which any interface whose name begins with it matches.
    """
    return f"={interface}"


def setting_of(name: str, variables: Mapping[str, str], root: Path = FILE_SYSTEM) -> Setting | None:
    """Return what the user has set; None: nothing, so the library chooses.

    For variables missing in the environment, the library reads a file of the user, then one of the
    host.

    Parameters
    ----------
    name : str
        Name of the variable.
    variables : mapping
        The environment.
    root : Path
        The file system whose ``/etc`` is read.
    """
    if name in variables:
        return Setting(variables[name], "the environment")
    home = variables.get("HOME", "")
    own = variables.get(config.NCCL_CONF_FILE) or (home and f"{home}/.nccl.conf")
    shown = {**({own: Path(own)} if own else {}), f"/{_FILE}": root / _FILE}
    for path, file in shown.items():
        for line in read_text(file).splitlines():
            key, equals, value = line.partition("=")
            if equals and key.strip() == name:
                return Setting(value.strip(), path)
    return None


def machine_of(variables: Mapping[str, str], root: Path = FILE_SYSTEM) -> Machine:
    """Return GPUs and NICs as the library sees them, from its topology file or from sysfs."""
    file = variables.get(config.NCCL_TOPO_FILE)
    return read_xml(file) if file else read_machine(root)


def described_nic(machine: Machine, pci_address: str) -> tuple[str, str]:
    """Return the name of the RDMA device that is nearest to a GPU, and a sentence about it.

    Every rank of a host deals the devices out alike, so that GPUs with several equally good ones
    take one each. The name is empty if there is no RDMA device.
    """
    places = [gpu.place.address for gpu in machine.gpus]
    if pci_address not in places:
        return "", f"not known: {machine.source} shows no GPU at {pci_address}"
    place = places.index(pci_address)
    number = nearest_nics(machine.gpus, machine)[place]
    if number is None or not machine.nics[number].is_rdma:
        return "", "no RDMA device: what the GPUs send goes over sockets"
    nic = machine.nics[number]
    far = distance(machine.gpus[place].place, nic.place).name
    return nic.name, f"{nic.name} ({_facts(nic)}), {far} from the GPU: the nearest"


def _facts(nic: Nic) -> str:
    speed = f"{nic.speed_mbps / 1000:g} Gbit/s" if nic.speed_mbps else ""
    down = "down" if nic.is_up is False else ""
    return ", ".join(filter(None, [nic.link_layer or "RDMA", speed, down]))
