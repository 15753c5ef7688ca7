"""Serialisation of objects: `MPI.pickle`."""

from __future__ import annotations

import pickle as _pickle
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gpucoll.integrations.mpi4py.memory import AnyBuffer, buffer

if TYPE_CHECKING:
    from gpucoll.calls.given import AnyObject

_THRESHOLD = 1 << 18


class Pickle:
    """Converts objects to bytes and back. Calling `__init__` replaces its functions.

    Parameters
    ----------
    dumps, loads : functions, optional
        Default: Python's pickle.
    protocol : int, optional
        Passed to `dumps` if that is pickle's.
    threshold : int, optional
        Size in bytes from which on `dumps_oob` returns a buffer separately. The calls of this
        library never do.
    """

    def __init__(
        self,
        dumps: Callable[..., bytes] | None = None,
        loads: Callable[..., AnyObject] | None = None,
        protocol: int | None = None,
        threshold: int | None = None,
    ) -> None:
        self._dumps = _pickle.dumps if dumps is None else dumps
        self._loads = _pickle.loads if loads is None else loads
        self.PROTOCOL = protocol
        self.THRESHOLD = threshold

    @property
    def PROTOCOL(self) -> int | None:
        """The protocol passed to `dumps`; None if none is passed."""
        return self._protocol

    @PROTOCOL.setter
    def PROTOCOL(self, protocol: int | None) -> None:
        is_pickles = self._dumps is _pickle.dumps
        self._protocol = _pickle.HIGHEST_PROTOCOL if protocol is None and is_pickles else protocol

    @property
    def THRESHOLD(self) -> int:
        """Size in bytes from which on `dumps_oob` returns a buffer separately."""
        return self._threshold

    @THRESHOLD.setter
    def THRESHOLD(self, threshold: int | None) -> None:
        self._threshold = _THRESHOLD if threshold is None else threshold

    def dumps(self, obj: AnyObject) -> bytes:
        """Convert an object to bytes."""
        if self.PROTOCOL is None:
            return self._dumps(obj)
        return self._dumps(obj, self.PROTOCOL)

    def loads(self, data: AnyBuffer) -> AnyObject:
        """Convert bytes to an object."""
        return self._loads(data)

    def dumps_oob(self, obj: AnyObject) -> tuple[bytes, list[buffer]]:
        """Convert an object to bytes, and return the large buffers in it separately."""
        buffers: list[Any] = []

        def is_within(item: AnyBuffer) -> bool:
            shown = buffer.frombuffer(item, readonly=True)
            if shown.nbytes < self.THRESHOLD:
                return True
            buffers.append(shown)
            return False

        protocol = max(self.PROTOCOL or _pickle.HIGHEST_PROTOCOL, 5)
        return self._dumps(obj, protocol, buffer_callback=is_within), buffers

    def loads_oob(self, data: AnyBuffer, buffers: Iterable[AnyBuffer]) -> AnyObject:
        """Restore an object from the results of `dumps_oob`."""
        return self._loads(data, buffers=buffers)


pickle = Pickle()
