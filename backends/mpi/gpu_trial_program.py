"""What a trial's process runs: ``python -m gpucoll.backends.mpi.gpu_trial_program KIND NUMBER``.

MPI sends memory of a GPU to this process itself, as the loop does: nonblocking, bytes. Where it
does not know the memory the process ends in a signal, hangs, or finds other bytes. Then it does so
once more while the default stream stands still, as that does in calls on it until MPI has moved
their pieces: MPIs that copy by the default stream, or by one that is in order with it, never would.
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
"""What MPIs send in different ways: with the envelope, at once, and when the receiver is ready."""
PASSED = "the bytes are the same"
HELD_S = 5.0
"""So long the default stream stands still: a message takes a millisecond."""
DEFAULT_STREAM = 0
LIMIT_S = 60
"""After so long the process ends itself, should nobody else end it."""


def main(kind: str, number: str) -> None:
    """Send and receive; raise what goes wrong."""
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
    """Let the default stream stand still within the block; raise where the block waits for it."""
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
    """Send and receive that many bytes; with `is_held` while the default stream stands still."""
    # No byte is what the destination is filled with: each that does not arrive is seen.
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
        raise SystemExit(f"of {size_bytes} bytes that were sent others came back")


if __name__ == "__main__":
    main(*sys.argv[1:])
