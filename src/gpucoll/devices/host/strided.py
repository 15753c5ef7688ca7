"""Copies between arrays that are not contiguous, on a stream: one row of a table per piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.devices.host.device import HostDevice
from gpucoll.kernels.cpu.addresses import PACK, ROW_WORDS, CopyKind, address_of, copy_kernel

_COPY = CopyKind("read", "write")


def copy_elements(
    device: HostDevice,
    destination: npt.NDArray[Any],
    source: npt.NDArray[Any],
    stream: int,
    owners: object,
) -> None:
    """Enqueue a copy between arrays of one shape and dtype, whose memory NumPy does not read.

    `owners` stay alive until it is done; the device is current.
    """
    if not destination.size:
        return
    shape, item_bytes = destination.shape, destination.itemsize
    steps = [list(array.strides) for array in (destination, source)]
    run_bytes, axes = item_bytes, len(shape)
    while axes and (shape[axes - 1] == 1 or all(s[axes - 1] == run_bytes for s in steps)):
        axes -= 1
        run_bytes *= shape[axes]
    starts = [
        array.ctypes.data + _offsets(shape[:axes], strides[:axes])
        for array, strides in ((destination, steps[0]), (source, steps[1]))
    ]
    table = np.zeros((starts[0].size, ROW_WORDS), np.int64)
    table[:, 0] = copy_kernel(_COPY)
    table[:, 1], table[:, 2], table[:, 3] = *starts, run_bytes
    words = address_of(PACK), table.ctypes.data, len(table)
    device.call(stream, [words], (table, owners), "copy elements", kind="copy")


def _offsets(shape: tuple[int, ...], strides: list[int]) -> npt.NDArray[np.int64]:
    """Return the offset of each piece, in bytes."""
    offsets = np.zeros((), np.int64)
    for count, stride in zip(shape, strides, strict=True):
        offsets = offsets[..., None] + np.arange(count, dtype=np.int64) * stride
    return offsets.reshape(-1)
