"""Launch the reduce kernels: every destination = source 0 op source 1 op ..., in one pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.library import AnyArray, AnyStream
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.kernels.gpu.launch import Target, buffers_of, struct, target_of
from gpucoll.kernels.gpu.source import MAX_RANKS, TILE_BYTES, Kernel
from gpucoll.types import BUILT_IN, DTYPES, OPERATIONS, ReduceOp

ARGUMENTS = np.dtype(
    [
        ("count", "u8"),
        ("parameter", "u8"),
        ("n_sources", "u4"),
        ("n_destinations", "u4"),
        ("sources", "u8", MAX_RANKS),
        ("destinations", "u8", MAX_RANKS),
    ]
)
"""``ReduceArguments`` of ``reduce.cu``."""

ELEMENTS = {
    "int8": "Int8",
    "int16": "Int16",
    "int32": "Int32",
    "int64": "Int64",
    "uint8": "Uint8",
    "uint16": "Uint16",
    "uint32": "Uint32",
    "uint64": "Uint64",
    "float16": "Float16",
    "bfloat16": "Bfloat16",
    "float8_e4m3fn": "Float8E4m3fn",
    "float8_e5m2": "Float8E5m2",
    "float32": "Float32",
    "float64": "Float64",
    "complex64": "Complex64",
    "complex128": "Complex128",
}
"""dtype -> its type in ``elements.h``."""
_OPERATIONS = {
    "sum": "Sum",
    "prod": "Product",
    "min": "Least",
    "max": "Greatest",
    "avg": "Average",
    "band": "BitwiseAnd",
    "bor": "BitwiseOr",
    "bxor": "BitwiseXor",
    "land": "LogicalAnd",
    "lor": "LogicalOr",
    "lxor": "LogicalXor",
    "scaled_sum": "ScaledSum",
}
_OF_BOOL = {"sum": "bor", "prod": "band", "min": "band", "max": "bor"}


def reduce_kernel(operation: str, dtype: str) -> tuple[Kernel, int]:
    """Return the kernel for a dtype and operation, and how many of its elements make one of ours.

    Pairs of dtype and operation share a kernel if they do the same to the bits: bool is uint8;
    signed integers are unsigned ones, except for order and division; a complex number is two
    floats, except for products.
    """
    parts = 1
    if dtype == "bool":
        operation, dtype = _OF_BOOL.get(operation, operation), "uint8"
    elif dtype.startswith("int") and operation not in ("min", "max", "avg"):
        dtype = f"u{dtype}"
    elif dtype.startswith("complex") and operation != "prod":
        dtype, parts = ("float32" if dtype == "complex64" else "float64"), 2
    name = f"reduce_{operation}_{dtype}"
    definition = f"REDUCE({name}, {ELEMENTS[dtype]}, {_OPERATIONS[operation]})"
    return Kernel(name, "reduce.cu", definition), parts


@functools.cache
def kernels() -> list[Kernel]:
    """Return every reduce kernel once."""
    found = {}
    for dtype in DTYPES:
        for operation in OPERATIONS:
            op = BUILT_IN.get(operation) or ReduceOp.scaled_sum(1.0)
            try:
                op.check_dtype(dtype)
            except ArgumentTypeError:
                continue
            kernel, _ = reduce_kernel(operation, dtype)
            found[kernel.name] = kernel
    return list(found.values())


def parameter_bits(dtype: str, parameter: float) -> int:
    """Return a factor or a divisor as bits of the type in which the dtype is accumulated."""
    if dtype.startswith(("int", "uint")):
        return int(parameter) & ((1 << 64) - 1)
    if dtype in ("float64", "complex128"):
        return int(np.float64(parameter).view(np.uint64))
    return int(np.float32(parameter).view(np.uint32))


def reduce_arrays(
    op: str | ReduceOp,
    destinations: Sequence[AnyArray],
    sources: Sequence[AnyArray],
    *,
    divisor: float = 1,
    stream: AnyStream = None,
) -> None:
    """Reduce `sources`, left to right, into every one of `destinations`. Enqueues and returns.

    Parameters
    ----------
    op : str or ReduceOp
        A built-in operation, `ReduceOp.scaled_sum`, or on NVIDIA GPUs one of `ReduceOp.custom`.
    destinations, sources : sequence of arrays
        1 to 16 of each, on one GPU or mapped into it, C-contiguous, of one dtype and size. Arrays
        of CuPy, PyTorch, Numba or any library with ``__cuda_array_interface__``, or `Buffer`. A
        destination may be a source; any other overlap is undefined.
    divisor : float
        The divisor of ``avg``: the number of ranks, which may differ from the number of sources.
    stream : int or object, optional
        See `gpucoll.kernels.gpu.launch.target_of`.

    Notes
    -----
    Half types are accumulated in float32 and rounded once. If all arrays have the same alignment,
    16-byte accesses are used, except for the few elements next to 16-byte boundaries; otherwise
    each element is accessed separately.

    Cost: each source is read once, and each destination is written once. The first call of a
    (dtype, operation) compiles for about half a second, unless the kernel was kept.
    """
    given, written = buffers_of(sources, "sources"), buffers_of(destinations, "destinations")
    enqueue = prepare_reduce(op, written, given, divisor=divisor)
    enqueue(target_of([*written, *given], stream).stream)


def prepare_reduce(
    op: str | ReduceOp,
    destinations: Sequence[AnyArray],
    sources: Sequence[AnyArray],
    *,
    divisor: float = 1,
) -> Callable[[int], None]:
    """Return a function that does `reduce_arrays` each time it gets a stream's address.

    It does not keep any array alive. A call costs one launch; everything else is done before.
    """
    op = ReduceOp.parse(op)
    given, written = buffers_of(sources, "sources"), buffers_of(destinations, "destinations")
    _check(op, written, given)
    target = target_of([*written, *given])
    if written[0].count == 0:
        return lambda stream: None
    if op.function is not None:
        from gpucoll.kernels.gpu.custom import prepare_custom

        return prepare_custom(op, written, given, target)
    return _prepared(op, written, given, divisor if op.factor is None else op.factor, target)


def ring_step(
    op: str | ReduceOp,
    destinations: Sequence[AnyArray],
    received: AnyArray,
    mine: AnyArray,
    *,
    is_last: bool = False,
    divisor: float = 1,
    stream: AnyStream = None,
) -> None:
    """Do one step of a ring: every destination = `received` op `mine`. Enqueues and returns.

    Parameters
    ----------
    op : str or ReduceOp
        As in `reduce_arrays`. An average is a sum until the last step, which divides it.
        ``scaled_sum`` adds only, because each rank has to scale its elements before the first step
        (`reduce_arrays` of one source).
    destinations : sequence of arrays
        The next rank's slot, mapped into this GPU; in the last step the result, or both.
    received : array
        The data that the previous rank has written here.
    mine : array
        This rank's elements.
    is_last : bool
        Whether `mine` is the last operand.
    divisor, stream
        As in `reduce_arrays`.
    """
    step = _of_ring_step(op, is_last)
    reduce_arrays(step, destinations, [received, mine], divisor=divisor, stream=stream)


def prepare_ring_step(
    op: str | ReduceOp,
    destinations: Sequence[AnyArray],
    received: AnyArray,
    mine: AnyArray,
    *,
    is_last: bool = False,
    divisor: float = 1,
) -> Callable[[int], None]:
    """Return a function that does `ring_step` each time it gets a stream's address."""
    return prepare_reduce(
        _of_ring_step(op, is_last), destinations, [received, mine], divisor=divisor
    )


def _of_ring_step(op: str | ReduceOp, is_last: bool) -> ReduceOp:
    """Return the operation of one step: averages are divided in the last, operands come scaled."""
    op = ReduceOp.parse(op)
    is_sum = op.name == "scaled_sum" or (op.name == "avg" and not is_last)
    return ReduceOp.SUM if is_sum else op


def _check(op: ReduceOp, destinations: list[Buffer], sources: list[Buffer]) -> None:
    for what, buffers in (("sources", sources), ("destinations", destinations)):
        if not 1 <= len(buffers) <= MAX_RANKS:
            raise ArgumentError(f"{what} must be 1 to {MAX_RANKS} arrays; got {len(buffers)}")
    shapes = sorted({(buffer.dtype, buffer.count) for buffer in (*destinations, *sources)})
    if len(shapes) > 1:
        found = ", ".join(f"{count} of {dtype}" for dtype, count in shapes)
        raise ArgumentError(f"all arrays must have one dtype and count; they have {found}")
    op.check_dtype(sources[0].dtype)


def _prepared(
    op: ReduceOp,
    destinations: list[Buffer],
    sources: list[Buffer],
    parameter: float,
    target: Target,
) -> Callable[[int], None]:
    dtype = sources[0].dtype
    kernel, parts = reduce_kernel(op.name, dtype)
    arguments = struct(
        ARGUMENTS,
        count=sources[0].count * parts,
        parameter=parameter_bits(dtype, parameter),
        n_sources=len(sources),
        n_destinations=len(destinations),
        sources=[buffer.address for buffer in sources],
        destinations=[buffer.address for buffer in destinations],
    )
    return target.prepared(kernel, -(-sources[0].size_bytes // TILE_BYTES), [arguments])
