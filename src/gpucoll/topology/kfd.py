"""XGMI links between AMD GPUs, from the amdgpu driver's files in sysfs (``/sys/class/kfd``).

This code has never run on a machine with AMD GPUs. It was written after the kernel's header
``include/uapi/linux/kfd_sysfs.h`` and ``drivers/gpu/drm/amd/amdkfd/kfd_topology.c``.
"""

from __future__ import annotations

from pathlib import Path

from gpucoll.topology.cpus import read_text

__all__ = ["xgmi_links"]

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
