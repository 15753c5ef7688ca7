"""Reductions by the GPUs' kernels between movements by MPI, in rank order.

All ranks make the same choice, by the call alone.
"""

from __future__ import annotations

from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.direct.host_arrays import is_on_host
from gpucoll.backends.gpu import rank_order
from gpucoll.backends.gpu.composed import Composed
from gpucoll.backends.gpu.steps import Place
from gpucoll.backends.protocol import Request
from gpucoll.devices import Device
from gpucoll.errors import ArgumentTypeError, GpucollError
from gpucoll.kernels.gpu.reduce import prepare_reduce
from gpucoll.types import ReduceOp

STAGED_BYTES = 64 << 10
"""Calls of up to this size go through the host, in one step; kernels need two and a launch."""
_FAR_ADDRESS = 1 << 20
"""Stands in for an address of memory while kernels are only compiled and loaded."""


def composed(request: Request, place: Place, device: str) -> Composed | None:
    """Return the steps of a reduction; None: it is staged, on all ranks."""
    op = request.op
    if op is None or op.function is not None or is_on_host(request):
        return None
    if sum(x.size_bytes for x, _ in request.pairs) <= STAGED_BYTES:
        return None
    try:
        return rank_order.compose(request, place, device)
    except ArgumentTypeError:  # no other rank has such a kernel either
        return None


def problem_of_kernels(device: Device) -> str:
    """Return why this rank's GPU runs no kernels, so that no rank uses them; empty if it does."""
    like = Buffer(_FAR_ADDRESS, (1,), "float32", 4, None, device.label)
    try:
        with device:
            prepare_reduce(ReduceOp.parse("sum"), [like], [like], divisor=1)
    except GpucollError as error:
        return str(error)
    return ""
