"""Dtypes, reduce ops, and the numbers by which ranks compare their calls."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypeAlias
from weakref import WeakValueDictionary

from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.function_digest import function_digest, python_function
from gpucoll.wording import OUT_BY_NAME, is_array_like, spelled_given

AnyScalar: TypeAlias = Any
"""One element of an array: Numba's, NumPy's or Python's number."""
DTYPES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
"""Dtypes that reductions support. A dtype's number in a signature is its index here."""

_BITWISE = ("band", "bor", "bxor")
_LOGICAL = ("land", "lor", "lxor")
OPERATIONS = ("sum", "prod", "min", "max", "avg", *_BITWISE, *_LOGICAL, "scaled_sum")
"""All reductions. An op's number in a signature is its index here plus one."""
COMPRESSIONS = ("float16", "bfloat16", "int8_block", "float8_block")
"""Formats of a compressed all_reduce. A format's number in a signature is its index here."""
ANY_SOURCE: Final = -1
"""The source of a receive that accepts a message from any rank."""
ANY_TAG: Final = -1
"""The tag of a receive that accepts any tag."""
TAGS: Final = 1 << 31
"""Limit of tags: all are smaller."""


@dataclass(frozen=True)
class ReduceOp:
    """The function that combines the values of all ranks.

    The built-in ops have names: ``"sum"``, ``"prod"``, ``"min"``, ``"max"``, ``"avg"``, ``"band"``,
    ``"bor"``, ``"bxor"``, ``"land"``, ``"lor"``, ``"lxor"``. They are also attributes
    (``ReduceOp.SUM``). `scaled_sum` makes an op with a factor, `custom` one from a function.

    Integer ``avg`` rounds toward zero. Integer sums wrap around, except for Python's ints, whose
    sums are exact. ``min`` and ``max`` propagate NaN. For bool, ``sum`` is ``lor`` and ``prod`` is
    ``land``, as in NumPy.
    """

    name: str
    factor: float | None = None
    function: Callable[[AnyScalar, AnyScalar], AnyScalar] | None = field(
        default=None, compare=False
    )
    identity: AnyScalar = field(default=None, compare=False)
    commutative: bool = field(default=True, compare=False)
    digest: int = 0
    """The digest of `function`, `identity` and `commutative` that ranks compare; 0 without one."""

    SUM: ClassVar[ReduceOp]
    PROD: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]
    LAND: ClassVar[ReduceOp]
    LOR: ClassVar[ReduceOp]
    LXOR: ClassVar[ReduceOp]

    def __post_init__(self) -> None:
        if self.function is not None and self.digest:
            return
        has_factor = isinstance(self.factor, float)
        is_known = self.name in OPERATIONS and has_factor == (self.name == "scaled_sum")
        if not is_known or self.function is not None:
            raise ArgumentError(
                f"{self.name!r} with factor {self.factor!r} is not an op: pass a name, or the "
                "result of ReduceOp.scaled_sum(factor) or ReduceOp.custom(function)"
            )

    def depends_on_order(self, dtype: str) -> bool:
        """Return whether another order of the ranks may change the bits of the result."""
        return self.function is not None or not dtype.startswith(("int", "uint", "bool"))

    @staticmethod
    def scaled_sum(factor: float) -> ReduceOp:
        """Return the op that multiplies every rank's input by `factor` before summing.

        Parameters
        ----------
        factor : float
            A real number, the same on every rank (it is part of the call's signature). For integer
            dtypes it must be an integer. It is rounded to the dtype in which sums are held (float32
            for half types); integers beyond 2**53 are rounded to a double.
        """
        number: Any = factor
        if isinstance(number, bool) or not isinstance(number, numbers.Real):
            raise ArgumentTypeError(f"scaled_sum's factor must be a real number; got {number!r}")
        return _scaled_sum(float(number))

    @staticmethod
    def custom(
        function: Callable[[AnyScalar, AnyScalar], AnyScalar],
        identity: AnyScalar = None,
        commutative: bool = True,
    ) -> ReduceOp:
        """Return an op that combines two values by a user's function.

        Parameters
        ----------
        function : callable
            An associative ``function(left, right)`` of two scalars of the arrays' dtype; for half
            types, of float32. Numba compiles it, by its rules for mixed types. A function made by
            `numba.njit` is accepted, too, without its options. The result is of that dtype, or is
            narrowed to it: wider integers wrap around, wider floats are rounded, bool is 0 or 1,
            and for bool the truth of an integer counts. Division by zero behaves as in NumPy.
        identity : scalar, optional
            The value that leaves any value unchanged when combined with it. `exclusive_scan` needs
            it and returns it on rank 0. The dtype must hold it exactly.
        commutative : bool
            Whether the order of two values does not matter. The CPU backend always combines in rank
            order, left to right; other backends may be faster for a commutative function.

        Raises
        ------
        ArgumentTypeError
            The function does not take two arguments, is a generator, raises or asserts, or uses an
            object that ranks cannot compare. If Numba refuses a dtype, the first call raises that.

        Notes
        -----
        All ranks need the same function: its code, its constants and the values of its closure and
        globals are part of the call's signature. They are read here; later changes have no effect,
        or are refused. Half types are rounded once, after the last rank.

        Cost: the first call with each dtype compiles, for 0.3 to 1 s, once per process. Keep the
        op, because making it reads the function again.

        Examples
        --------
        >>> def add_logarithms(a, b):  # log(exp(a) + exp(b)), without overflow
        ...     return max(a, b) + math.log1p(math.exp(-abs(a - b)))
        >>> op = ReduceOp.custom(add_logarithms, identity=-math.inf)
        >>> total = comm.all_reduce(log_weights, op)
        """
        plain = python_function(function)
        if plain is None:
            what = getattr(function, "__name__", None)
            hint = f": write lambda a, b: {what}(a, b)" if what and callable(function) else ""
            raise ArgumentTypeError(
                f"custom needs a function of two arguments, def or lambda; got {function!r}{hint}"
            )
        name = f"custom({plain.__name__})"
        try:
            inspect.signature(plain, follow_wrapped=False).bind(None, None)
        except TypeError as error:
            raise ArgumentTypeError(f"{name}: it must take two arguments: {error}") from None
        try:
            digest = function_digest(plain, identity, bool(commutative))
        except ArgumentTypeError as error:
            raise ArgumentTypeError(f"{name}: {error}") from None
        known = _customs.get(digest)
        if known is None or known.name != name:  # one object for each op: entries compare identity
            known = ReduceOp(name, None, plain, identity, bool(commutative), digest)
            _customs[digest] = known
        return known

    @staticmethod
    def parse(op: object) -> ReduceOp:
        """Return `op`, a name or a `ReduceOp`, as a `ReduceOp`; raise ArgumentError otherwise."""
        if isinstance(op, ReduceOp):
            return op
        if isinstance(op, str) and op in BUILT_IN:
            return BUILT_IN[op]
        names = ", ".join(BUILT_IN)
        raise ArgumentError(
            f"op must be a ReduceOp or one of {names}; got {spelled_given(op)}{_hint_at(op)}"
        )

    @property
    def code(self) -> int:
        """The op's number in a signature."""
        return _CUSTOM if self.function else OPERATIONS.index(self.name) + 1

    @property
    def parameter_bits(self) -> int:
        """The factor's bits as a double, or a function's digest, for a signature; otherwise 0."""
        if self.factor is None:
            return self.digest
        return int(struct.unpack("<q", struct.pack("<d", self.factor))[0])

    def check_dtype(self, dtype: str) -> None:
        """Raise `ArgumentTypeError` if this op is not defined for the dtype."""
        if dtype not in DTYPES:
            raise ArgumentTypeError(
                f"{self.name}: no reduction works on dtype {dtype}; supported are: "
                + ", ".join(DTYPES)
            )
        if reason := self._refusal(dtype):
            raise ArgumentTypeError(f"{self.name} is not defined for {dtype}: {reason}")

    def _refusal(self, dtype: str) -> str:
        is_complex = dtype.startswith("complex")
        is_integer = dtype.startswith(("int", "uint"))
        if self.name in _BITWISE and not is_integer and dtype != "bool":
            return "bitwise operations work on integers and bool"
        if self.name in ("min", "max", *_LOGICAL) and is_complex:
            return "complex numbers have no order and no truth value here; reduce the parts"
        if self.name in ("avg", "scaled_sum") and dtype == "bool":
            return "convert to a number first"
        if self.name == "scaled_sum" and is_integer:
            return self._factor_refusal(dtype)
        return ""

    def _factor_refusal(self, dtype: str) -> str:
        factor = self.factor or 0
        if not math.isfinite(factor) or factor != int(factor):
            return f"the factor {factor} is not whole"
        is_signed = dtype.startswith("int")
        bits = int(dtype.removeprefix("u").removeprefix("int")) - is_signed
        if not -(1 << bits) * is_signed <= factor < 1 << bits:
            return f"the factor {factor} is not in its range"
        return ""

    def __str__(self) -> str:
        return self.name if self.factor is None else f"{self.name}({self.factor})"


_ELSEWHERE = {
    **dict.fromkeys(("mean", "average"), "avg"),
    **dict.fromkeys(("add", "plus"), "sum"),
    **dict.fromkeys(("product", "mul", "multiply"), "prod"),
    **dict.fromkeys(("minimum", "amin"), "min"),
    **dict.fromkeys(("maximum", "amax"), "max"),
    **dict.fromkeys(("and", "bitwise_and"), "band"),
    **dict.fromkeys(("or", "bitwise_or"), "bor"),
    **dict.fromkeys(("xor", "bitwise_xor"), "bxor"),
    **{f"logical_{name}": f"l{name}" for name in ("and", "or", "xor")},
    "premul_sum": "scaled_sum",
}
"""Names of ops in NumPy, MPI, torch.distributed and NCCL -> names here."""


def _hint_at(op: object) -> str:
    """Return a hint at the op that the user may have meant; empty if there is none."""
    if is_array_like(op):
        return OUT_BY_NAME
    given = op if isinstance(op, str) else getattr(op, "__name__", getattr(op, "name", ""))
    name = str(given).lower().removeprefix("mpi_")
    name = _ELSEWHERE.get(name, name)
    if name == "scaled_sum":
        return " (write ReduceOp.scaled_sum(factor))"
    named = f'"{name}"' if name in BUILT_IN else ""
    own = "ReduceOp.custom(function)" if callable(op) else ""
    return f" (write {' or '.join(filter(None, (named, own)))})" if named or own else ""


@functools.lru_cache(maxsize=128)  # one object for each factor: entries compare identity
def _scaled_sum(factor: float) -> ReduceOp:
    return ReduceOp("scaled_sum", factor)


BUILT_IN: Mapping[str, ReduceOp] = MappingProxyType(
    {name: ReduceOp(name) for name in OPERATIONS if name != "scaled_sum"}
)
_CUSTOM = len(OPERATIONS) + 1
_customs: WeakValueDictionary[int, ReduceOp] = WeakValueDictionary()
for _name, _op in BUILT_IN.items():
    setattr(ReduceOp, _name.upper(), _op)


def operation_name(code: int, parameter_bits: int = 0) -> str:
    """Return the name of the op with this number in a signature; empty if there is none."""
    if code == _CUSTOM:
        known = _customs.get(parameter_bits)
        return f"{known or 'custom'} #{parameter_bits:x}"
    if not 1 <= code <= len(OPERATIONS):
        return ""
    name = OPERATIONS[code - 1]
    if name != "scaled_sum":
        return name
    return str(ReduceOp(name, struct.unpack("<d", struct.pack("<q", parameter_bits))[0]))


DIGEST_SEED = 0x9E3779B1


def mix_digest(digest: int, value: int) -> int:
    """Mix one more number into a 32-bit digest.

    The same function runs in Python and, compiled by Numba, on int64. The multipliers have 31 bits,
    so no product leaves the range of int64.
    """
    low = (digest ^ (value & 0x7FFFFFFF)) & 0xFFFFFFFF
    low = (low * 0x6C8E9CF5) & 0xFFFFFFFF
    low = (low ^ (low >> 15) ^ ((value >> 31) & 0x7FFFFFFF)) & 0xFFFFFFFF
    return ((low * 0x2C1B3C6D) & 0xFFFFFFFF) ^ (low >> 16)


def digest_of(values: tuple[int, ...]) -> int:
    """Return the digest of a sequence of numbers."""
    digest = DIGEST_SEED
    for value in values:
        digest = mix_digest(digest, value)
    return digest


def dtype_code(name: str) -> int:
    """Return a dtype's number in a signature; for other fixed-size dtypes a hash of the name."""
    if name in DTYPES:
        return DTYPES.index(name)
    return len(DTYPES) + digest_of(tuple(name.encode()))


def dtype_name(code: int) -> str:
    """Return the name of the dtype with this number in a signature."""
    if code < 0:
        return ""
    return DTYPES[code] if code < len(DTYPES) else f"dtype #{code:x}"
