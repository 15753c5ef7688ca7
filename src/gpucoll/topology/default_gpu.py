"""The GPU that a rank takes by default: that of its local rank among those that it sees.

The vendors' drivers hide GPUs by environment variables, and number the visible ones from 0. Batch
systems set these variables either for each rank alone (it then sees one GPU, number 0) or for all
ranks alike (each rank then takes its own GPU).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpucoll import config


class DefaultGpu(NamedTuple):
    """The GPU of a rank."""

    number: int
    """Its number among the GPUs that the process sees, which array libraries use."""
    identity: str
    """Its number on the host in the driver's order, or its UUID as the environment names it."""


def visible_gpus(vendor: str, gpu_count: int, variables: Mapping[str, str]) -> list[str]:
    """Return which of a host's GPUs a process sees, in its own order.

    Parameters
    ----------
    vendor : str
        ``"nvidia"`` or ``"amd"``.
    gpu_count : int
        How many GPUs of the vendor the host has.
    variables : mapping
        Those of CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES that are set, as
        `gpucoll.config.visible_devices` returns them.

    Returns
    -------
    list of str
        The GPUs, each by its number on the host or by the UUID in the variable.

    Notes
    -----
    NVIDIA: the first entry that is not a GPU, or that repeats one, hides itself and all entries
    after it. AMD: ROCR_VISIBLE_DEVICES is applied first, then HIP_VISIBLE_DEVICES to the remaining
    GPUs. CUDA_VISIBLE_DEVICES is used if HIP_VISIBLE_DEVICES is not set.
    """
    gpus = [str(number) for number in range(gpu_count)]
    if vendor == "nvidia":
        return _chosen(gpus, variables.get(config.CUDA_VISIBLE_DEVICES))
    gpus = _chosen(gpus, variables.get(config.ROCR_VISIBLE_DEVICES))
    name = config.HIP_VISIBLE_DEVICES
    return _chosen(gpus, variables.get(name, variables.get(config.CUDA_VISIBLE_DEVICES)))


def _chosen(gpus: list[str], text: str | None) -> list[str]:
    if text is None:
        return gpus
    chosen: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        if word.isdecimal() and int(word) < len(gpus):
            gpu = gpus[int(word)]
        elif word.startswith(("GPU-", "MIG-")):
            gpu = word
        else:
            break
        if gpu in chosen:
            break
        chosen.append(gpu)
    return chosen


def default_number(local_rank: int, visible_count: int) -> int | None:
    """Return the number of the visible GPU that a rank takes; None: it sees none.

    If a host has more ranks than GPUs, ranks share: rank 8 of eight GPUs takes the first one.
    """
    return local_rank % visible_count if visible_count else None


def default_gpu(
    local_rank: int, vendor: str, gpu_count: int, variables: Mapping[str, str]
) -> DefaultGpu | None:
    """Return the GPU that a rank takes (`default_number`), and its identity on the host.

    Parameters
    ----------
    local_rank : int
        The rank's number on its host.
    vendor, gpu_count, variables
        As for `visible_gpus`.
    """
    visible = visible_gpus(vendor, gpu_count, variables)
    number = default_number(local_rank, len(visible))
    return None if number is None else DefaultGpu(number, visible[number])
