"""The program of a trial: ``python -m gpucoll.backends.mpi.gpu_trial_program KIND NUMBER``.

MPI sends GPU memory to this same process, as the loop does: nonblocking, as bytes. If MPI does not
support the memory, the process is killed by a signal, hangs, or finds other bytes. Then the program
does so again while the default stream is blocked, as it is in calls on that stream until MPI has
moved their pieces. An MPI that copies on the default stream, or on a stream that is ordered with
it, would never finish.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from gpucoll.backends.mpi.library import import_mpi
from gpucoll.devices import Device, open_device
from gpucoll.transport.shared import ordering

SIZES_BYTES = (8, 5000, (1 << 20) + 4)
"""Sizes that MPIs send in different ways: with the envelope, eagerly, and after a handshake."""
PASSED = "the bytes are the same"
HELD_S = 5.0
"""How long the default stream is blocked; a message takes a millisecond."""
DEFAULT_STREAM = 0
LIMIT_S = 60
"""The process ends itself after this time if nothing else ends it."""


def main(kind: str, number: str) -> None:
    """Send and receive; raise the error if it fails."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIMIT_S)
    mpi = import_mpi()  # first, as in ranks
    device = open_device(kind, int(number))
    with device:
        for size_bytes in SIZES_BYTES:
            send_to_self(mpi, device, size_bytes)
        for size_bytes in SIZES_BYTES:
            send_to_self(mpi, device, size_bytes, is_held=True)
    sys.stdout.write(f"{PASSED}\n")
    sys.stdout.flush()


@contextmanager
def default_stream_held(device: Device) -> Iterator[None]:
    """Block the default stream within the block; raise if the block's work waits for it."""
    word = device.allocate_pinned(8)
    ordering.store(word, 0)
    device.check(device.stream_wait_value(DEFAULT_STREAM, word, 1), "make its stream wait")
    timer = threading.Timer(HELD_S, ordering.store, (word, 1))
    timer.start()
    try:
        yield
        has_waited = ordering.load(word) != 0
    finally:
        timer.cancel()
        ordering.store(word, 1)
        device.synchronize_stream(DEFAULT_STREAM)
    device.free_pinned(word)
    if has_waited:
        raise SystemExit(
            "its copies wait for the default stream of CUDA or HIP: a call on that, as CuPy's and "
            "PyTorch's are unless a program says otherwise, would never end"
        )


def send_to_self(mpi: Any, device: Device, size_bytes: int, *, is_held: bool = False) -> None:
    """Send and receive `size_bytes`; with `is_held` while the default stream is blocked."""
    # No byte equals the filling of the destination: every byte that does not arrive is noticed.
    sent = os.urandom(size_bytes).replace(b"\0", b"\1")
    landed = bytearray(size_bytes)
    source, destination = device.allocate(size_bytes), device.allocate(size_bytes)
    stream = device.create_stream()
    given = ctypes.create_string_buffer(sent, size_bytes)
    found = (ctypes.c_char * size_bytes).from_buffer(landed)
    device.copy(source, ctypes.addressof(given), size_bytes, stream)
    device.fill(destination, b"\0", size_bytes, stream)
    device.synchronize_stream(stream)
    memory = getattr(mpi, "buffer", None) or mpi.memory
    with default_stream_held(device) if is_held else nullcontext():
        requests = [
            mpi.COMM_SELF.Irecv([memory.fromaddress(destination, size_bytes), mpi.BYTE], source=0),
            mpi.COMM_SELF.Isend([memory.fromaddress(source, size_bytes), mpi.BYTE], dest=0),
        ]
        mpi.Request.Waitall(requests)
    device.copy(ctypes.addressof(found), destination, size_bytes, stream)
    device.synchronize_stream(stream)
    if landed != sent:
        raise SystemExit(f"of {size_bytes} bytes sent, some came back different")


if __name__ == "__main__":
    main(*sys.argv[1:])
