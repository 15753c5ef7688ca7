"""Scratch memory on the GPU: one piece, used by one call after the other, on any stream.

Captured graphs use another piece, which stays in place as long as the communicator exists, because
a graph may be launched at any time. All graphs share it: calls of one communicator that run at the
same time would wait for each other anyway.
"""

from __future__ import annotations

import time

from gpucoll.devices import Device

_PATIENCE_S = 1.0
"""How long a closed communicator's remaining copies may take."""
_PAUSE_S = 1e-3


class Scratch:
    """A piece of GPU memory that grows.

    Parameters
    ----------
    device : Device
        The device whose memory it is.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._address = self._size_bytes = self._event = 0
        self._in_graphs: list[int] = []
        self._graph_bytes = 0
        """Size of the last piece for graphs."""

    def is_outgrown_by(self, size_bytes: int) -> bool:
        """Return whether `reserve` would free the piece, which waits for the work that uses it."""
        return 0 < self._size_bytes < size_bytes

    def reserve(self, size_bytes: int) -> None:
        """Make the piece at least this large; MemoryError if the GPU has too little memory."""
        if size_bytes > self._size_bytes:
            if self._address:
                self._device.free(self._address)  # waits for the work that uses it
                self._address = self._size_bytes = 0
            self._address, self._size_bytes = self._device.allocate(size_bytes), size_bytes

    def reserve_for_graph(self, size_bytes: int) -> None:
        """Make the graphs' piece at least this large; MemoryError if there is too little memory."""
        if size_bytes > self._graph_bytes:
            with self._device.relaxed_capture():  # existing graphs keep their pieces
                self._in_graphs.append(self._device.allocate(size_bytes))
            self._graph_bytes = size_bytes

    @property
    def of_graphs(self) -> int:
        """The memory of captured calls."""
        return self._in_graphs[-1]

    @property
    def is_idle(self) -> bool:
        """Whether no work uses it any more. The device is current."""
        return not self._event or self._device.query_event(self._event) != self._device.not_ready

    def take(self, stream: int) -> int:
        """Return the memory for later work on the stream, which waits for the previous user."""
        if self._event:
            code = self._device.stream_wait_event(stream, self._event, 0)
            self._device.check(code, "make a stream wait")
        return self._address

    def give_back(self, stream: int) -> None:
        """Note that the present work on the stream is the last that uses the memory."""
        if not self._event:
            self._event = self._device.create_event()
        self._device.check(self._device.record_event(self._event, stream), "record an event")

    def abandon(self) -> None:
        """Free the memory once no work uses it; memory that stays in use longer is left.

        Freeing would wait for that without a deadline. The device is current.
        """
        due_s = time.monotonic() + _PATIENCE_S
        while self._event and not self._device.is_event_done(self._event):
            if time.monotonic() > due_s:
                return
            time.sleep(_PAUSE_S)
        self.close()

    def close(self) -> None:
        """Free the memory."""
        if self._address:
            self._device.free(self._address)
        if self._event:
            self._device.destroy_event(self._event)
        while self._in_graphs:
            self._device.free(self._in_graphs.pop())
        self._address = self._size_bytes = self._event = self._graph_bytes = 0
