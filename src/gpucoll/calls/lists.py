"""Lists of arrays in one call: checked array by array, moved as one array."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.library import AnyArray, AnyStream
from gpucoll.arrays.operands import Operands, ensure_served
from gpucoll.arrays.operands import prepare as prepare_arrays
from gpucoll.backends.protocol import Request
from gpucoll.calls.exact_integers import (
    KeptInputs,
    check_range,
    is_exact,
    is_int64_number,
    may_overflow,
)
from gpucoll.calls.given import AnyInput
from gpucoll.calls.preparation import Arguments
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.types import ReduceOp


def prepare_list(xs: Sequence[AnyArray], outs: AnyInput) -> list[Operands]:
    """Check a list of inputs and outputs, and return their operands.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array is invalid, and the message says which one; or two arrays share memory.
    """
    if outs is not None and (not isinstance(outs, list | tuple) or len(outs) != len(xs)):
        got = f"{len(outs)} arrays" if isinstance(outs, list | tuple) else type(outs).__name__
        raise ArgumentTypeError(f"out must be a list of {len(xs)} arrays, like x; got {got}")
    made = []
    for place, x in enumerate(xs):
        try:
            arrays = prepare_arrays(x, None if outs is None else outs[place], what=f"x[{place}]")
            ensure_served(arrays.template, f"x[{place}]")
            check_range(arrays.template, f"x[{place}]")
        except (ArgumentError, ArgumentTypeError) as error:
            raise type(error)(f"array {place} of the list: {error}") from None
        made.append(arrays)
    if len(devices := {arrays.template.device for arrays in made}) > 1:
        raise ArgumentError(f"arrays of one list lie on different devices: {sorted(devices)}")
    if shared := shared_by([([arrays.source], [arrays.destination]) for arrays in made]):
        one, other = shared
        raise ArgumentError(
            f"arrays {one} and {other} of the list share memory, and one is written: "
            "give each array once (tied weights too), with memory of its own"
        )
    return made


def shared_by(users: Sequence[tuple[Sequence[Buffer], Sequence[Buffer]]]) -> tuple[int, int] | None:
    """Return two users of shared memory of which at least one writes it, or None.

    Parameters
    ----------
    users : sequence of (sequence of Buffer, sequence of Buffer)
        For each user, the buffers that it reads and those that it writes.
    """
    pieces = []
    for place, used in enumerate(users):
        for buffers, is_output in zip(used, (False, True), strict=True):
            for buffer in buffers:
                if buffer.size_bytes:
                    pieces.append((buffer.address, buffer.size_bytes, place, is_output))
    pieces.sort()
    # For readers and for writers, the ends of the two users that reach furthest.
    furthest: dict[bool, dict[int, int]] = {False: {}, True: {}}
    for address, size_bytes, place, is_output in pieces:
        for other_is_output, ends in furthest.items():
            for other, end in ends.items():
                if (is_output or other_is_output) and other != place and address < end:
                    return other, place
        ends = furthest[is_output]
        ends[place] = max(address + size_bytes, ends.get(place, 0))
        if len(ends) > 2:
            del ends[min(ends, key=ends.__getitem__)]
    return None


def apart(
    collective: Collective, op: ReduceOp | None, made: list[Operands]
) -> tuple[list[Operands], list[Operands]]:
    """Divide a list into numbers, which have a call of their own each, and fused arrays.

    The result of an int is exact, that of fused arrays is not. A NumPy number is kept apart, too,
    because another rank may pass an int in its place.
    """
    if not may_overflow(collective, op):
        return [], made
    numbers = [item for item in made if is_int64_number(item.template)]
    return numbers, [item for item in made if not is_int64_number(item.template)]


def number_request(
    collective: Collective, item: Operands, arguments: Arguments, world_size: int, gets: bool
) -> Request:
    """Return the request for a number of a list. `gets`: whether this rank gets a result."""
    keeps = gets and is_exact(collective, arguments.op, item.template)
    if keeps:
        assert arguments.op is not None
        kept = KeptInputs(arguments.op, world_size)
        item.destination, item.finish = kept.buffer, kept.finish
    destination = item.destination if gets else None
    op, root = arguments.op, arguments.root
    return Request(collective, item.source, destination, op, root, keeps=keeps)


def by_dtype(made: list[Operands]) -> list[list[Operands]]:
    """Return the arrays of each dtype, ordered by the first array of each dtype."""
    groups: dict[str, list[Operands]] = defaultdict(list)
    for arrays in made:
        groups[arrays.source.dtype].append(arrays)
    return list(groups.values())


def list_request(arrays: list[Operands], arguments: Arguments) -> Request:
    """Return the request of a fused all_reduce of arrays of one dtype."""
    parts = tuple((item.source, item.destination) for item in arrays)
    first = arrays[0]
    return Request(
        Collective.ALL_REDUCE_LIST, first.source, first.destination, arguments.op, parts=parts
    )


def gpu_requests(
    collective: Collective, made: list[Operands], arguments: Arguments, stream: AnyStream
) -> list[Request]:
    """Return the requests for a list of GPU arrays, one for each dtype. They run as one group.

    Raises
    ------
    ArgumentError
        The arrays are used on different streams, and the user gave none.
    """
    check_streams([item.source for item in made], stream)
    requests = []
    for arrays in by_dtype(made):
        request = list_request(arrays, arguments)
        if collective != Collective.ALL_REDUCE:
            request = request._replace(collective=collective, root=arguments.root)
        requests.append(request)
    return requests


def check_streams(buffers: Sequence[Buffer], stream: AnyStream) -> None:
    """Raise if arrays on a GPU are used on different streams, and the user gave none."""
    if stream is None and len({buffer.stream for buffer in buffers}) > 1:
        raise ArgumentError(
            "arrays of one call are used on different streams (of different libraries): give "
            "stream=, or a list for each"
        )


class Packed:
    """Operands of one dtype packed into one buffer, for collectives without support for lists.

    Attributes
    ----------
    buffer : Buffer
        The memory of all operands, without gaps.
    pack, unpack : callable
        Copy the inputs into the buffer, and the buffer to the outputs.
    """

    def __init__(self, arrays: list[Operands]) -> None:
        from gpucoll.kernels.cpu.pack import layout, prepare_pack, prepare_unpack

        first = arrays[0].source
        offsets = layout([item.source.size_bytes for item in arrays], alignment_bytes=1)
        memory = np.empty(offsets[-1], np.uint8)
        address, count = memory.ctypes.data, offsets[-1] // max(first.item_bytes, 1)
        self.buffer = Buffer(address, (count,), first.dtype, first.item_bytes, memory)
        self.pack = prepare_pack([item.source for item in arrays], address, offsets)
        self.unpack = prepare_unpack([item.destination for item in arrays], address, offsets)
