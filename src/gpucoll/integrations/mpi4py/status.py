"""`Status`: what a receive returned."""

from __future__ import annotations

from gpucoll.integrations.mpi4py.constants import ANY_SOURCE, ANY_TAG, PROC_NULL, UNDEFINED
from gpucoll.integrations.mpi4py.datatypes import BYTE, Datatype


class Status:
    """The source, tag, error, size and cancellation of a message."""

    __slots__ = ("__weakref__", "_bytes", "_cancelled", "_elements", "error", "source", "tag")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, status: Status | None = None) -> None:
        if status is not None and not isinstance(status, Status):
            raise TypeError(f"expecting Status, got {type(status).__name__}")
        self.fill(ANY_SOURCE, ANY_TAG, 0)
        self.error = 0
        if status is not None:
            self.__setstate__(status.__getstate__())

    def fill(self, source: int, tag: int, size_bytes: int) -> None:
        """Set the source, tag and size of a message."""
        self.source, self.tag, self._bytes, self._cancelled = source, tag, size_bytes, False

    def fill_null(self) -> None:
        """Set the values of a message from PROC_NULL."""
        self.fill(PROC_NULL, ANY_TAG, 0)

    def clear(self) -> None:
        """Set the values of an empty status."""
        self.fill(ANY_SOURCE, ANY_TAG, 0)
        self.error = 0

    def Get_source(self) -> int:
        return self.source

    def Set_source(self, source: int) -> None:
        self.source = source

    def Get_tag(self) -> int:
        return self.tag

    def Set_tag(self, tag: int) -> None:
        self.tag = tag

    def Get_error(self) -> int:
        return self.error

    def Set_error(self, error: int) -> None:
        self.error = error

    def Get_count(self, datatype: Datatype = BYTE) -> int:
        """Return the number of items of a datatype; UNDEFINED if it is not whole."""
        size = datatype.Get_size()
        if size == 0:
            return 0 if self._bytes == 0 else UNDEFINED
        return self._bytes // size if self._bytes % size == 0 else UNDEFINED

    def Get_elements(self, datatype: Datatype) -> int:
        """Return the number of basic elements."""
        type_map = datatype._map()
        if type_map.element is None:
            count = self.Get_count(datatype)
            return count * len(type_map.runs) if count != UNDEFINED else UNDEFINED
        item = type_map.element.itemsize
        return self._bytes // item if self._bytes % item == 0 else UNDEFINED

    def Set_elements(self, datatype: Datatype, count: int) -> None:
        self._bytes = count * datatype.Get_size()

    def Is_cancelled(self) -> bool:
        return self._cancelled

    def Set_cancelled(self, flag: bool) -> None:
        self._cancelled = bool(flag)

    count = property(Get_count, lambda self, count: self.Set_elements(BYTE, count))
    cancelled = property(Is_cancelled, Set_cancelled)

    def tomemory(self) -> memoryview:
        """Return the five numbers of the status as memory."""
        numbers = (self.source, self.tag, self.error, self._bytes, int(self._cancelled))
        data = b"".join(item.to_bytes(8, "little", signed=True) for item in numbers)
        return memoryview(bytearray(data))

    def __getstate__(self) -> dict[str, int]:
        return {
            "source": self.source, "tag": self.tag, "error": self.error,
            "count": self._bytes, "cancelled": self._cancelled,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, int]) -> None:
        self.fill(state["source"], state["tag"], state["count"])
        self.error, self._cancelled = state["error"], bool(state["cancelled"])

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (), self.__getstate__()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Status):
            return NotImplemented
        return self.__getstate__() == other.__getstate__()
