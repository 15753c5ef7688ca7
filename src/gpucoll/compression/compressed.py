"""``all_reduce(compression=...)``: checks its arguments and runs it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.libraries import is_array, library_of
from gpucoll.arrays.library import AnyArray, AnyStream, kind_of
from gpucoll.arrays.operands import Operands, is_sequence_of_arrays, template_of
from gpucoll.arrays.operands import prepare as prepare_arrays
from gpucoll.backends.choice import HOST_ARRAYS
from gpucoll.backends.protocol import Compressed, Request
from gpucoll.calls.collectives import Collectives
from gpucoll.calls.given import AnyInput, AnyResult
from gpucoll.calls.gpu.call import GpuCall
from gpucoll.calls.lists import check_overlaps, check_streams, prepare_list
from gpucoll.calls.preparation import NOT_IN_GROUPS, list_in_group
from gpucoll.collectives import Collective
from gpucoll.compression.exchange import Exchange, part_of
from gpucoll.compression.options import Compression
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.types import ReduceOp

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
    how, op = Compression.parse(compression), _parse_op(op)
    is_list = isinstance(x, list | tuple) and (not x or is_sequence_of_arrays(x))
    for item in x if is_list else [x]:
        how.check_dtype(template_of(item).dtype)
    made = prepare_list(x, out) if is_list else [prepare_arrays(x, out)]
    residuals = _residuals(residual, made, is_list)

    def finish() -> AnyResult:
        results = [arrays.finish() for arrays in made]
        if not is_list:
            return results[0]
        return tuple(results) if isinstance(x, tuple) else results

    lasting = list_in_group(made, x)
    if not is_list and lasting is not NOT_IN_GROUPS:
        lasting = lasting[0]
    if made and collectives.dispatch.is_enqueued(made[0].template):
        check_streams([*(arrays.source for arrays in made), *(residuals or ())], stream)
        call = GpuCall(
            "all_reduce",
            made[0].template,
            finish,
            [_request(made, residuals or (), op, how)],
            is_own=out is not None and lasting is not NOT_IN_GROUPS,
            stream=stream,
            timeout_s=timeout_s,
        )
        return collectives.gpu.call(call, async_op, lasting)
    rank, world_size = collectives.rank, collectives.world_size
    exchange = Exchange(collectives.host, rank, world_size, made, residuals, op, how)
    return runner.run(
        "all_reduce",
        functools.partial(exchange.run, runner.group),
        finish,
        async_op=async_op,
        timeout_s=timeout_s,
        lasting=lasting,
    )


def _request(
    made: Sequence[Operands], residuals: Sequence[Buffer], op: ReduceOp, how: Compression
) -> Request:
    """Return the request for a call on GPU arrays."""
    return Request(
        Collective.COMPRESSED_ALL_REDUCE,
        made[0].source,
        made[0].destination,
        op,
        parts=tuple((arrays.source, arrays.destination) for arrays in made),
        part_of=part_of(made, op, how),
        compressed=Compressed(how.name, how.wire_format, how.seed, tuple(residuals)),
    )


def _parse_op(op: object) -> ReduceOp:
    parsed = ReduceOp.parse(op)
    if parsed.name not in _OPS:
        raise ArgumentTypeError(
            f"all_reduce with compression adds up: op must be sum or avg; got {parsed}"
        )
    return parsed


def _residuals(residual: AnyInput, made: Sequence[Operands], is_list: bool) -> list[Buffer] | None:
    """Return the memory of the residuals, one for each input."""
    if residual is None:
        return None
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


@dataclass(frozen=True)
class _Written:
    """A residual in the form of a list's array, for `check_overlaps`: read and written."""

    source: Buffer
    destination: Buffer


def _check_alone(residuals: Sequence[Buffer], made: Sequence[Operands]) -> None:
    """Raise if a residual shares memory with another array of the call."""
    try:
        check_overlaps([*made, *(_Written(buffer, buffer) for buffer in residuals)])
    except ArgumentError:
        raise ArgumentError(
            "residual shares memory with another array of this call: give it memory of its own"
        ) from None
