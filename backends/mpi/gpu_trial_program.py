"""What a trial's process runs: ``python -m gpucoll.backends.mpi.gpu_trial_program KIND NUMBER``.

MPI sends memory of a GPU to this process itself, as the loop does: nonblocking, bytes. Where it
does not know the memory the process ends in a signal, hangs, or finds other bytes.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from typing import Any

from gpucoll.backends.mpi.library import import_mpi
from gpucoll.devices import Device, open_device

SIZES_BYTES = (8, 5000, (1 << 20) + 4)
"""What MPIs send in different ways: with the envelope, at once, and when the receiver is ready."""
PASSED = "the bytes are the same"
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
            _send_to_self(mpi, device, size_bytes)
    sys.stdout.write(f"{PASSED}\n")
    sys.stdout.flush()


def _send_to_self(mpi: Any, device: Device, size_bytes: int) -> None:
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
