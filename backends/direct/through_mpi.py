"""GPU arrays through MPI: whether MPI takes addresses of the ranks' GPUs, the same on all ranks.

It does if the MPI of every rank reports that it can, and a trial on each host has shown it.
Otherwise arrays are staged through host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from gpucoll import config
from gpucoll.backends.choice import HOST_DEVICE
from gpucoll.backends.direct.inner import Inner
from gpucoll.backends.direct.kernel_reductions import STAGED_BYTES, problem_of_kernels
from gpucoll.backends.direct.piece_slots import GPU_SLOT_BYTES, PieceSlots, allocated_on_gpu
from gpucoll.backends.direct.pieces import slot_bytes_for
from gpucoll.backends.mpi import gpu_aware
from gpucoll.devices import Device
from gpucoll.errors import ArgumentError, GpucollError

STAGED = "staged through page-locked host memory"


class OnGpus(NamedTuple):
    """How MPI can use this rank's GPU; the same on all ranks."""

    slots: PieceSlots | None
    """The slots on the GPU that MPI uses; None: it uses host memory."""
    has_kernels: bool
    """Whether GPUs reduce the data that MPI has moved."""
    why: str


def slots_on_gpus(
    device: Device, inner: Inner, timeout_s: float, tell: Callable[[list[Any]], list[Any]]
) -> OnGpus:
    """Return how MPI can use this rank's GPU.

    Every rank must call it.

    Parameters
    ----------
    device : Device
        This rank's GPU.
    inner : Inner
        The group whose arrays go through MPI.
    timeout_s : float
        Time limit of a trial.
    tell : callable
        Distributes this rank's value, and returns the values of all ranks, by rank.
    """
    group, mpi = inner.group, inner.group.over_mpi.mpi
    try:
        answer = gpu_aware.asked(mpi, device.kind)
    except ArgumentError as error:
        answer = gpu_aware.Answer(False, str(error))
    everyone = tell([group.here, answer.may_serve, answer.why])
    hosts = [here for here, _, _ in everyone]
    for rank, (_, may_serve, why) in enumerate(everyone):
        if not may_serve:
            return OnGpus(None, False, f"{STAGED}: MPI of rank {rank}: {why}")
    needs_trial = device.kind != HOST_DEVICE and config.mpi_gpu_arrays() != "trusted"
    first = hosts.index(group.here) == group.rank
    problem = ""
    if needs_trial and first:
        try:
            problem = gpu_aware.tried(mpi, device, timeout_s / 2)  # the others wait for it
        except (GpucollError, OSError, ValueError) as error:
            problem = f"it could not be tried: {error}"
    slots = None
    if not problem:
        slot_bytes = max(GPU_SLOT_BYTES, slot_bytes_for(group.world_size))
        slots, problem = allocated_on_gpu(device, inner, slot_bytes, spans_hosts=len({*hosts}) > 1)
    without_kernels = problem_of_kernels(device) if not problem else ""
    everyone = tell([problem, without_kernels])
    for rank, (text, _) in enumerate(everyone):
        if text:
            if slots is not None:
                slots.close()
            why = f"MPI of rank {rank} says that it takes GPU arrays, but {text}"
            return OnGpus(None, False, f"{STAGED}: {why}")
    shown = f"{answer.why}, and a trial has shown it" if needs_trial else answer.why
    missing = next((f"rank {r}: {text}" for r, (_, text) in enumerate(everyone) if text), "")
    reduced = "staged" + (f" ({missing})" if missing else "")
    if not missing:
        reduced = f"by the GPUs' kernels beyond {STAGED_BYTES} bytes, else staged"
    why = f"movements by MPI's messages between the GPUs ({shown}); reductions {reduced}"
    return OnGpus(slots, not missing, why)
