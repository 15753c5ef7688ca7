"""Read where GPUs and NICs sit from NCCL's XML: NCCL_TOPO_DUMP_FILE's and NCCL_TOPO_FILE's format.

``system`` contains a ``cpu`` for each NUMA node. That contains its ``pci`` devices, nested like the
switches. Below the last one there is a ``gpu`` with its ``nvlink`` or ``xgmi``, or a ``nic`` with a
``net`` for each port (NVIDIA/nccl, ``src/graph/xml.cc`` and ``topo.cc``). Files that were written
by hand for virtual machines leave ``gpu`` and ``nic`` out; then the PCI class tells what a device
is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from gpucoll.errors import ArgumentError
from gpucoll.topology.machine import SWITCH, UNKNOWN_NODE, Gpu, Machine, Nic, Place
from gpucoll.topology.sysfs import GPU_VENDORS, natural_key

_MAX_BYTES = 16 << 20  # NCCL's own limit of nodes makes files of some 100 KiB
_NVSWITCH_CLASS = "0x0680"
_GPU_CLASSES = ("0x03", "0x12")
_NETWORK_CLASS = "0x02"


def read_xml(path: Path | str) -> Machine:
    """Return the GPUs and NICs that a topology file describes.

    Of a file with several hosts (multi-node NVLink), it returns those of the first host.

    Raises
    ------
    ArgumentError
        The file cannot be read, or is not such XML; the message tells where.
    """
    system = _parse(Path(path))
    cpus = system.findall("cpu")
    hosts = {cpu.get("host_hash"): None for cpu in cpus}
    first = next(iter(hosts), None)
    gpus: list[tuple[int, Gpu]] = []
    nics: list[Nic] = []
    for cpu in cpus:
        if cpu.get("host_hash") == first:
            place = Place(
                address="",
                numa_node=_integer(cpu, "numaid", UNKNOWN_NODE),
                cpus=_cpus_of_mask(cpu.get("affinity", "")),
            )
            for element in cpu:
                _collect(element, place, gpus, nics)
    gpus.sort(key=lambda entry: (entry[0], entry[1].place.address))
    nics.sort(key=lambda nic: natural_key(nic.name))
    return Machine(tuple(gpu for _, gpu in gpus), tuple(nics), str(path))


def _parse(path: Path) -> ElementTree.Element:
    try:
        size_bytes = path.stat().st_size
        if not path.is_file() or size_bytes > _MAX_BYTES:
            raise ArgumentError(
                f"topology file {path} is no file, or larger than {_MAX_BYTES >> 20} MiB"
            )
        text = path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"topology file {path} cannot be read: {error.strerror}") from error
    if b"<!DOCTYPE" in text or b"<!ENTITY" in text:
        raise ArgumentError(f"topology file {path} declares entities, which NCCL's never do")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ArgumentError(f"topology file {path} is no XML: {error}") from error
    if root.tag != "system":
        raise ArgumentError(
            f"topology file {path} is no NCCL topology: its root is <{root.tag}>, not <system>"
        )
    return root


def _collect(
    element: ElementTree.Element, above: Place, gpus: list[tuple[int, Gpu]], nics: list[Nic]
) -> None:
    """Add the devices at or below one element; `above` is the place that it is attached to."""
    if element.tag == "nic":
        nics.extend(_nets(element, above))
    if element.tag != "pci":
        return
    address = element.get("busid", "").lower()
    place = Place(address, above.switches, above.host_bridge, above.numa_node, above.cpus)
    inner = Place("", (*above.switches, address), None, above.numa_node, above.cpus)
    kind = element.get("class", "").lower()
    gpu = element.find("gpu")
    if gpu is not None or kind.startswith(_GPU_CLASSES):
        gpus.append(_gpu(element, gpu, place))
    nic = element.find("nic")
    if nic is not None:
        nics.extend(_nets(nic, place))
    elif kind.startswith(_NETWORK_CLASS):
        nics.append(Nic(address, place, is_rdma=True))
    for child in element.findall("pci"):
        _collect(child, inner, gpus, nics)


def _gpu(
    pci: ElementTree.Element, gpu: ElementTree.Element | None, place: Place
) -> tuple[int, Gpu]:
    """Return a GPU with its number, which is its ``dev``."""
    inner = [] if gpu is None else [*gpu.findall("nvlink"), *gpu.findall("xgmi")]
    # Older files do not name the vendor; RCCL's have AMD's architecture in `gcn`.
    is_amd = gpu is not None and (gpu.get("gcn") is not None or gpu.find("xgmi") is not None)
    known = GPU_VENDORS.get(_integer(pci, "vendor", 0))
    links: dict[str, int] = {}
    for link in inner:
        target, kind = link.get("target", "").lower(), link.get("tclass", "").lower()
        if kind.startswith(_NVSWITCH_CLASS):
            target = SWITCH
        elif kind and not kind.startswith(_GPU_CLASSES):
            continue  # to a CPU
        links[target] = links.get(target, 0) + _integer(link, "count", 1)
    number = -1 if gpu is None else _integer(gpu, "dev", -1)
    return number, Gpu(place, known or ("amd" if is_amd else "nvidia"), None, links)


def _nets(nic: ElementTree.Element, place: Place) -> Iterator[Nic]:
    for net in nic.findall("net"):
        name = net.get("name") or f"net{net.get('dev', '?')}"
        yield Nic(
            name=name,
            place=place if place.address else Place(name, (), None, place.numa_node, place.cpus),
            is_rdma=True,
            speed_mbps=_integer(net, "speed", 0) or None,
        )


def _integer(element: ElementTree.Element, name: str, default: int) -> int:
    text = element.get(name)
    if text is None:
        return default
    try:
        return int(text, 16 if text.lower().startswith("0x") else 10)
    except ValueError:
        raise ArgumentError(
            f"topology file: <{element.tag} {name}={text!r}> should be a whole number"
        ) from None


def _cpus_of_mask(text: str) -> tuple[int, ...]:
    """Return the CPUs of a mask as the kernel prints it: ``00ff,ffff0000``, 32 CPUs per word."""
    try:
        mask = int("".join(word.zfill(8) for word in text.split(",") if word) or "0", 16)
    except ValueError:
        raise ArgumentError(f"topology file: affinity={text!r} should be a mask of CPUs") from None
    return tuple(cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1)
