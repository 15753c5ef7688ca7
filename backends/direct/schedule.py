"""The choice between shares and a ring, for calls through GPU memory that the ranks share.

Rank 0 decides by what connects the GPUs, and tells the others. Shares move each byte from any GPU
to any other, in two waits. A ring moves as many bytes, but between neighbours only: on a bus, where
transfers of distant GPUs hold each other up, those of neighbours go on side by side.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Final, NamedTuple

from gpucoll.devices import Device
from gpucoll.errors import GpucollError
from gpucoll.topology.cpus import FILE_SYSTEM
from gpucoll.topology.gpu_network import machine_of
from gpucoll.topology.machine import gpu_label, links_between
from gpucoll.topology.nvlinks import nvlinks, with_nvlinks

RING: Final = "ring"
LEAST_RANKS: Final = 3
"""With two ranks, a ring has the bytes of shares and more waits."""


class Schedule(NamedTuple):
    """How calls go through shared GPU memory; the same on all ranks."""

    is_ring: bool
    around: tuple[int, ...]
    """The ranks in the order of the ring: in that of the PCI bus, whose neighbours are near."""
    why: str

    def __str__(self) -> str:
        if not self.is_ring:
            return f"shares: {self.why}"
        return f"ring of ranks {', '.join(map(str, self.around))}: {self.why}"


def agree(device: Device, rank: int, wish: str, gather: Callable[[bytes], list[bytes]]) -> Schedule:
    """Return the schedule of all ranks, which are on one host; every rank calls it.

    Parameters
    ----------
    device : Device
        This rank's GPU.
    rank : int
        This rank.
    wish : {"auto", "shares", "ring"}
        The same on all ranks.
    gather : callable
        Distributes this rank's bytes and returns those of all ranks, by rank.
    """
    identity = device.identity
    mine = json.dumps([identity.pci_bus_id, identity.uuid]).encode()
    gpus = [tuple(json.loads(each)) for each in gather(mine)]
    around = sorted(range(len(gpus)), key=lambda rank: (gpus[rank][0], rank))
    decided = decide(device.kind, wish, gpus) if rank == 0 else (False, "")
    is_ring, why = json.loads(gather(json.dumps(decided).encode())[0])
    return Schedule(is_ring, tuple(around), why)


def decide(
    kind: str, wish: str, gpus: Sequence[tuple[str, str]], root: Path = FILE_SYSTEM
) -> tuple[bool, str]:
    """Return whether a ring is to be used, and why.

    Parameters
    ----------
    kind : str
        The kind of the devices.
    wish : {"auto", "shares", "ring"}
    gpus : sequence of (str, str)
        PCI address and UUID of each rank's GPU.
    root : Path
        The file system whose ``/sys`` is read.
    """
    if wish != "auto":
        return wish == RING and len(gpus) > 1, "asked for"
    if len(gpus) < LEAST_RANKS:
        return False, f"a ring pays with {LEAST_RANKS} GPUs and more"
    if len({uuid for _, uuid in gpus}) < len(gpus):
        return False, "some ranks share a GPU"
    try:
        machine = machine_of(dict(os.environ), root)
    except (GpucollError, OSError, ValueError) as error:
        return False, f"not known how GPUs are connected: {error}"
    links = nvlinks() if kind == "cuda" else {}
    places = {gpu.place.address: gpu for gpu in with_nvlinks(machine, links or {}).gpus}
    missing = [address for address, _ in gpus if address not in places]
    if missing:
        return False, f"not known how GPUs are connected: {machine.source} lacks {missing[0]}"
    pairs = combinations(range(len(gpus)), 2)
    for first, second in pairs:
        a, b = (places[gpus[rank][0]] for rank in (first, second))
        if not links_between(a, b):
            if links is None and not a.links:
                return False, "not known how GPUs are connected: NVML does not report NVLinks"
            return True, f"the GPUs of ranks {first} and {second} share a bus ({gpu_label(a, b)})"
    return False, f"all GPUs are linked ({gpu_label(a, b)})"
