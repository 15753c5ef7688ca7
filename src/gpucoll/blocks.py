"""Blocks of 64-bit words for compiled loops and Python: a class's annotations are the layout.

::

    class Channel(Block):
        rank: int                # one word
        hosts: Field[Hosts]             # one word: the address of another block
        sizes: Field[Words]             # one word: the address of several words
        clock: Field[Words] = words(2)  # two words, here
        rows: Field[Row]                # one word: the address of an array of blocks
        tail: int = word(16)            # word 16: on a cache line of its own

A compiled loop sees an address: ``channel.rank`` is one load and ``channel.rank = 3`` one store of
machine code, and `Channel(address)` is no instruction at all. ``channel.rows[3]`` is the fourth
block of an array. ``channel.at.tail`` is the address of a word, for atomics, and ``Channel.tail``
the number of the word in its block. Python sees an object with the same attributes over the same
words.

Loads and stores of fields are plain: they are for words that no other thread writes meanwhile.
"""

from __future__ import annotations

import functools
import re
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    TypeVar,
    cast,
    get_args,
    get_type_hints,
    overload,
)

if TYPE_CHECKING:
    import ctypes

    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Self

__all__ = ["WORD_BYTES", "Block", "Field", "Words", "word", "words"]

T = TypeVar("T")

WORD_BYTES = 8


class _Place:
    """What a class body gives for a field that is not simply the next word."""

    def __init__(self, index: int | None, count: int) -> None:
        self.index = index
        self.count = count


def word(index: int) -> Any:  # any field may have it as its value
    """Place a field, and those after it, from this word of its block on."""
    return _Place(index, 0)


def words(count: int, index: int | None = None) -> Any:  # as `word`
    """Give a field this number of words in its block itself, from word `index` on if given."""
    return _Place(index, count)


class Field(int, Generic[T]):
    """One field of a block: the number of its first word, with its name.

    `Channel.rank` is the field itself: an index into an array of words. To a loop it is a number.
    As an annotation, ``Field[Words]`` says what a field is that is no plain number.
    """

    owner: type[Block]
    name: str
    count: int
    """How many words it has in the block itself; 0 for an ordinary one."""

    def __new__(cls, index: int, owner: type[Block], name: str, count: int) -> Self:
        """Make the field whose first word has this index in blocks of its owner."""
        made = super().__new__(cls, index)
        made.owner, made.name, made.count = owner, name, count
        return made

    @functools.cached_property
    def _kind(self) -> type:
        return kinds(self.owner)[self.name]

    @overload
    def __get__(self, block: None, owner: type[Block]) -> Field[T]: ...
    @overload
    def __get__(self, block: Block, owner: type[Block]) -> T: ...
    def __get__(self, block: Block | None, owner: type[Block]) -> Any:  # one of the two above
        """Return the field itself for the class, and for a block its value."""
        if block is None:
            return self
        if self.count:
            address = block.address + WORD_BYTES * self
            return Words(address, self.count, block) if self._kind is Words else self._kind(address)
        value = int(block.words[self])
        return self._kind(value) if self._kind is not int else value

    def __set__(self, block: Block, value: T) -> None:
        """Write the field of a block."""
        number: Any = value.address if isinstance(value, _ADDRESSED) else value
        block.words[self] = number


class _Addresses:
    """The addresses of a block's fields."""

    def __init__(self, block: Block) -> None:
        self._block = block

    def __getattr__(self, name: str) -> int:
        fields = type(self._block).fields
        if name not in fields:
            raise AttributeError(f"{type(self._block).__name__} has no field {name}")
        return self._block.address + WORD_BYTES * fields[name]


class BlockClass(type):
    """The type of classes of blocks, by which Numba knows them."""


class Block(metaclass=BlockClass):
    """A block of words at an address.

    Parameters
    ----------
    address : int
        Where it lies: memory that outlives this object.
    """

    fields: ClassVar[dict[str, Field[Any]]] = {}
    n_words: ClassVar[int] = 0
    n_bytes: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        cls.fields = {}
        index = 0
        for name, annotation in cls.__annotations__.items():
            if annotation not in (int, "int") and not re.match(r"(\w+\.)*Field\[", str(annotation)):
                raise TypeError(
                    f"{cls.__name__}.{name} must be an int or a Field; got {annotation}"
                )
            given = vars(cls).get(name) or _Place(None, 0)
            index = index if given.index is None else given.index
            cls.fields[name] = Field(index, cls, name, given.count)
            setattr(cls, name, cls.fields[name])
            index += given.count or 1
        cls.n_words, cls.n_bytes = index, WORD_BYTES * index

    def __init__(self, address: int) -> None:
        import ctypes

        import numpy as np  # not where only the layout is needed, as in gpucoll-run

        n_words = type(self).n_words
        memory = (ctypes.c_int64 * n_words).from_address(address) if address else b""
        self.words: npt.NDArray[np.int64] = np.frombuffer(memoryview(memory), np.int64)
        self.address = address

    @classmethod
    def over(cls, array: npt.NDArray[np.int64]) -> Self:
        """Return the block whose words are an array's; it keeps the array alive."""
        made = cls.__new__(cls)
        made.words, made.address = array, array.ctypes.data
        return made

    @classmethod
    def new(cls) -> Self:
        """Return a block of zeros in memory of its own, whoever makes NumPy's memory."""
        import numpy as np

        return cls.over(np.frombuffer(bytearray(cls.n_bytes), np.int64))

    @property
    def at(self) -> type[Self]:
        """The addresses of the fields, under their names: numbers, as the fields' own."""
        return cast("type[Self]", _Addresses(self))

    def __getitem__(self, number: int) -> Self:
        """Return a block of an array of such blocks whose first one this is."""
        return type(self)(self.address + type(self).n_bytes * number)

    def __bool__(self) -> bool:
        """Return whether there is a block: its address is not 0."""
        return self.address != 0


class Words(metaclass=BlockClass):
    """Several words at an address, by their number."""

    def __init__(self, address: int, count: int = 0, owner: object = None) -> None:
        self.address = address
        self._count = count
        self._owner = owner  # kept alive

    def _word(self, index: int) -> ctypes.c_int64:
        if index < 0 or (self._count and index >= self._count):
            raise IndexError(f"word {index} of {self._count}")
        import ctypes

        return ctypes.c_int64.from_address(self.address + WORD_BYTES * index)

    def __getitem__(self, index: int) -> int:
        return int(self._word(index).value)

    def __setitem__(self, index: int, value: int) -> None:
        self._word(index).value = value

    def __bool__(self) -> bool:
        """Return whether there are words: their address is not 0."""
        return self.address != 0


_ADDRESSED = (Block, Words)


@functools.cache
def kinds(cls: type[Block]) -> dict[str, type]:
    """Return what each field of a class is: ``int``, `Words`, or a class of blocks."""
    hints = get_type_hints(cls)
    return {name: (*get_args(hints[name]), hints[name])[0] for name in cls.fields}
