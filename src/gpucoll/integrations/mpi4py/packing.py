"""Pack and Unpack of datatypes, and address arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpucoll.integrations.mpi4py.datatypes import Datatype
from gpucoll.integrations.mpi4py.errors import argument_error
from gpucoll.integrations.mpi4py.memory import AnyBuffer, memory_of

if TYPE_CHECKING:
    from gpucoll.integrations.mpi4py.communicator import Comm
    from gpucoll.integrations.mpi4py.type_maps import Bytes
    from gpucoll.integrations.mpi4py.typing import Buffer


def _data(given: AnyBuffer, writable: bool) -> Bytes:
    data = memory_of(given, writable).data
    if data is None:
        raise argument_error(
            "arrays on a GPU can only be packed by their own library", "ERR_BUFFER"
        )
    return data


def _count(self: Datatype, data: Bytes) -> int:
    extent = self._map().extent
    return len(data) // extent if extent > 0 else 0


def Pack(
    self: Datatype, inbuf: Buffer, outbuf: Buffer, position: int, comm: Comm | None = None
) -> int:
    """Pack items into another buffer, without gaps; return the position after them."""
    source, into = _data(inbuf, False), _data(outbuf, True)
    packed = self._map().pack(source, 0, _count(self, source))
    row = np.ascontiguousarray(packed).view(np.uint8)
    end = position + len(row)
    if position < 0 or end > len(into):
        raise argument_error(f"{end} bytes do not fit into {len(into)}", "ERR_TRUNCATE")
    into[position:end] = row
    return end


def Unpack(
    self: Datatype, inbuf: Buffer, position: int, outbuf: Buffer, comm: Comm | None = None
) -> int:
    """Unpack items that `Pack` has written; return the position after them."""
    source, into = _data(inbuf, False), _data(outbuf, True)
    end = position + _count(self, into) * self._map().size
    if position < 0 or end > len(source):
        raise argument_error(
            f"{end} bytes are needed, but the buffer has {len(source)}", "ERR_TRUNCATE"
        )
    self._map().unpack(source[position:end], into, 0)
    return end


def Pack_size(self: Datatype, count: int, comm: Comm | None = None) -> int:
    """Return the packed size of `count` items, in bytes."""
    return count * self._map().size


def _swapped(self: Datatype, row: Bytes, count: int) -> Bytes:
    dtype = self._map().element
    if dtype is None:
        raise argument_error(
            "external32 supports only datatypes made of one basic type", "ERR_TYPE"
        )
    return row.view(dtype).byteswap().view(np.uint8) if np.little_endian else row


def Pack_external(
    self: Datatype, datarep: str, inbuf: Buffer, outbuf: Buffer, position: int
) -> int:
    """Pack items in the byte order of external32; return the position after them."""
    end = Pack(self, inbuf, outbuf, position)
    into = _data(outbuf, True)
    into[position:end] = _swapped(self, into[position:end].copy(), 0)
    return end


def Unpack_external(
    self: Datatype, datarep: str, inbuf: Buffer, position: int, outbuf: Buffer
) -> int:
    """Unpack items in the byte order of external32; return the position after them."""
    into, source = _data(outbuf, True), _data(inbuf, False)
    end = position + _count(self, into) * self._map().size
    row = _swapped(self, source[position:end].copy(), 0)
    return position + Unpack(self, row, 0, outbuf)


def Pack_external_size(self: Datatype, datarep: str, count: int) -> int:
    """Return the packed size of `count` items, in bytes."""
    return Pack_size(self, count)


for _function in (Pack, Unpack, Pack_size, Pack_external, Unpack_external, Pack_external_size):
    setattr(Datatype, _function.__name__, _function)


def Aint_add(base: int, disp: int) -> int:
    """Return the sum of an address and a displacement."""
    return base + disp


def Aint_diff(addr1: int, addr2: int) -> int:
    """Return the difference of two addresses."""
    return addr1 - addr2
