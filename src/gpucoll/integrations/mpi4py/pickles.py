"""How objects become bytes: `MPI.pickle`."""

from __future__ import annotations

import pickle as _pickle
from collections.abc import Callable
from typing import Any


class Pickle:
    """Turns objects into bytes and back; others can be put in its place by calling `__init__`.

    Parameters
    ----------
    dumps, loads : functions, optional
        Default: Python's pickle.
    protocol : int, optional
        Passed to `dumps` where that is pickle's.
    threshold : int, optional
        Kept; nothing is sent out of band.
    """

    def __init__(
        self,
        dumps: Callable[..., bytes] | None = None,
        loads: Callable[..., Any] | None = None,
        protocol: int | None = None,
        threshold: int | None = None,
    ) -> None:
        takes_protocol = dumps is None or protocol is not None
        self._dumps = _pickle.dumps if dumps is None else dumps
        self._loads = _pickle.loads if loads is None else loads
        self.PROTOCOL = (
            _pickle.HIGHEST_PROTOCOL if takes_protocol and protocol is None else protocol
        )
        self.THRESHOLD = 1 << 18 if threshold is None else threshold

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
        data = _pickle.dumps(obj, _pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
        return data, [item.raw() for item in buffers]

    def loads_oob(self, data: Any, buffers: Any) -> Any:
        """Return the object that `dumps_oob` has taken apart."""
        return _pickle.loads(data, buffers=buffers)


pickle = Pickle()
