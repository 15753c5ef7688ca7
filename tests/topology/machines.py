"""Machines in a few lines, written out as sysfs or as NCCL's XML.

A line is a node with its CPUs, a host bridge, a switch, a GPU or a NIC; what is indented sits on
it.
Two hexadecimal digits are a bus: ``switch 01`` is the upstream port 0000:01:00.0. Ports that lead
down get an address of their own on the bus that they lead to.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from xml.etree import ElementTree

from gpucoll.topology import parse_cpu_list

VENDORS = {"nvidia": "0x10de", "amd": "0x1002"}
GPU_CLASSES = {"nvidia": "0x030200", "amd": "0x120000"}


@dataclass
class Node:
    kind: str
    words: list[str]
    below: list[Node] = field(default_factory=list)

    @property
    def address(self) -> str:
        bus, _, function = self.words[0].partition(".")
        return f"0000:{bus}:00.{function or 0}"


def parse(text: str) -> list[Node]:
    """Return the outermost nodes of a machine."""
    stack: list[tuple[int, list[Node]]] = [(-1, [])]
    for line in text.strip("\n").splitlines():
        indent = len(line) - len(line.lstrip())
        node = Node(line.split()[0], line.split()[1:])
        while stack[-1][0] >= indent:
            stack.pop()
        stack[-1][1].append(node)
        stack.append((indent, node.below))
    return stack[0][1]


# --- sysfs --------------------------------------------------------------------------------------


def write_sysfs(root, text, vendor="nvidia"):
    """Write a machine's /sys below root."""
    for folder in ("sys/bus/pci/devices", "sys/class/infiniband", "sys/class/net"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for node in parse(text):
        number, cpus = node.words
        write(root / f"sys/devices/system/node/node{number}/cpulist", cpus)
        for bridge in node.below:
            folder = root / f"sys/devices/pci0000:{bridge.words[0]}"
            for child in bridge.below:
                write_device(root, folder, child, (number, cpus, vendor))
    return root


def write_device(root, above, node, facts):
    number, cpus, vendor = facts
    port = node.address[:8] + "1f.0"
    folder = above / port / node.address
    kinds = {"switch": ("0x1000", "0x060400"), "nic": ("0x15b3", "0x020700")}
    kinds["gpu"] = (VENDORS[vendor], GPU_CLASSES[vendor])
    for place, (maker, kind) in ((above / port, kinds["switch"]), (folder, kinds[node.kind])):
        files = {"vendor": maker, "class": kind, "numa_node": number, "local_cpulist": cpus}
        for name, content in files.items():
            write(place / name, content)
        link(root / "sys/bus/pci/devices" / place.name, place)
    if node.kind == "nic":
        write_nic(root, folder, node.words[1])
    for child in node.below:
        write_device(root, folder, child, facts)


def write_nic(root, folder, name, rate="400 Gb/sec (4X NDR)", state="4: ACTIVE"):
    verbs = folder / "infiniband" / name
    write(verbs / "ports/1/state", state)
    write(verbs / "ports/1/rate", rate)
    write(verbs / "ports/1/link_layer", "InfiniBand")
    link(verbs / "device", folder)
    link(root / "sys/class/infiniband" / name, verbs)


def write_interface(root, folder, name, speed="10000", state="up"):
    interface = folder / "net" / name
    write(interface / "speed", speed)
    write(interface / "operstate", state)
    link(interface / "device", folder)
    link(root / "sys/class/net" / name, interface)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def link(path, target):
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_symlink():
        path.symlink_to(os.path.relpath(target, path.parent))


# --- XML ----------------------------------------------------------------------------------------


def write_xml(path, text, vendor="nvidia", switch_links=0):
    """Write a machine as NCCL dumps it; each GPU has that many links to each of two NVSwitches."""
    system = ElementTree.Element("system", version="2")
    count = {"gpu": 0, "net": 0}
    for node in parse(text):
        mask = sum(1 << cpu for cpu in parse_cpu_list(node.words[1]))
        digits = f"{mask:x}".zfill(-(-len(f"{mask:x}") // 8) * 8)
        words = [digits[start : start + 8] for start in range(0, len(digits), 8)]
        cpu = ElementTree.SubElement(system, "cpu", numaid=node.words[0], affinity=",".join(words))
        for bridge in node.below:
            for child in bridge.below:
                add_pci(cpu, child, vendor, switch_links, count)
    ElementTree.ElementTree(system).write(path)
    return path


def add_pci(above, node, vendor, switch_links, count):
    kind = {"switch": "0x060400", "nic": "0x020700", "gpu": GPU_CLASSES[vendor]}[node.kind]
    maker = VENDORS[vendor] if node.kind == "gpu" else "0x15b3"
    pci = ElementTree.SubElement(above, "pci", {"busid": node.address.upper(), "class": kind})
    pci.set("vendor", maker)
    if node.kind == "gpu":
        gpu = ElementTree.SubElement(pci, "gpu", dev=str(count["gpu"]), rank="0", gdr="1")
        count["gpu"] += 1
        for switch in ("c4", "c5") if switch_links else ():
            target = {"target": f"0000:{switch}:00.0", "tclass": "0x068000"}
            ElementTree.SubElement(gpu, "nvlink", target, count=str(switch_links))
    if node.kind == "nic":
        nic = ElementTree.SubElement(pci, "nic")
        name, number = node.words[1], str(count["net"])
        ElementTree.SubElement(nic, "net", name=name, dev=number, speed="400000", port="1")
        count["net"] += 1
    for child in node.below:
        add_pci(pci, child, vendor, switch_links, count)


# --- public machines ----------------------------------------------------------------------------


def mi300x():
    """Return eight MI300X with a 400 Gbit/s NIC each.

    After ROCm/rccl tools/topo_expl/models/topo_8p_940.xml: each GPU sits behind two switches and
    its own, on the first of which sits its NIC.
    """
    lines = []
    nodes = (
        (
            0,
            "0-55,112-167",
            ("05 08 0a 0c 07", "0e 11 13 15 10", "17 1a 1c 1e 19", "62 65 67 69 64"),
        ),
        (
            1,
            "56-111,168-223",
            ("98 9b 9d 9f 9a", "a8 ab ad af aa", "b8 bb bd bf ba", "d8 db dd df da"),
        ),
    )
    nic = 0
    for node, cpus, groups in nodes:
        lines.append(f"node {node} {cpus}")
        for group in groups:
            first, second, own, gpu, nic_bus = group.split()
            lines += [
                f" bridge {first}",
                f"  switch {first}",
                f"   switch {second}",
                f"    switch {own}",
                f"     gpu {gpu}",
                f"   nic {nic_bus} mlx5_{nic}",
            ]
            nic += 1
    return "\n".join(lines)


DGX_A100 = """
node 0 0-15,128-143
 bridge 60
  nic 61.0 mlx5_8
  nic 61.1 mlx5_9
node 1 16-31,144-159
 bridge 40
  switch 41
   switch 45
    gpu 47
   switch 49
    nic 4b mlx5_2
    switch 4c
     gpu 4e
   switch 52
    nic 54 mlx5_3
node 3 48-63,176-191
 bridge 00
  switch 01
   switch 05
    gpu 07
   switch 0a
    nic 0c mlx5_0
    switch 0d
     gpu 0f
   switch 10
    nic 12 mlx5_1
node 5 80-95,208-223
 bridge b0
  switch b1
   switch b5
    gpu b7
   switch b8
    nic ba mlx5_6
    switch bb
     gpu bd
   switch ca
    nic cc mlx5_7
node 7 112-127,240-255
 bridge 80
  switch 81
   switch 85
    gpu 87
   switch 8b
    nic 8d mlx5_4
    switch 8e
     gpu 90
   switch 92
    nic 94 mlx5_5
"""
"""DGX A100: two GPUs and two NICs below one outer switch, on four of eight NUMA nodes; two ports
for storage on another. After the XML in NVIDIA/nccl issue 1505 and the matrix in NVIDIA/DCGM issue
149; which inner switch a NIC shares is partly a guess, which no distance depends on."""


DGX_H100_GPUS = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")


def dgx_h100():
    """Return a DGX H100: a NIC for each GPU behind the same outer switch; two cards for storage.

    After the ``nvidia-smi topo -m`` in bytedance/flux issue 14 and sgl-project/sglang pull 9812: of
    twelve NICs, 0 3 4 5 6 9 10 11 are those of GPU 0 to 7; 1 and 2, and 7 and 8, are the two ports
    of a card each. The numbers of the buses are made up.
    """
    lines = []
    nics = [[0, 3, 4, 5], [6, 9, 10, 11]]
    gpus = [DGX_H100_GPUS[:4], DGX_H100_GPUS[4:]]
    storage = [("29", 1), ("aa", 7)]
    for node, cpus in ((0, "0-55,112-167"), (1, "56-111,168-223")):
        lines.append(f"node {node} {cpus}")
        for gpu, nic in zip(gpus[node], nics[node], strict=True):
            bus = int(gpu, 16)
            lines += [
                f" bridge {bus - 8:02x}",
                f"  switch {bus - 7:02x}",
                f"   nic {bus - 4:02x} mlx5_{nic}",
                f"   switch {bus - 2:02x}",
                f"    gpu {gpu}",
            ]
        card, first = storage[node]
        lines.append(f" bridge {card}")
        lines += [f"  nic {card}.{port} mlx5_{first + port}" for port in range(2)]
    return "\n".join(lines)
