"""Specifications of messages: ``[buf, count, datatype]`` and its variants."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll.integrations.mpi4py.datatypes import Datatype, as_datatype
from gpucoll.integrations.mpi4py.errors import argument_error, refused, type_error
from gpucoll.integrations.mpi4py.memory import AnyBuffer, is_buffer, memory_of
from gpucoll.integrations.mpi4py.type_maps import TypeMap

if TYPE_CHECKING:
    from gpucoll.arrays.library import AnyArray
    from gpucoll.calls.given import Unchecked
    from gpucoll.integrations.mpi4py.typing import TypeSpec

Row = npt.NDArray[np.generic]
Finish = Callable[[], None]
AnySpec: TypeAlias = Any
"""A specification as the program gave it: if valid, one of `typing.BufSpec` to `BufSpecW`."""


def _is_pair(given: Unchecked) -> bool:
    return isinstance(given, tuple | list)


def _parts(
    message: AnySpec, pair: type | tuple[type, ...]
) -> tuple[Unchecked, Unchecked, Unchecked, Unchecked]:
    """Return buffer, count, displacement and datatype; each is None if it was not given."""
    if isinstance(message, list | tuple):
        if len(message) == 2:
            data, count = message
            if isinstance(count, Datatype | str):
                return data, None, None, count
            if isinstance(count, pair):
                return (data, *_two(count), None)
            return data, count, None, None
        if len(message) == 3:
            data, count, datatype = message
            if isinstance(count, pair):
                return (data, *_two(count), datatype)
            return data, count, None, datatype
        if len(message) == 4:
            data, count, displacement, datatype = message
            return data, count, displacement, datatype
        raise argument_error("message: expecting 2 to 4 items", "ERR_BUFFER")
    if is_buffer(message):
        return message, None, None, None
    raise type_error(
        f"message: expecting buffer or list/tuple, got {type(message).__name__}", "ERR_BUFFER"
    )


def _two(pair: Unchecked) -> tuple[Unchecked, Unchecked]:
    if len(pair) != 2:
        raise argument_error(f"message: expecting (count, displacement), got {pair!r}")
    return pair[0], pair[1]


class _Base:
    """Memory, and the datatype as which it is read."""

    def __init__(self, data: AnyBuffer, datatype: TypeSpec | None, writable: bool) -> None:
        memory = memory_of(data, writable)
        self.data = memory.data
        self.gpu_array = memory.gpu_array
        self.is_none = data is None
        self.datatype = memory.datatype() if datatype is None else as_datatype(datatype)

    @property
    def map(self) -> TypeMap:
        return self.datatype._map()

    @property
    def size_bytes(self) -> int:
        if self.data is not None:
            return len(self.data)
        return _gpu_size(self.gpu_array) * self.datatype._map().size

    def entries(self, length: int) -> int:
        """Return how many items of the datatype `length` bytes hold."""
        if length == 0:
            return 0
        if self.datatype._core is None:
            raise argument_error("message: cannot infer count, datatype is null", "ERR_TYPE")
        extent = self.map.extent
        if extent <= 0:
            raise argument_error(f"message: cannot infer count, datatype extent {extent}")
        if length % extent:
            raise argument_error(
                f"message: cannot infer count, buffer length {length} is not a multiple of "
                f"datatype extent {extent}"
            )
        return length // extent

    def check_reach(self, offset: int, count: int, what: str) -> None:
        """Raise if the items do not lie within the memory."""
        low, high = self.map.span(count)
        if low + offset < 0 or high + offset > self.size_bytes:
            raise argument_error(
                f"message: {what} spans bytes {low + offset} to {high + offset}, but the buffer "
                f"has {self.size_bytes} bytes",
                "ERR_BUFFER",
            )


class Simple(_Base):
    """A buffer with a count of items, from an offset on.

    Parameters
    ----------
    message : object
        The specification as mpi4py accepts it.
    writable : bool
        Whether the call writes to the buffer.
    blocks : int
        The number of blocks; a count that is not given is that of one block.
    """

    def __init__(self, message: AnySpec, writable: bool, blocks: int = 1) -> None:
        data, count, displacement, datatype = _parts(message, (tuple, list))
        super().__init__(data, datatype, writable)
        self.offset = self._offset(displacement)
        if count is not None:
            self.count = operator.index(count)
            if self.count < 0:
                raise argument_error(f"message: negative count {count}", "ERR_COUNT")
            if self.count and data is None:
                raise argument_error(f"message: buffer is None but count is {count}", "ERR_BUFFER")
        else:
            self.count = self.entries(self.size_bytes - self.offset)
            if blocks > 1:
                if self.count % blocks:
                    raise argument_error(
                        f"message: cannot infer count, number of entries {self.count} is not a "
                        f"multiple of required number of blocks {blocks}"
                    )
                self.count //= blocks
        if self.datatype._core is None and not self.count:
            self.datatype = as_datatype("B")

    def _offset(self, displacement: Unchecked) -> int:
        place = 0 if displacement is None else operator.index(displacement)
        if place < 0:
            raise argument_error(f"message: negative displacement {place}")
        if not place:
            return 0
        extent = self.map.extent
        if extent <= 0 or place * extent > self.size_bytes:
            raise argument_error(
                f"message: displacement {place} out of bounds, datatype extent {extent}"
            )
        return place * extent

    def row(self, blocks: int = 1) -> AnyArray:
        """Return the elements of all blocks in one row, as a view if possible."""
        n_items = self.count * blocks
        if self.gpu_array is not None:
            return self._gpu_row(n_items)
        self.check_reach(self.offset, n_items, f"{n_items} items")
        assert self.data is not None
        return self.map.pack(self.data, self.offset, n_items)

    def target(self, blocks: int = 1) -> tuple[AnyArray, Finish | None]:
        """Return where to write elements, and the function to call afterwards."""
        n_items = self.count * blocks
        if self.gpu_array is not None:
            return self._gpu_row(n_items), None
        row = self.row(blocks)
        type_map, data, offset = self.map, self.data, self.offset
        assert data is not None
        if type_map.is_dense:
            return row, None
        return row, lambda: type_map.unpack(row, data, offset)

    def _gpu_row(self, n_items: int) -> AnyArray:
        array, size = self.gpu_array, _gpu_size(self.gpu_array)
        wanted, begin = n_items * self.map.n_elements, self.offset // max(self.map.extent, 1)
        if not self.map.is_dense or self.map.element is None:
            refused("a derived datatype with gaps on a GPU", "pack it with the array's library")
        if begin == 0 and wanted == size:
            return array if getattr(array, "ndim", 1) == 1 else _flat(array)
        if begin + wanted > size:
            raise argument_error(f"message: {wanted} elements, but the array has {size}")
        return _flat(array)[begin : begin + wanted]


class Vector(_Base):
    """A buffer with a count and a displacement for each of several blocks."""

    def __init__(self, message: AnySpec, writable: bool, blocks: int) -> None:
        data, counts, displacements, datatype = _parts(message, tuple)
        super().__init__(data, datatype, writable)
        if counts is None:
            share, more = divmod(self.entries(self.size_bytes), blocks)
            self.counts = [share + (block < more) for block in range(blocks)]
        else:
            self.counts = numbers(counts, blocks, "counts")
        if min(self.counts, default=0) < 0:
            raise argument_error(f"message: negative count in {self.counts}", "ERR_COUNT")
        if displacements is None:
            ends = np.cumsum([0, *self.counts])
            self.displacements = [int(end) for end in ends[:-1]]
        elif not hasattr(displacements, "__len__") or getattr(displacements, "ndim", 1) == 0:
            step = operator.index(displacements)
            self.displacements = [block * step for block in range(blocks)]
        else:
            self.displacements = numbers(displacements, blocks, "displacements")

    @property
    def is_one_row(self) -> bool:
        """Whether the blocks are adjacent, in order and without gaps."""
        place = None
        for count, displacement in zip(self.counts, self.displacements, strict=True):
            if count and place is not None and displacement != place:
                return False
            if count:
                place = displacement + count
        return self.map.is_dense

    @property
    def element_counts(self) -> list[int]:
        """The number of elements of each block."""
        return [count * self.map.n_elements for count in self.counts]

    def block(self, number: int) -> Row:
        """Return the elements of one block, as a view if possible."""
        offset, count = self.displacements[number] * self.map.extent, self.counts[number]
        if self.gpu_array is not None:
            begin = self.displacements[number] * self.map.n_elements
            return _flat(self.gpu_array)[begin : begin + count * self.map.n_elements]  # type: ignore[no-any-return]
        self.check_reach(offset, count, f"block {number} ({count} items)")
        assert self.data is not None
        return self.map.pack(self.data, offset, count)

    def row(self) -> AnyArray:
        """Return the elements of all blocks in one row."""
        if self.is_one_row:
            return self._whole()
        if self.gpu_array is not None:
            refused("displacements with gaps on a GPU", "leave no gaps between the blocks")
        blocks = [self.block(number) for number in range(len(self.counts))]
        return np.concatenate(blocks) if blocks else np.empty(0, self.map.dtype)

    def target(self) -> tuple[AnyArray, Finish | None]:
        """Return where to write all blocks, and the function to call afterwards."""
        if self.is_one_row:
            return self._whole(), None
        row = self.row()
        return row, lambda: self.spread(row)

    def spread(self, row: Row) -> None:
        """Write the elements of all blocks to their places."""
        begin = 0
        for number, count in enumerate(self.element_counts):
            part = row[begin : begin + count]
            begin += count
            if count:
                assert self.data is not None
                self.map.unpack(part, self.data, self.displacements[number] * self.map.extent)

    def _whole(self) -> AnyArray:
        first = next((place for count, place in zip(self.counts, self.displacements, strict=True)
                      if count), 0)  # fmt: skip
        total, offset = sum(self.counts), first * self.map.extent
        if self.gpu_array is not None:
            begin = first * self.map.n_elements
            return _flat(self.gpu_array)[begin : begin + total * self.map.n_elements]
        self.check_reach(offset, total, f"{total} items")
        assert self.data is not None
        return self.map.pack(self.data, offset, total)


class Typed:
    """A buffer with a count, a displacement in bytes and a datatype for each of several blocks."""

    def __init__(self, message: AnySpec, writable: bool, blocks: int) -> None:
        if not _is_pair(message):
            raise type_error("message: expecting list/tuple")
        if len(message) == 2:
            data, types = message
            counts, places = [1] * blocks, [0] * blocks
        elif len(message) == 3:
            data, (counts, places), types = message
        elif len(message) == 4:
            data, counts, places, types = message
            if counts is None and places is None:
                counts, places = [1] * blocks, [0] * blocks
        else:
            raise argument_error("message: expecting 2 to 4 items")
        memory = memory_of(data, writable).data
        if memory is None:
            refused("Alltoallw on a GPU", "use Alltoallv with one datatype")
        self.data = memory
        self.counts = numbers(counts, blocks, "counts")
        self.displacements = numbers(places, blocks, "displacements")
        if len(types) != blocks:
            raise argument_error(f"expecting {blocks} datatypes, got {len(types)}")
        self.maps = [as_datatype(item)._map() for item in types]

    @property
    def sizes(self) -> list[int]:
        """The size of each block in bytes."""
        return [n * item.size for n, item in zip(self.counts, self.maps, strict=True)]

    def block(self, number: int) -> Row:
        """Return the bytes of one block."""
        packed = self.maps[number].pack(self.data, self.displacements[number], self.counts[number])
        return np.ascontiguousarray(packed).view(np.uint8)

    def row(self) -> Row:
        """Return the bytes of all blocks in one row."""
        blocks = [self.block(number) for number in range(len(self.counts))]
        return np.concatenate(blocks) if blocks else np.empty(0, np.uint8)

    def spread(self, row: Row) -> None:
        """Write the bytes of all blocks to their places."""
        begin = 0
        for number, size in enumerate(self.sizes):
            if size:
                part = row[begin : begin + size]
                self.maps[number].unpack(part, self.data, self.displacements[number])
            begin += size


def numbers(given: Unchecked, length: int, what: str) -> list[int]:
    """Return one int for each block; a single number is repeated."""
    if not hasattr(given, "__len__") or getattr(given, "ndim", 1) == 0:
        return [operator.index(given)] * length
    if len(given) != length:
        raise argument_error(f"expecting {length} {what}, got {len(given)}", "ERR_COUNT")
    return [operator.index(item) for item in _listed(given)]


def _listed(given: Sequence[Unchecked]) -> Sequence[AnyArray]:
    tolist = getattr(given, "tolist", None)
    return given if tolist is None else tolist()


def _gpu_size(array: AnyArray) -> int:
    shape = array.shape
    return int(np.prod(shape, dtype=np.int64))


def _flat(array: AnyArray) -> AnyArray:
    if getattr(array, "ndim", len(array.shape)) == 1:
        return array
    reshape = getattr(array, "reshape", None) or getattr(array, "ravel", None)
    if reshape is None:
        refused(f"a {type(array).__name__} of several dimensions", "pass a flat array")
    return array.reshape(-1)
