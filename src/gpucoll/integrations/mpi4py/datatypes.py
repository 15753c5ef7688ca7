"""Datatypes: the predefined ones, and those that programs derive from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

import numpy as np

from gpucoll.integrations.mpi4py.attributes import HasAttributes
from gpucoll.integrations.mpi4py.constants import (
    COMBINERS,
    ERROR_CLASSES,
    ORDER_C,
    ORDER_FORTRAN,
    TYPECLASS_COMPLEX,
    TYPECLASS_INTEGER,
    TYPECLASS_REAL,
)
from gpucoll.integrations.mpi4py.errors import DatatypeError, argument_error, refused
from gpucoll.integrations.mpi4py.handles import Handle
from gpucoll.integrations.mpi4py.type_maps import TypeMap, basic_map, merged_map

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Self


Sizes = Sequence[int]
Parameters: TypeAlias = dict[str, Any]
"""The arguments from which a datatype was derived, by the names that `decode` gives them."""
_D = TypeVar("_D", bound="Datatype | None")


def _kept(datatype: _D) -> _D:
    if datatype is None or datatype._core.combiner == "NAMED":
        return datatype
    return type(datatype)(datatype)


class Core:
    """The contents of a datatype: its map, how it was derived, and its attributes."""

    def __init__(
        self,
        type_map: TypeMap,
        combiner: str,
        contents: tuple[list[int], list[int], list[Datatype]] = ([], [], []),
        parameters: Parameters | None = None,
        base: Datatype | None = None,
    ) -> None:
        integers, addresses, datatypes = contents
        # Keep own handles, because the program may free those that it passed.
        self.contents = (integers, addresses, [_kept(item) for item in datatypes])
        self.map, self.combiner, self.base = type_map, combiner, _kept(base)
        self.parameters = dict(parameters or {})
        if "datatypes" in self.parameters:
            self.parameters["datatypes"] = self.contents[2]
        self.name = self.char = self.code = ""
        self.attributes: dict[int, Any] = {}


class Datatype(Handle, HasAttributes):
    """A datatype: which bytes of memory belong to an item, and their types."""

    def _map(self) -> TypeMap:
        found: TypeMap = self._live("ERR_TYPE").map
        return found

    def Get_size(self) -> int:
        return self._map().size

    def Get_extent(self) -> tuple[int, int]:
        found = self._map()
        return found.lb, found.extent

    def Get_true_extent(self) -> tuple[int, int]:
        found = self._map()
        return found.true_lb, found.true_extent

    size = property(Get_size)
    extent = property(lambda self: self._map().extent)
    lb = property(lambda self: self._map().lb)
    ub = property(lambda self: self._map().lb + self._map().extent)
    true_extent = property(lambda self: self._map().true_extent)
    true_lb = property(lambda self: self._map().true_lb)
    true_ub = property(lambda self: self._map().true_lb + self._map().true_extent)

    # --- deriving ---------------------------------------------------------------------------------

    def _derived(
        self,
        combiner: str,
        displacements: npt.ArrayLike,
        blocklengths: npt.ArrayLike,
        contents: tuple[list[int], list[int]],
        parameters: Parameters,
    ) -> Self:
        old = self._map()
        lengths = np.broadcast_to(np.asarray(blocklengths, np.int64), np.shape(displacements))
        if (lengths < 0).any():
            raise argument_error(f"{combiner.lower()}: negative length of a block", "ERR_ARG")
        starts = np.asarray(displacements, np.int64)[lengths > 0]
        ends = starts + (lengths[lengths > 0] - 1) * old.extent
        edges = np.concatenate([starts, ends])
        low = int(edges.min()) + old.lb if len(edges) else 0
        high = int(edges.max()) + old.lb + old.extent if len(edges) else 0
        made = merged_map(
            old.moved(displacements, lengths), [old.element], low, high - low, old.alignment
        )
        return type(self)._of(Core(made, combiner, (*contents, [self]), parameters, self))

    def Dup(self) -> Self:
        core = Core(self._map(), "DUP", ([], [], [self]), {}, self)
        core.attributes = self._copied_attributes()
        core.char, core.code = self._core.char, self._core.code
        return type(self)._of(core)

    Create_dup = Dup

    def Create_contiguous(self, count: int) -> Self:
        step = self._map().extent
        if count < 0:
            raise argument_error(f"contiguous: negative count {count}", "ERR_COUNT")
        begins = [0] if count else []
        return self._derived(
            "CONTIGUOUS",
            np.array(begins) * step,
            [count] * len(begins),
            ([count], []),
            {"count": count},
        )

    def Create_vector(self, count: int, blocklength: int, stride: int) -> Self:
        return self._derived(
            "VECTOR",
            np.arange(_counted(count)) * stride * self._map().extent,
            blocklength,
            ([count, blocklength, stride], []),
            {"count": count, "blocklength": blocklength, "stride": stride},
        )

    def Create_hvector(self, count: int, blocklength: int, stride: int) -> Self:
        return self._derived(
            "HVECTOR",
            np.arange(_counted(count)) * stride,
            blocklength,
            ([count, blocklength], [stride]),
            {"count": count, "blocklength": blocklength, "stride": stride},
        )

    def Create_indexed(self, blocklengths: Sizes, displacements: Sizes) -> Self:
        _check_alike(blocklengths, displacements)
        return self._derived(
            "INDEXED",
            np.asarray(displacements, np.int64) * self._map().extent,
            blocklengths,
            ([len(blocklengths), *blocklengths, *displacements], []),
            {"blocklengths": list(blocklengths), "displacements": list(displacements)},
        )

    def Create_hindexed(self, blocklengths: Sizes, displacements: Sizes) -> Self:
        _check_alike(blocklengths, displacements)
        return self._derived(
            "HINDEXED",
            np.asarray(displacements, np.int64),
            blocklengths,
            ([len(blocklengths), *blocklengths], list(displacements)),
            {"blocklengths": list(blocklengths), "displacements": list(displacements)},
        )

    def Create_indexed_block(self, blocklength: int, displacements: Sizes) -> Self:
        return self._derived(
            "INDEXED_BLOCK",
            np.asarray(displacements, np.int64) * self._map().extent,
            blocklength,
            ([len(displacements), blocklength, *displacements], []),
            {"blocklength": blocklength, "displacements": list(displacements)},
        )

    def Create_hindexed_block(self, blocklength: int, displacements: Sizes) -> Self:
        return self._derived(
            "HINDEXED_BLOCK",
            np.asarray(displacements, np.int64),
            blocklength,
            ([len(displacements), blocklength], list(displacements)),
            {"blocklength": blocklength, "displacements": list(displacements)},
        )

    @classmethod
    def Create_struct(
        cls, blocklengths: Sizes, displacements: Sizes, datatypes: Sequence[Datatype]
    ) -> Self:
        _check_alike(blocklengths, displacements)
        _check_alike(blocklengths, datatypes)
        maps = [datatype._map() for datatype in datatypes]
        parts = [(length, start, old) for length, start, old in
                 zip(blocklengths, displacements, maps, strict=True) if length > 0]  # fmt: skip
        runs = [old.moved([start], [length]) for length, start, old in parts]
        low = min((start + old.lb for _, start, old in parts), default=0)
        high = max(
            (start + old.lb + length * old.extent for length, start, old in parts), default=0
        )
        align = max((old.alignment for _, _, old in parts), default=1)
        extent = -(-(high - low) // align) * align
        together = np.concatenate(runs) if runs else np.empty((0, 2), np.int64)
        made = merged_map(together, [old.element for _, _, old in parts], low, extent, align)
        lists = {"blocklengths": list(blocklengths), "displacements": list(displacements)}
        contents = ([len(blocklengths), *blocklengths], list(displacements), list(datatypes))
        parameters = {**lists, "datatypes": list(datatypes)}
        return cls._of(Core(made, "STRUCT", contents, parameters, None))

    def Create_subarray(
        self, sizes: Sizes, subsizes: Sizes, starts: Sizes, order: int = ORDER_C
    ) -> Self:
        old = self._map()
        _check_alike(sizes, subsizes)
        _check_alike(sizes, starts)
        for whole, part, start in zip(sizes, subsizes, starts, strict=True):
            if not 1 <= part <= whole or not 0 <= start <= whole - part:
                raise argument_error(
                    f"subarray: {part} from {start} on does not lie within {whole}"
                )
        if order not in (ORDER_C, ORDER_FORTRAN):
            raise argument_error(f"subarray: order must be ORDER_C or ORDER_F; got {order}")
        grid = np.arange(math.prod(sizes), dtype=np.int64)
        grid = grid.reshape(sizes, order="C" if order == ORDER_C else "F")
        part_of = grid[tuple(slice(s, s + n) for s, n in zip(starts, subsizes, strict=True))]
        places = part_of.reshape(-1, order="C" if order == ORDER_C else "F")
        runs = old.moved(places * old.extent, 1)
        made = merged_map(runs, [old.element], 0, math.prod(sizes) * old.extent, old.alignment)
        contents: tuple[list[int], list[int], list[Any]]
        contents = ([len(sizes), *sizes, *subsizes, *starts, order], [], [self])
        lists = {"sizes": list(sizes), "subsizes": list(subsizes), "starts": list(starts)}
        return type(self)._of(Core(made, "SUBARRAY", contents, {**lists, "order": order}, self))

    def Create_resized(self, lb: int, extent: int) -> Self:
        old = self._map()
        made = TypeMap(old.runs, old.element, lb, extent, old.alignment)
        limits = {"lb": lb, "extent": extent}
        return type(self)._of(Core(made, "RESIZED", ([], [lb, extent], [self]), limits, self))

    Resized = Create_resized

    def Create_darray(self, *_: object, **__: object) -> NoReturn:
        refused(
            "Datatype.Create_darray",
            "describe each rank's part with Create_subarray or Create_indexed",
        )

    @classmethod
    def Get_value_index(cls, value: Datatype, index: Datatype) -> Datatype:
        """Return the pair type of a value and an index type; DATATYPE_NULL if there is none."""
        kind, number = value._map().element, index._map().element
        names = [name for name, char in _PAIRS.items() if np.dtype(char) == kind]
        return PREDEFINED[names[0]] if names and number == np.dtype("i") else DATATYPE_NULL

    @classmethod
    def Create_f90_integer(cls, r: int) -> Datatype:
        return cls._sized(TYPECLASS_INTEGER, next(s for s in (1, 2, 4, 8) if 10**r < 2 ** (8 * s)))

    @classmethod
    def Create_f90_real(cls, p: int, r: int) -> Datatype:
        return cls._sized(TYPECLASS_REAL, 4 if p <= 6 and r <= 37 else 8)

    @classmethod
    def Create_f90_complex(cls, p: int, r: int) -> Datatype:
        return cls._sized(TYPECLASS_COMPLEX, 8 if p <= 6 and r <= 37 else 16)

    @classmethod
    def Match_size(cls, typeclass: int, size: int) -> Datatype:
        return cls._sized(typeclass, size)

    @classmethod
    def _sized(cls, typeclass: int, size: int) -> Datatype:
        kind = {TYPECLASS_INTEGER: "INTEGER", TYPECLASS_REAL: "REAL", TYPECLASS_COMPLEX: "COMPLEX"}
        found = PREDEFINED.get(f"{kind.get(typeclass)}{size}")
        if not found:
            raise argument_error(f"no datatype of class {typeclass} has {size} bytes")
        return found

    # --- what it is -------------------------------------------------------------------------------

    def Commit(self) -> Self:
        self._map()
        return self

    def Free(self) -> None:
        if self._live("ERR_TYPE").combiner == "NAMED":
            raise argument_error(f"{self._core.name} is predefined and cannot be freed", "ERR_TYPE")
        self._delete_attributes()
        self._core = None

    def free(self) -> None:
        """Free it unless it is predefined; may be called repeatedly."""
        if self._core is not None and self._core.combiner != "NAMED":
            self.Free()
        elif not any(self is item for item in PREDEFINED.values()):
            self._core = None

    def Get_envelope(self) -> tuple[int, int, int, int, int]:
        core = self._live("ERR_TYPE")
        integers, addresses, datatypes = core.contents
        return (len(integers), len(addresses), 0, len(datatypes), COMBINERS[core.combiner])

    def Get_contents(self) -> tuple[list[int], list[int], list[int], list[Datatype]]:
        core = self._live("ERR_TYPE")
        if core.combiner == "NAMED":
            raise argument_error("a predefined datatype has no contents", "ERR_TYPE")
        integers, addresses, datatypes = core.contents
        return (list(integers), list(addresses), [], [_kept(item) for item in datatypes])

    envelope = property(Get_envelope)
    contents = property(Get_contents)
    combiner = property(lambda self: COMBINERS[self._live("ERR_TYPE").combiner])
    is_named = property(lambda self: self._live("ERR_TYPE").combiner == "NAMED")

    @property
    def is_predefined(self) -> bool:
        return self._core is None or bool(self.is_named)

    def decode(self) -> tuple[Datatype, str, Parameters]:
        """Return the datatype it was derived from, the combiner, and its parameters."""
        core = self._live("ERR_TYPE")
        if core.combiner == "NAMED":
            return self, core.combiner, {}
        base = DATATYPE_NULL if core.base is None else _kept(core.base)
        parameters = dict(core.parameters)
        if "datatypes" in parameters:
            parameters["datatypes"] = [_kept(item) for item in parameters["datatypes"]]
        return base, core.combiner, parameters

    def Get_name(self) -> str:
        return self._core.name if self._core else "MPI_DATATYPE_NULL"

    def Set_name(self, name: str) -> None:
        self._live("ERR_TYPE").name = name

    name = property(Get_name, Set_name)

    def tocode(self) -> str:
        """Return the code of a predefined datatype that `fromcode` takes."""
        if not (self._core and self._core.code):
            raise DatatypeError(ERROR_CLASSES["ERR_TYPE"], f"cannot map {self!r} to a code")
        return str(self._core.code)

    @classmethod
    def fromcode(cls, code: str) -> Datatype:
        """Return the datatype of a type code, as NumPy and `struct` write it."""
        return datatype_of_code(code)

    @property
    def typechar(self) -> str:
        return self._core.char[:1] or "V" if self._core else "V"

    @property
    def typestr(self) -> str:
        if self._core is None:
            return ""
        return self._core.map.dtype.str[1:] if self._core.char else f"V{self._map().extent}"

    def __repr__(self) -> str:
        return f"<Datatype {self.Get_name() or 'derived'}>"

    def __reduce__(self) -> tuple[object, ...]:
        if self._core is None or self._core.combiner == "NAMED":
            return self._reduced(self.Get_name().removeprefix("MPI_"))
        base, combiner, parameters = self.decode()
        return _rebuilt, (base, combiner, parameters)


def _rebuilt(base: Datatype, combiner: str, parameters: Parameters) -> Datatype:
    if combiner == "DUP":
        return base.Dup()
    maker = base if combiner != "STRUCT" else Datatype
    made: Datatype = getattr(maker, f"Create_{combiner.lower()}")(**parameters)
    return made


def _counted(count: int) -> int:
    if count < 0:
        raise argument_error(f"negative count {count}", "ERR_COUNT")
    return count


def _check_alike(one: Sequence[object], other: Sequence[object]) -> None:
    if len(one) != len(other):
        raise ValueError(f"expecting {len(one)} items, got {len(other)}")


# --- predefined -----------------------------------------------------------------------------------

_BASIC = {
    "PACKED": "B", "BYTE": "B", "AINT": "l", "OFFSET": "l", "COUNT": "l", "CHAR": "S1",
    "WCHAR": "U1", "SIGNED_CHAR": "b", "SHORT": "h", "INT": "i", "LONG": "l", "LONG_LONG": "q",
    "UNSIGNED_CHAR": "B", "UNSIGNED_SHORT": "H", "UNSIGNED": "I", "UNSIGNED_LONG": "L",
    "UNSIGNED_LONG_LONG": "Q", "FLOAT": "f", "DOUBLE": "d", "LONG_DOUBLE": "g", "C_BOOL": "?",
    "INT8_T": "i1", "INT16_T": "i2", "INT32_T": "i4", "INT64_T": "i8", "UINT8_T": "u1",
    "UINT16_T": "u2", "UINT32_T": "u4", "UINT64_T": "u8", "FLOAT16_T": "e", "FLOAT32_T": "f",
    "FLOAT64_T": "d", "C_COMPLEX": "F", "C_FLOAT_COMPLEX": "F", "C_DOUBLE_COMPLEX": "D",
    "C_LONG_DOUBLE_COMPLEX": "G", "CXX_BOOL": "?", "CXX_FLOAT_COMPLEX": "F",
    "CXX_DOUBLE_COMPLEX": "D", "CXX_LONG_DOUBLE_COMPLEX": "G", "CHARACTER": "S1",
    "LOGICAL": "i4", "INTEGER": "i4", "REAL": "f", "DOUBLE_PRECISION": "d", "COMPLEX": "F",
    "DOUBLE_COMPLEX": "D", "INTEGER1": "i1", "INTEGER2": "i2", "INTEGER4": "i4",
    "INTEGER8": "i8", "REAL2": "e", "REAL4": "f", "REAL8": "d", "COMPLEX8": "F",
    "COMPLEX16": "D", "REAL16": "g", "COMPLEX32": "G", "LOGICAL1": "i1", "LOGICAL2": "i2",
    "LOGICAL4": "i4", "LOGICAL8": "i8",
}  # fmt: skip
_ABSENT = ("BFLOAT16_T", "INTEGER16", "LOGICAL16", "COMPLEX4")
_ALIASES = {
    "INT_INT": "TWOINT", "UNSIGNED_INT": "UNSIGNED", "SIGNED_SHORT": "SHORT", "SIGNED_INT": "INT",
    "SIGNED_LONG": "LONG", "SIGNED_LONG_LONG": "LONG_LONG", "BOOL": "C_BOOL",
    "SINT8_T": "INT8_T", "SINT16_T": "INT16_T", "SINT32_T": "INT32_T", "SINT64_T": "INT64_T",
    "F_BOOL": "LOGICAL", "F_INT": "INTEGER", "F_FLOAT": "REAL", "F_DOUBLE": "DOUBLE_PRECISION",
    "F_COMPLEX": "COMPLEX", "F_FLOAT_COMPLEX": "COMPLEX", "F_DOUBLE_COMPLEX": "DOUBLE_COMPLEX",
}  # fmt: skip
_PAIRS = {
    "SHORT_INT": "h", "TWOINT": "i", "LONG_INT": "l", "FLOAT_INT": "f", "DOUBLE_INT": "d",
    "LONG_DOUBLE_INT": "g",
}  # fmt: skip


_CODES = {
    "?": "C_BOOL",
    "b": "SIGNED_CHAR",
    "h": "SHORT",
    "i": "INT",
    "l": "LONG",
    "q": "LONG_LONG",
    "B": "UNSIGNED_CHAR",
    "H": "UNSIGNED_SHORT",
    "I": "UNSIGNED",
    "L": "UNSIGNED_LONG",
    "Q": "UNSIGNED_LONG_LONG",
    "e": "FLOAT16_T",
    "f": "FLOAT",
    "d": "DOUBLE",
    "g": "LONG_DOUBLE",
    "Zf": "C_FLOAT_COMPLEX",
    "Zd": "C_DOUBLE_COMPLEX",
    "Zg": "C_LONG_DOUBLE_COMPLEX",
    "F": "C_FLOAT_COMPLEX",
    "D": "C_DOUBLE_COMPLEX",
    "G": "C_LONG_DOUBLE_COMPLEX",
    "i1": "INT8_T",
    "i2": "INT16_T",
    "i4": "INT32_T",
    "i8": "INT64_T",
    "u1": "UINT8_T",
    "u2": "UINT16_T",
    "u4": "UINT32_T",
    "u8": "UINT64_T",
    "f2": "FLOAT16_T",
    "f4": "FLOAT32_T",
    "f8": "FLOAT64_T",
    "f16": "LONG_DOUBLE",
    "c8": "C_FLOAT_COMPLEX",
    "c16": "C_DOUBLE_COMPLEX",
    "c32": "C_LONG_DOUBLE_COMPLEX",
    "c": "CHAR",
    "S": "CHAR",
    "S1": "CHAR",
    "s": "CHAR",
    "1s": "CHAR",
    "U": "WCHAR",
    "U1": "WCHAR",
    "w": "WCHAR",
    "u": "WCHAR",
    "1w": "WCHAR",
    "1u": "WCHAR",
    "b1": "C_BOOL",
    "n": "AINT",
    "p": "AINT",
    "P": "AINT",
}


_CHARS = {"AINT": "p", "OFFSET": "p", "COUNT": "p", "CHAR": "c", "CHARACTER": "c"}
"""Codes in which mpi4py's character differs from NumPy's."""
_NAMED_BY_SIZE = {
    *("C_BOOL", "INT8_T", "INT16_T", "INT32_T", "INT64_T", "UINT8_T", "UINT16_T", "UINT32_T"),
    *("UINT64_T", "LOGICAL1", "LOGICAL2", "LOGICAL4", "LOGICAL8", "INTEGER1", "INTEGER2"),
    *("INTEGER4", "INTEGER8", "REAL2", "REAL4", "REAL8", "REAL16", "COMPLEX8", "COMPLEX16"),
    "COMPLEX32",
}
"""Datatypes whose code gives the number of bytes ("i4"); other codes are a character ("i")."""


def _predefined(name: str, dtype: np.dtype[np.generic]) -> Datatype:
    core = Core(basic_map(dtype), "NAMED")
    core.name = f"MPI_{name}"
    core.char = _CHARS.get(name, dtype.char)
    core.code = dtype.str[1:] if name in _NAMED_BY_SIZE else core.char
    return Datatype._of(core)


def _pair(name: str, char: str) -> Datatype:
    value = np.dtype(char)
    dtype = np.dtype([("value", char), ("index", "i")], align=True)
    runs = np.array([[0, value.itemsize], [dtype.fields["index"][1], 4]])  # type: ignore[index]
    core = Core(merged_map(runs, [None], 0, dtype.itemsize, dtype.alignment), "NAMED")
    core.name, core.attributes = f"MPI_{name}", {}
    core.parameters = {"pair": dtype}
    return Datatype._of(core)


DATATYPE_NULL = Datatype()
PREDEFINED: dict[str, Datatype] = {"DATATYPE_NULL": DATATYPE_NULL}
PREDEFINED |= {name: _predefined(name, np.dtype(code)) for name, code in _BASIC.items()}
PREDEFINED |= {name: _pair(name, char) for name, char in _PAIRS.items()}
PREDEFINED |= {name: Datatype() for name in _ABSENT}
PREDEFINED |= {name: PREDEFINED[of] for name, of in _ALIASES.items()}
BYTE = PREDEFINED["BYTE"]

TYPE_CODES = {code: PREDEFINED[name] for code, name in _CODES.items()}


def datatype_of_code(code: str) -> Datatype:
    """Return the datatype of a type code.

    Raises
    ------
    DatatypeError
        There is no such datatype.
    """
    found = TYPE_CODES.get(code)
    if found is None and code[:1] in "@=<>" and code:
        if code[0] == ">":
            raise BufferError(f"format string {code!r} with non-native byte order")
        found = TYPE_CODES.get(code[1:])
    if found is None:
        raise DatatypeError(ERROR_CLASSES["ERR_TYPE"], f"cannot map {code!r} to MPI datatype")
    return found


def code_of(datatype: Datatype) -> str | None:
    """Return the type code of a datatype; None if it has none."""
    return (datatype._core.code or None) if datatype else None


def alignment(datatype: Datatype) -> int | None:
    """Return the alignment of a predefined datatype in bytes; None for others."""
    if not datatype or not (datatype._core.char or datatype.is_predefined):
        return None
    return datatype._map().alignment


def as_datatype(given: object) -> Datatype:
    """Convert a datatype or a type code to a datatype."""
    if isinstance(given, Datatype):
        return given
    if isinstance(given, str):
        return datatype_of_code(given)
    raise TypeError(f"expecting a Datatype or a type code, got {type(given).__name__}")
