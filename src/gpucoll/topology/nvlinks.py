"""The probe of NVLinks, which sysfs does not show, through NVML, a part of NVIDIA's driver.

Prototypes follow NVIDIA's nvml.h. This has only been tested through a double, never on a machine
with NVLinks.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Mapping
from ctypes import POINTER, c_char, c_int, c_uint, c_void_p
from dataclasses import replace

from gpucoll.devices.foreign_library import Prototype, bind, open_library
from gpucoll.topology.machine import SWITCH, Machine

LIBRARY = "libnvidia-ml.so.1"
_MAX_LINKS = 64  # 18 on Hopper; asking for a link that a GPU does not have is an error
_TO_SWITCH = 2


class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("bus_id_legacy", c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("pci_device_id", c_uint),
        ("pci_subsystem_id", c_uint),
        ("bus_id", c_char * 32),
    )

    @property
    def address(self) -> str:
        """The address in sysfs's format."""
        return f"{self.domain:04x}:{self.bus:02x}:{self.device:02x}.0"


_PROTOTYPES = (
    Prototype("nvmlInit_v2", ()),
    Prototype("nvmlDeviceGetCount_v2", (POINTER(c_uint),)),
    Prototype("nvmlDeviceGetHandleByIndex_v2", (c_uint, POINTER(c_void_p))),
    Prototype("nvmlDeviceGetPciInfo_v3", (c_void_p, POINTER(_PciInfo))),
    Prototype("nvmlDeviceGetNvLinkState", (c_void_p, c_uint, POINTER(c_uint))),
    Prototype("nvmlDeviceGetNvLinkRemotePciInfo_v2", (c_void_p, c_uint, POINTER(_PciInfo))),
    Prototype("nvmlDeviceGetNvLinkRemoteDeviceType", (c_void_p, c_uint, POINTER(c_int))),
)


def nvlinks(library: str = LIBRARY) -> dict[str, dict[str, int]] | None:
    """Return GPU -> GPU, or SWITCH -> number of active NVLinks, by PCI address.

    None if NVML is missing, does not start, or is too old to report links.
    """
    try:
        functions = bind(open_library(library), _PROTOTYPES)
    except OSError:
        return None
    if len(functions) < len(_PROTOTYPES) or functions["nvmlInit_v2"]():
        return None
    count = c_uint()
    if functions["nvmlDeviceGetCount_v2"](ctypes.byref(count)):
        return None
    found = {}
    for number in range(count.value):
        handle, place = c_void_p(), _PciInfo()
        if functions["nvmlDeviceGetHandleByIndex_v2"](number, ctypes.byref(handle)):
            continue
        if functions["nvmlDeviceGetPciInfo_v3"](handle, ctypes.byref(place)) == 0:
            found[place.address] = _links(functions, handle)
    return found


def with_nvlinks(machine: Machine, links: Mapping[str, Mapping[str, int]]) -> Machine:
    """Return the machine with the NVLinks of its GPUs added."""
    gpus = (replace(gpu, links=links.get(gpu.place.address, gpu.links)) for gpu in machine.gpus)
    return replace(machine, gpus=tuple(gpus))


def _links(functions: Mapping[str, Callable[..., int]], handle: c_void_p) -> dict[str, int]:
    """Return the destinations of a GPU's active links."""
    targets: Counter[str] = Counter()
    for link in range(_MAX_LINKS):
        is_active, kind, place = c_uint(), c_int(), _PciInfo()
        if functions["nvmlDeviceGetNvLinkState"](handle, link, ctypes.byref(is_active)):
            break
        if not is_active.value:
            continue
        code = functions["nvmlDeviceGetNvLinkRemoteDeviceType"](handle, link, ctypes.byref(kind))
        if code == 0 and kind.value == _TO_SWITCH:
            targets[SWITCH] += 1
            continue
        code = functions["nvmlDeviceGetNvLinkRemotePciInfo_v2"](handle, link, ctypes.byref(place))
        if code == 0:
            targets[place.address] += 1
    return dict(targets)
