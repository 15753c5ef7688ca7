"""A trial whether GPUs read what other GPUs have written, by copies and by a kernel as calls do.

The same tells whether a GPU writes into another one's memory, as a ring needs.

Some drivers report that they can although the link between the GPUs does not carry the data, or
delivers stale data. So each rank writes a token and reads those of all others, twice.
"""

from __future__ import annotations

import ctypes
import secrets
import time
from collections.abc import Callable
from typing import Final

from gpucoll.arrays.buffer import Buffer
from gpucoll.devices import Device
from gpucoll.errors import BackendError
from gpucoll.kernels.gpu.reduce import prepare_reduce

TOKEN_BYTES: Final = 64
TRIAL_BYTES: Final = 4 * TOKEN_BYTES
"""Of this rank's memory: for what a trial reads, and for the first launch of a kernel."""
LIMIT_S: Final = 10.0
"""Time limit for some copies of a few bytes: a GPU that takes longer will not respond."""
_PAUSE_S: Final = 1e-4


class PeerTrial:
    """Writes tokens into GPU memory, and reads the tokens of others.

    Parameters
    ----------
    device : Device
        This rank's GPU.
    scratch : int
        `TRIAL_BYTES` of this GPU's memory.
    """

    def __init__(self, device: Device, scratch: int) -> None:
        self._device, self._scratch = device, scratch
        self._host = device.allocate_pinned(2 * TOKEN_BYTES)
        self._stream = device.create_stream()
        self.is_stuck = False
        """Whether the GPU has not done its work, so that nothing that it uses can be freed."""

    def write(self, address: int) -> bytes:
        """Write a new token by means of a kernel, and return it.

        Raises BackendUnavailableError if no kernel can be compiled here.
        """
        token = secrets.token_bytes(TOKEN_BYTES)
        ctypes.memmove(self._host, token, TOKEN_BYTES)
        by_kernel = self._by_kernel(address, self._scratch)
        with self._device:
            self._device.copy(self._scratch, self._host, TOKEN_BYTES, self._stream)
            by_kernel(self._stream)
            self._wait("writing a few bytes into its own memory")
        return token

    def is_read(self, address: int, token: bytes) -> bool:
        """Return whether a copy and a kernel both find the token there."""
        device, size = self._device, TOKEN_BYTES
        ctypes.memset(self._host, 0, 2 * size)
        by_kernel = self._by_kernel(self._scratch + size, address)
        with device:
            device.copy(self._scratch, address, size, self._stream)
            by_kernel(self._stream)
            device.copy(self._host, self._scratch, 2 * size, self._stream)
            self._wait("reading a few bytes of another rank's GPU memory")
        return ctypes.string_at(self._host, 2 * size) == 2 * token

    def close(self) -> None:
        """Free its resources, unless the GPU is stuck."""
        if not self.is_stuck:
            self._device.destroy_stream(self._stream)
            self._device.free_pinned(self._host)

    def _by_kernel(self, destination: int, source: int) -> Callable[[int], None]:
        return prepare_reduce("sum", [self._words(destination)], [self._words(source)])

    def _words(self, address: int) -> Buffer:
        return Buffer(address, (TOKEN_BYTES // 4,), "int32", 4, None, self._device.label)

    def _wait(self, what: str) -> None:
        due_s = time.monotonic() + LIMIT_S
        while not self._device.is_stream_done(self._stream):
            if time.monotonic() > due_s:
                self.is_stuck = True
                raise BackendError(
                    f"{self._device.label}: {what} is not done after {LIMIT_S:g} s: the GPU or its "
                    "link to another one does not answer"
                )
            time.sleep(_PAUSE_S)
