"""Host arrays in calls that other ranks make on GPU arrays: ``init(mixed=True)``.

A stream does not move them: the thread that does the host's part copies between the array and the
slots. So the user's memory need be neither page-locked nor known to any driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import replace

from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.choice import HOST_ARRAYS
from gpucoll.backends.direct.pieces import Copy, Piece, Pieces
from gpucoll.backends.protocol import Request
from gpucoll.devices import Device
from gpucoll.errors import ArgumentError


def is_on_host(request: Request) -> bool:
    """Return whether a request's arrays lie in host memory."""
    return request.data.device == HOST_ARRAYS


def copy_in(copies: Iterable[Copy], slot: int) -> None:
    """Copy the parts of an array into a slot, from which the CPU backend reads."""
    for copy in copies:
        ctypes.memmove(slot + copy.offset, copy.address, copy.size_bytes)


def copy_out(copies: Iterable[Copy], slot: int) -> None:
    """Copy a slot, which the CPU backend has written, to the parts of an array."""
    for copy in copies:
        ctypes.memmove(copy.address, slot + copy.offset, copy.size_bytes)


def number_in_one_piece(request: Request) -> Pieces:
    """Return the call of a Python int in one piece, over its own memory, which keeps all inputs.

    In memory that all ranks of a host share, ranks would reduce for each other and keep no inputs.
    """
    source, out = (
        None if buffer is None else replace(buffer, shape=(1,))
        for buffer in (request.source, request.destination)
    )
    made = request._replace(source=source, destination=out)
    piece = Piece((), (), lambda *_: made)
    return Pieces(1, lambda _: piece)


def on_device(request: Request, device: Device, *, has_gpu: bool) -> Request:
    """Return a compressed call for the kernels of the device that stands for host memory.

    Raises
    ------
    ArgumentError
        The rank has a GPU, whose kernels do not reach host arrays.
    """
    if not is_on_host(request):
        return request
    if has_gpu:
        raise ArgumentError(
            f"all_reduce with compression: x lies in host memory, and this rank has {device.label}:"
            " copy it there first. Only ranks without a GPU compress host arrays where mixed=True"
        )

    def moved(buffer: Buffer) -> Buffer:
        return replace(buffer, device=device.label)

    parts = tuple((moved(x), moved(out)) for x, out in request.parts)
    residuals = tuple(map(moved, request.residuals))
    source, destination = parts[0]
    return request._replace(
        source=source, destination=destination, parts=parts, residuals=residuals
    )
