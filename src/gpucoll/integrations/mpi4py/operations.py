"""Reduce operations: gpucoll's, those on pairs of value and index, and the program's functions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll.integrations.mpi4py.datatypes import Datatype
from gpucoll.integrations.mpi4py.errors import argument_error, type_error
from gpucoll.integrations.mpi4py.handles import Handle
from gpucoll.integrations.mpi4py.memory import buffer
from gpucoll.integrations.mpi4py.specifications import Simple

if TYPE_CHECKING:
    from gpucoll.arrays.library import AnyArray
    from gpucoll.calls.given import AnyObject
    from gpucoll.integrations.mpi4py.typing import BufSpec

Row: TypeAlias = npt.NDArray[Any]
"""Elements of any dtype: np.generic has neither fields nor arithmetic."""
_NATIVE = set("?bhilqBHILQefdFD")
"""dtypes that gpucoll reduces."""

ObjectOp: TypeAlias = "Op | Callable[[AnyObject, AnyObject], AnyObject]"
"""An operation, or a function of two Python objects."""


class Core:
    """The contents of an operation."""

    def __init__(
        self,
        name: str,
        native: str | None,
        function: Callable[[AnyObject, AnyObject], AnyObject],
        on_rows: Callable[[Row, Row], Row] | None = None,
        user: Callable[..., AnyObject] | None = None,
        commute: bool = True,
    ) -> None:
        self.name, self.native, self.function = name, native, function
        self.on_rows, self.user, self.commute = on_rows, user, commute


class Op(Handle):
    """An operation. Calling it with two Python objects combines them."""

    _native: str | None = None
    """The name of gpucoll's op; None if the reduction must be done here."""

    def __new__(cls, op: Op | None = None) -> Op:
        self = super().__new__(cls, op)
        self._native = op._native if op is not None else None
        return self

    @classmethod
    def Create(cls, function: Callable[..., AnyObject], commute: bool = False) -> Op:
        """Make an operation of ``function(inbuf, inoutbuf, datatype)``, which writes `inoutbuf`."""
        if not callable(function):
            raise TypeError(f"expecting a function, got {type(function).__name__}")
        core = Core(
            "user", None, lambda x, y: function(x, y, None), user=function, commute=bool(commute)
        )
        return cls._of(core)

    def __call__(self, x: AnyObject, y: AnyObject) -> AnyObject:
        return self._live("ERR_OP").function(x, y)

    def Free(self) -> None:
        if self._live("ERR_OP").user is None:
            raise argument_error(f"{self._core.name} is predefined and cannot be freed", "ERR_OP")
        self._core = self._native = None

    def free(self) -> None:
        """Free it unless it is predefined; may be called repeatedly."""
        if self._core is not None and self._core.user is not None:
            self.Free()
        elif not any(self is item for item in OPERATIONS.values()):
            self._core = None

    def Is_commutative(self) -> bool:
        return bool(self._live("ERR_OP").commute)

    is_commutative = property(Is_commutative)

    @property
    def is_predefined(self) -> bool:
        return self._core is None or self._core.user is None

    def Reduce_local(self, inbuf: BufSpec, inoutbuf: BufSpec) -> None:
        """Write ``inbuf op inoutbuf`` to `inoutbuf`, on this rank only."""
        left, right = Simple(inbuf, False), Simple(inoutbuf, True)
        if left.datatype != right.datatype and left.map.dtype != right.map.dtype:
            raise argument_error("mismatch in send and receive MPI datatypes", "ERR_TYPE")
        if left.count != right.count:
            raise argument_error(
                f"mismatch in send count {left.count} and receive count {right.count}", "ERR_COUNT"
            )
        row, finish = right.target()
        row[...] = combine(self, left.row(), row.copy(), right.datatype)
        if finish is not None:
            finish()

    def __reduce__(self) -> tuple[object, ...]:
        if self._core is None:
            return self._reduced("OP_NULL")
        if self._core.user is None:
            return self._reduced(self._core.name)
        return type(self).Create, (self._core.user, self._core.commute)

    def __repr__(self) -> str:
        return f"<Op {self._core.name if self._core else 'OP_NULL'}>"


def native_name(op: Op, x: AnyArray, fewest: int) -> str | None:
    """Return the name of gpucoll's op; None if the reduction must be done here.

    Parameters
    ----------
    op : Op
        The operation.
    x : array
        This rank's elements.
    fewest : int
        The smallest number of ranks whose values some rank's result combines. MPI copies the value
        of a single rank, gpucoll does not (see `LOGICAL`); for GPU arrays this is ignored.
    """
    name: str | None = op._live("ERR_OP").native
    dtype = getattr(x, "dtype", None)
    if name is None or not isinstance(dtype, np.dtype):
        return name
    if name in LOGICAL and fewest == 1 and isinstance(x, np.ndarray):
        return None
    return name if dtype.char in _NATIVE or dtype.kind == "V" else None


def check(op: Op, datatype: Datatype) -> None:
    """Raise if an operation does not support a datatype."""
    if not isinstance(op, Op):
        raise type_error(f"expecting Op, got {type(op).__name__}", "ERR_OP")
    core = op._live("ERR_OP")
    type_map = datatype._map()
    if core.user is not None or core.name in ("REPLACE", "NO_OP"):
        return
    if (core.name in _PAIRED) != _is_pair(datatype):
        raise argument_error(f"{core.name} does not support {datatype!r}", "ERR_OP")
    kind = type_map.dtype.kind
    refused = {"BAND": "fcSU", "BOR": "fcSU", "BXOR": "fcSU", "MAX": "cSU", "MIN": "cSU"}
    if kind in refused.get(core.name, "SU") or (core.name.startswith("L") and kind == "c"):
        raise argument_error(f"{core.name} does not support {type_map.dtype}", "ERR_OP")


def combine(op: Op, left: Row, right: Row, datatype: Datatype) -> Row:
    """Return ``left op right``; `right` may be overwritten."""
    core = op._live("ERR_OP")
    if core.user is not None:
        shown, written = np.ascontiguousarray(left), np.ascontiguousarray(right)
        core.user(*(row.view(np.uint8).view(buffer) for row in (shown, written)), datatype)
        return written
    if _is_pair(datatype):
        dtype = _packed_pair(datatype)
        both = core.on_rows(left.view(np.uint8).view(dtype), right.view(np.uint8).view(dtype))
        return both.view(np.uint8).view(left.dtype)  # type: ignore[no-any-return]
    with np.errstate(all="ignore"):
        return core.on_rows(left, right).astype(left.dtype)  # type: ignore[no-any-return]


def fold(op: Op, rows: list[Row], datatype: Datatype) -> Row:
    """Reduce several rows, from the first to the last."""
    result = rows[0].copy()
    for row in rows[1:]:
        result = combine(op, result, row.copy(), datatype)
    return result


def python_function(op: object) -> Callable[[AnyObject, AnyObject], AnyObject]:
    """Return the function of two objects for an operation or a function of the program."""
    if isinstance(op, Op):
        return op._live("ERR_OP").function  # type: ignore[no-any-return]
    if callable(op):
        return op
    raise TypeError(f"expecting an Op or a function, got {type(op).__name__}")


def _is_pair(datatype: Datatype) -> bool:
    return datatype._core is not None and "pair" in datatype._core.parameters


def _packed_pair(datatype: Datatype) -> np.dtype[np.generic]:
    fields = datatype._core.parameters["pair"].fields
    return np.dtype([("value", fields["value"][0]), ("index", fields["index"][0])])


def _located(beats: Callable[[Row, Row], Row]) -> Callable[[Row, Row], Row]:
    def on_rows(left: Row, right: Row) -> Row:
        a, b = left["value"], right["value"]
        takes_right = beats(b, a) | ((a == b) & (right["index"] < left["index"]))
        return np.where(takes_right, right, left)

    return on_rows


def _located_objects(
    beats: Callable[[AnyObject, AnyObject], AnyObject],
) -> Callable[[AnyObject, AnyObject], AnyObject]:
    def function(left: AnyObject, right: AnyObject) -> AnyObject:
        (u, i), (v, j) = left, right
        if beats(u, v):
            return u, i
        return (v, j) if beats(v, u) or j < i else (u, i)

    return function


_PAIRED = ("MAXLOC", "MINLOC")
LOGICAL = frozenset(("land", "lor", "lxor"))
"""Ops whose result gpucoll makes 0 or 1, even of a single rank's value, which MPI copies."""
_CORES = (
    Core("MAX", "max", lambda x, y: y if y > x else x, np.maximum),
    Core("MIN", "min", lambda x, y: y if y < x else x, np.minimum),
    Core("SUM", "sum", operator.add, np.add),
    Core("PROD", "prod", operator.mul, np.multiply),
    Core("LAND", "land", lambda x, y: bool(x) & bool(y), np.logical_and),
    Core("BAND", "band", operator.and_, np.bitwise_and),
    Core("LOR", "lor", lambda x, y: bool(x) | bool(y), np.logical_or),
    Core("BOR", "bor", operator.or_, np.bitwise_or),
    Core("LXOR", "lxor", lambda x, y: bool(x) ^ bool(y), np.logical_xor),
    Core("BXOR", "bxor", operator.xor, np.bitwise_xor),
    Core("MAXLOC", None, _located_objects(operator.gt), _located(operator.gt)),
    Core("MINLOC", None, _located_objects(operator.lt), _located(operator.lt)),
    Core("REPLACE", None, lambda x, y: y, lambda x, y: y, commute=False),
    Core("NO_OP", None, lambda x, y: x, lambda x, y: x, commute=False),
)


def _predefined(core: Core) -> Op:
    op = Op._of(core)
    op._native = core.native
    return op


OPERATIONS: dict[str, Op] = {core.name: _predefined(core) for core in _CORES}
OPERATIONS["OP_NULL"] = Op()
SUM = OPERATIONS["SUM"]
