"""``all_reduce(compression=...)``: checks its arguments and runs it."""

from __future__ import annotations

from collections.abc import Sequence

from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.libraries import is_array, library_of
from gpucoll.arrays.library import AnyArray, AnyStream, kind_of
from gpucoll.arrays.operands import Operands, is_sequence_of_arrays, template_of
from gpucoll.arrays.operands import prepare as prepare_arrays
from gpucoll.backends.choice import HOST_ARRAYS
from gpucoll.backends.protocol import PartOf, Request
from gpucoll.calls.collectives import Collectives
from gpucoll.calls.compressed_exchange import CompressedExchange
from gpucoll.calls.given import AnyInput, AnyResult
from gpucoll.calls.gpu.call import GpuCall
from gpucoll.calls.lists import check_streams, prepare_list, shared_by
from gpucoll.calls.preparation import NOT_IN_GROUPS, list_in_group
from gpucoll.collectives import Collective
from gpucoll.compression import Compression
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.types import COMPRESSIONS, ReduceOp, dtype_code

_OPS = ("sum", "avg")


def all_reduce(
    collectives: Collectives,
    x: AnyInput,
    op: object,
    out: AnyInput,
    compression: object,
    residual: AnyInput,
    async_op: bool,
    timeout_s: float | None,
    stream: AnyStream,
) -> AnyResult:
    """Reduce x over all ranks in compressed form, for `Communicator.all_reduce`."""
    runner = collectives.runner
    runner.group.check_open()
    if compression is None:
        raise ArgumentTypeError("residual needs compression=, whose errors it keeps")
    compression, op = Compression.parse(compression), _parse_op(op)
    is_list = isinstance(x, list | tuple) and (not x or is_sequence_of_arrays(x))
    for item in x if is_list else [x]:
        compression.check_dtype(template_of(item).dtype)
    made = prepare_list(x, out) if is_list else [prepare_arrays(x, out)]
    residuals = _residuals(residual, made, is_list)
    request = _request(made, op, compression, residuals)

    def finish() -> AnyResult:
        results = [arrays.finish() for arrays in made]
        if not is_list:
            return results[0]
        return tuple(results) if isinstance(x, tuple) else results

    lasting = list_in_group(made, x)
    if not is_list and lasting is not NOT_IN_GROUPS:
        lasting = lasting[0]
    if made and collectives.dispatch.is_enqueued(made[0].template):
        check_streams([*(source for source, _ in request.parts), *residuals], stream)
        call = GpuCall(
            "all_reduce",
            made[0].template,
            finish,
            [request],
            is_own=out is not None and lasting is not NOT_IN_GROUPS,
            stream=stream,
            timeout_s=timeout_s,
        )
        return collectives.gpu.call(call, async_op, lasting)
    exchange = CompressedExchange(collectives.host, runner.group, request)
    return runner.run(
        "all_reduce", exchange.run, finish, async_op=async_op, timeout_s=timeout_s, lasting=lasting
    )


def _request(
    made: Sequence[Operands], op: ReduceOp, compression: Compression, residuals: Sequence[Buffer]
) -> Request:
    """Return the request, with the call in the form in which ranks compare it."""
    parts = tuple((arrays.source, arrays.destination) for arrays in made)
    xs = [x for x, _ in parts]
    shape = xs[0].shape if len(xs) == 1 else (sum(x.count for x in xs),)
    numbers = [len(xs)]
    for x in xs:
        numbers += [dtype_code(x.dtype), len(x.shape), *x.shape]
    dtype = xs[0].dtype if xs else "float32"
    collective, code = Collective.COMPRESSED_ALL_REDUCE, COMPRESSIONS.index(compression.name)
    source, destination = parts[0] if parts else (None, None)
    return Request(
        collective,
        source,
        destination,
        op,
        parts=parts,
        part_of=PartOf(collective, op, dtype, code, shape, tuple(numbers)),
        compression=compression,
        residuals=tuple(residuals),
    )


def _parse_op(op: object) -> ReduceOp:
    parsed = ReduceOp.parse(op)
    if parsed.name not in _OPS:
        raise ArgumentTypeError(
            f"all_reduce with compression adds up: op must be sum or avg; got {parsed}"
        )
    return parsed


def _residuals(residual: AnyInput, made: Sequence[Operands], is_list: bool) -> list[Buffer]:
    """Return the memory of the residuals, one for each input if there are any."""
    if residual is None:
        return []
    given = residual if is_list else [residual]
    if not isinstance(given, list | tuple) or len(given) != len(made):
        raise ArgumentTypeError(f"residual must be a list of {len(made)} arrays, like x")
    names = [f"residual[{place}]" if is_list else "residual" for place in range(len(made))]
    buffers = [_residual(*row) for row in zip(given, names, made, strict=True)]
    _check_alone(buffers, made)
    return buffers


def _residual(array: AnyArray, what: str, arrays: Operands) -> Buffer:
    """Return the memory of one residual. `what` is its name in errors."""
    if not is_array(array):
        raise ArgumentTypeError(f"{what} must be a float32 array; got {kind_of(array)}")
    wanted = arrays.template.device.partition(":")[0]
    try:
        view = library_of(array, what).look_at_out(array)
    except (ArgumentError, ArgumentTypeError) as error:
        raise type(error)(f"{what} cannot be written: {error}") from None
    of = view.template
    if of.dtype != "float32" or of.device.partition(":")[0] != wanted:
        place = "the host" if wanted == HOST_ARRAYS else arrays.template.device
        raise ArgumentTypeError(
            f"{what} must be a float32 array on {place}, like x; got {of.dtype} on {of.device}"
        )
    if view.strides is not None:
        raise ArgumentError(f"{what} must be C-contiguous")
    buffer = view.buffer()
    if buffer.count != arrays.source.count:
        raise ArgumentError(
            f"{what} has {buffer.count} elements (shape {of.shape}), but x has "
            f"{arrays.source.count} (shape {arrays.template.shape})"
        )
    return buffer


def _check_alone(residuals: Sequence[Buffer], made: Sequence[Operands]) -> None:
    """Raise if a residual shares memory with another array of the call."""
    users = [((arrays.source,), (arrays.destination,)) for arrays in made]
    if shared_by([*users, *(((buffer,), (buffer,)) for buffer in residuals)]):
        raise ArgumentError(
            "residual shares memory with another array of this call: give it memory of its own"
        )
