"""Read where GPUs and NICs sit from sysfs, without a library, a driver call or touching a GPU.

To software, PCIe is a tree of bridges. A switch is an upstream port, with a downstream port below
it for each device that is plugged in. NCCL's topology (NVIDIA/nccl, ``src/graph/xml.cc``) names a
switch by its upstream port and leaves out the downstream ports and root ports. This module does the
same, so that both give the same distances.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from gpucoll.topology.cpus import FILE_SYSTEM, parse_cpu_list, read_text
from gpucoll.topology.machine import UNKNOWN_NODE, Gpu, Machine, Nic, Place

# --- XGMI links between AMD GPUs ------------------------------------------------------------------

# From the amdgpu driver's files (``/sys/class/kfd``). This code has never run on a machine with AMD
# GPUs. It was written after the kernel's header ``include/uapi/linux/kfd_sysfs.h`` and
# ``drivers/gpu/drm/amd/amdkfd/kfd_topology.c``.


XGMI = 11  # the type of an io_link, CRAT_IOLINK_TYPE_XGMI


def xgmi_links(root: Path) -> dict[str, dict[str, int]]:
    """Return GPU -> GPU -> number of XGMI links, by PCI address; empty: there are no links."""
    nodes = sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*"))
    addresses = {
        node.name: _address(properties)
        for node in nodes
        if (properties := _properties(node / "properties")).get("simd_count", 0) > 0
    }
    links: dict[str, dict[str, int]] = {}
    for node in nodes:
        for link in node.glob("io_links/[0-9]*/properties"):
            properties = _properties(link)
            source = addresses.get(str(properties.get("node_from")))
            target = addresses.get(str(properties.get("node_to")))
            if properties.get("type") == XGMI and source and target:
                targets = links.setdefault(source, {})
                targets[target] = targets.get(target, 0) + 1
    return links


def _properties(path: Path) -> dict[str, int]:
    """Return the content of a file with lines such as ``location_id 3072``."""
    pairs = (line.split() for line in read_text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _address(properties: dict[str, int]) -> str:
    """Return a GPU's PCI address: bus, device and function are packed into one number."""
    location = properties.get("location_id", 0)
    bus, device, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 0x7
    return f"{properties.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}"


# --- GPUs and NICs --------------------------------------------------------------------------------


GPU_VENDORS = {0x10DE: "nvidia", 0x1002: "amd"}
"""PCI vendor number -> the vendor's name in gpucoll."""

_DISPLAY_DRIVERS = ("radeon",)
"""Drivers of graphics too old to compute, such as those that servers have for their console."""
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_ACTIVE = "4:"  # how an active port's state begins, by its number in verbs: "4: ACTIVE"


def read_machine(root: Path = FILE_SYSTEM) -> Machine:
    """Return the GPUs and NICs of this host.

    A container usually sees all of the host's devices in sysfs, though it may use only some.

    Parameters
    ----------
    root : Path
        The file system whose ``/sys`` is read. Devices that cannot be read are left out.
    """
    rdma = list(_rdma_devices(root))
    covered = {nic.place.address for nic in rdma}
    plain = [
        Nic(name, place, is_rdma=False, is_up=is_up, speed_mbps=speed, link_layer="Ethernet")
        for name, place, is_up, speed in _interfaces(root)
        if place.address not in covered
    ]
    return Machine(
        gpus=tuple(_gpus(root)),
        nics=(
            *sorted(rdma, key=lambda nic: natural_key(nic.name)),
            *sorted(plain, key=lambda nic: natural_key(nic.name)),
        ),
        source="sysfs",
    )


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers inside names as numbers: mlx5_2 before mlx5_10."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def is_gpu_class(pci_class: int) -> bool:
    """Return whether a PCI class is a display controller or a processing accelerator (MI300)."""
    return pci_class >> 16 in (0x03, 0x12)


# --- GPUs ---------------------------------------------------------------------------------------


def _gpus(root: Path) -> Iterator[Gpu]:
    links = xgmi_links(root)
    for folder in sorted(_entries(root / "sys/bus/pci/devices"), key=lambda path: path.name):
        vendor = GPU_VENDORS.get(_number(folder / "vendor"))
        if vendor is None or not is_gpu_class(_number(folder / "class")):
            continue
        place = _place(root, folder)
        driver = folder / "driver"
        name = driver.resolve().name if driver.is_symlink() else None
        if place is not None and name not in _DISPLAY_DRIVERS:
            yield Gpu(place, vendor, name, links.get(place.address, {}))


# --- NICs ---------------------------------------------------------------------------------------


def _rdma_devices(root: Path) -> Iterator[Nic]:
    """Yield the devices that have verbs and sit on PCI (soft RoCE does not)."""
    interfaces: dict[str, list[str]] = {}
    for name, place, _, _ in _interfaces(root):
        interfaces.setdefault(place.address, []).append(name)
    for folder in _entries(root / "sys/class/infiniband"):
        found = _place(root, folder / "device")
        if found is None:
            continue
        ports = _entries(folder / "ports")
        speeds = [gbps for port in ports if (gbps := _rate_gbps(port / "rate")) is not None]
        states = [read_text(port / "state").strip() for port in ports]
        yield Nic(
            name=folder.name,
            place=found,
            is_rdma=True,
            is_up=any(state.startswith(_ACTIVE) for state in states) if any(states) else None,
            speed_mbps=int(max(speeds) * 1000) if speeds else None,
            link_layer=next((read_text(port / "link_layer").strip() for port in ports), "") or None,
            interfaces=tuple(sorted(interfaces.get(found.address, ()), key=natural_key)),
        )


def _interfaces(root: Path) -> Iterator[tuple[str, Place, bool | None, int | None]]:
    """Yield each network interface on PCI: its name, place, whether it is up, its Mbit/s."""
    for folder in _entries(root / "sys/class/net"):
        place = _place(root, folder / "device")
        if place is None:
            continue
        state = read_text(folder / "operstate").strip()
        speed = read_text(folder / "speed").strip()
        yield (
            folder.name,
            place,
            {"up": True, "down": False}.get(state),
            int(speed) if speed.isdecimal() and int(speed) > 0 else None,
        )


def _rate_gbps(path: Path) -> float | None:
    """Return a port's rate, from a text such as ``400 Gb/sec (4X NDR)``."""
    word = read_text(path).partition(" ")[0]
    try:
        return float(word)
    except ValueError:
        return None


# --- places -------------------------------------------------------------------------------------


def _place(root: Path, device: Path) -> Place | None:
    """Return where a device sits; `device` is its folder, or a folder or link on it."""
    if not device.exists():
        return None
    host_bridge, chain = _chain(device.resolve())
    if not chain:
        return None
    folder = root / "sys/bus/pci/devices" / chain[-1]
    # Going up from the device, every second port is a switch's upstream port (see above).
    switches = tuple(reversed(chain[-3::-2])) if len(chain) > 2 else ()
    return Place(
        address=chain[-1],
        switches=switches,
        host_bridge=host_bridge,
        numa_node=_numa_node(root, folder),
        cpus=tuple(parse_cpu_list(read_text(folder / "local_cpulist"))),
    )


def _chain(path: Path) -> tuple[str | None, list[str]]:
    """Return the host bridge in a device's path, and the PCI addresses from it to the device."""
    host_bridge, chain = None, list[str]()
    for part in path.parts:
        if _HOST_BRIDGE.fullmatch(part):  # a second one is a bridge behind a device (VMD)
            host_bridge, chain = part, []
        elif _ADDRESS.fullmatch(part):
            chain.append(part)
    return host_bridge, chain


def _numa_node(root: Path, folder: Path) -> int:
    try:
        node = int(read_text(folder / "numa_node"))
    except ValueError:
        node = UNKNOWN_NODE
    if node == UNKNOWN_NODE:  # usual on machines with a single node
        nodes = [path.name for path in _entries(root / "sys/devices/system/node")]
        numbers = [int(name[4:]) for name in nodes if re.fullmatch(r"node\d+", name)]
        if len(numbers) == 1:
            return numbers[0]
    return node


def _number(path: Path) -> int:
    try:
        return int(read_text(path), 16)
    except ValueError:
        return 0


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
