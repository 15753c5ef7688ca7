"""The copy within a GPU with which calls on its arrays are compared."""

from __future__ import annotations

from functools import partial

from gpucoll.bench.rank.arrays import Arrays
from gpucoll.bench.rank.library import Array, Call, Loop
from gpucoll.bench.rank.loops import repeated

__all__ = ["Copies"]


class Copies:
    """Loops of copies by the driver, on the stream of the calls.

    The source is the larger of a call's two arrays, whose size is that of the call. The destination
    is kept from one loop to the next.
    """

    def __init__(self) -> None:
        self._sort: tuple[int, str] = (0, "")
        self._destination: Array = None

    def loop(self, call: Call, arrays: Arrays) -> Loop:
        """Return the loop of copies that are as large as the call."""
        from gpucoll import devices
        from gpucoll.arrays.libraries import library_of
        from gpucoll.arrays.streams import current_stream

        source = max(call.source, call.destination, key=len)
        sort = len(source), call.dtype
        if self._sort != sort:
            self._destination = None  # free it before the next one is allocated
            self._destination, self._sort = arrays.allocate(*sort), sort
        given, written = (library_of(x, "x").look(x, "x") for x in (source, self._destination))
        kind, _, number = given.template.device.partition(":")
        device = devices.open_device(kind, int(number))
        size_bytes = given.template.item_bytes * len(source)
        stream = current_stream(given.template)
        copy = partial(device.copy, written.address, given.address, size_bytes, stream)
        copies = repeated(copy, wait=partial(_wait, arrays, source, self._destination))

        def run(reps: int) -> float:
            with device:  # the array library may have made another device current in this thread
                return copies(reps)

        return run


def _wait(arrays: Arrays, *_kept: Array) -> None:
    """Wait for the copies; the arguments keep their arrays alive as long as the loop."""
    arrays.wait()
