"""How objects become bytes: `MPI.pickle`."""

from __future__ import annotations

import pickle as _pickle
from collections.abc import Callable
from typing import Any

from gpucoll.integrations.mpi4py.memory import buffer

_THRESHOLD = 1 << 18


class Pickle:
    """Turns objects into bytes and back; others can be put in its place by calling `__init__`.

    Parameters
    ----------
    dumps, loads : functions, optional
        Default: Python's pickle.
    protocol : int, optional
        Passed to `dumps` where that is pickle's.
    threshold : int, optional
        From how many bytes on `dumps_oob` gives a buffer apart. The calls of this library send
        nothing apart.
    """

    def __init__(
        self,
        dumps: Callable[..., bytes] | None = None,
        loads: Callable[..., Any] | None = None,
        protocol: int | None = None,
        threshold: int | None = None,
    ) -> None:
        self._dumps = _pickle.dumps if dumps is None else dumps
        self._loads = _pickle.loads if loads is None else loads
        self.PROTOCOL = protocol
        self.THRESHOLD = threshold

    @property
    def PROTOCOL(self) -> int | None:
        """What `dumps` is told; None: nothing."""
        return self._protocol

    @PROTOCOL.setter
    def PROTOCOL(self, protocol: int | None) -> None:
        is_pickles = self._dumps is _pickle.dumps
        self._protocol = _pickle.HIGHEST_PROTOCOL if protocol is None and is_pickles else protocol

    @property
    def THRESHOLD(self) -> int:
        """From how many bytes on `dumps_oob` gives a buffer apart."""
        return self._threshold

    @THRESHOLD.setter
    def THRESHOLD(self, threshold: int | None) -> None:
        self._threshold = _THRESHOLD if threshold is None else threshold

    def dumps(self, obj: Any) -> bytes:
        """Return an object as bytes."""
        if self.PROTOCOL is None:
            return self._dumps(obj)
        return self._dumps(obj, self.PROTOCOL)

    def loads(self, data: Any) -> Any:
        """Return the object that some bytes are."""
        return self._loads(data)

    def dumps_oob(self, obj: Any) -> tuple[bytes, list[Any]]:
        """Return an object as bytes, and the large buffers in it as they lie."""
        buffers: list[Any] = []

        def is_within(item: Any) -> bool:
            shown = buffer.frombuffer(item, readonly=True)
            if shown.nbytes < self.THRESHOLD:
                return True
            buffers.append(shown)
            return False

        protocol = max(self.PROTOCOL or _pickle.HIGHEST_PROTOCOL, 5)
        return self._dumps(obj, protocol, buffer_callback=is_within), buffers

    def loads_oob(self, data: Any, buffers: Any) -> Any:
        """Return the object that `dumps_oob` has taken apart."""
        return self._loads(data, buffers=buffers)


pickle = Pickle()
