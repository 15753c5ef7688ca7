"""Preparation: turns a user's arguments into a backend's request, with all checks of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpucoll.arrays.library import AnyArray, Template
from gpucoll.arrays.operands import Operands, destination_of, ensure_served, source_of, template_of
from gpucoll.arrays.operands import prepare as prepare_arrays
from gpucoll.backends.protocol import Request
from gpucoll.calls.exact_integers import KeptInputs, check_range, is_exact
from gpucoll.calls.shapes import result_of
from gpucoll.collectives import NO_ROOT, Collective, Flow
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.types import ReduceOp

if TYPE_CHECKING:
    from gpucoll.arrays.buffer import Buffer
    from gpucoll.calls.given import AnyInput, AnyResult

NOT_IN_GROUPS: Any = object()
"""Returned in place of a result for a group; means that the call cannot be made in a group."""


class Arguments(NamedTuple):
    """One call as its user made it, without its input and the options of its running.

    Attributes
    ----------
    op, root, out
        As in the methods of `Communicator`.
    counts, receive_counts : tuple of int, optional
        Checked; with "auto", as exchanged.
    """

    op: ReduceOp | None = None
    root: int = NO_ROOT
    out: Any = None
    counts: tuple[int, ...] | None = None
    receive_counts: tuple[int, ...] | None = None


class Prepared(NamedTuple):
    """A request, and the function that makes the user's result from its output.

    Attributes
    ----------
    request : Request
        The request for the backend.
    finish : callable
        Called once, when the output is complete; returns the user's result.
    is_packed : bool
        Whether the request's source is a copy of the user's input.
    lasting : object
        The value of `finish` if its memory is the output's memory, otherwise None.
    template : Template
        The template of the input, or of the output if there is no input.
    is_own : bool
        Whether all of the memory is the user's, and none was allocated for this call.
    """

    request: Request
    finish: Callable[[], Any]
    template: Template
    is_packed: bool = False
    lasting: Any = None
    is_own: bool = False


def prepare(
    collective: Collective, x: AnyInput, arguments: Arguments, rank: int, world_size: int
) -> Prepared:
    """Check this rank's arguments and return the request.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An argument is invalid; the message says why.
    BackendUnavailableError
        An array is on a device that no backend of this communicator reaches.
    """
    is_root = arguments.root in (NO_ROOT, rank)
    if collective.knows_one_block and not is_root:
        return _receive_block(collective, x, arguments, rank, world_size)
    if collective.flow == Flow.FROM_ROOT and x is None and not is_root:
        x = _template_in_out(arguments, rank, world_size)
    template = template_of(x)
    ensure_served(template)
    check_range(template)
    counts, receive_counts = arguments.counts, arguments.receive_counts
    result = result_of(collective, template.shape, rank, world_size, counts, receive_counts)
    if not collective.gets(rank, arguments.root):
        source = source_of(x)
        request = _request(collective, source.buffer, None, arguments, result.row_count)
        packed = source.is_packed
        return Prepared(request, lambda: None, template, is_packed=packed, is_own=not packed)
    if is_exact(collective, arguments.op, template) and arguments.out is None:
        return _prepare_exact(collective, x, arguments, rank, world_size)
    row_bytes = result.row_count * template.item_bytes
    # In place, blocks of different sizes would be overwritten before they are sent.
    may_be_in_place = receive_counts is None or receive_counts == counts
    made = prepare_arrays(
        x,
        arguments.out,
        shape=result.shape,
        in_place_at=result.in_place_rows * row_bytes if may_be_in_place else None,
    )
    request = _request(collective, made.source, made.destination, arguments, result.row_count)
    lasting, is_packed = made.lasting, made.is_packed
    is_own = not is_packed and arguments.out is not None and lasting is arguments.out
    return Prepared(request, made.finish, template, is_packed, lasting, is_own)


def _prepare_exact(
    collective: Collective, x: AnyInput, arguments: Arguments, rank: int, world_size: int
) -> Prepared:
    """Prepare a reduction of a Python int."""
    assert arguments.op is not None
    source, kept = source_of(x), KeptInputs(arguments.op, world_size)
    if collective.n_operands(rank, world_size) == 0:
        kept.forget()
    request = _request(collective, source.buffer, kept.buffer, arguments, 1)._replace(keeps=True)
    return Prepared(request, kept.finish, source.template)


def _template_in_out(arguments: Arguments, rank: int, world_size: int) -> AnyArray:
    """Return `out`, the template of a broadcast without x."""
    if arguments.out is None:
        raise ArgumentTypeError(
            f"broadcast on rank {rank} of {world_size} needs x (a template of the root's array, "
            "such as np.empty(shape, dtype)) or out, to know what to receive"
        )
    return arguments.out


def _request(
    collective: Collective,
    source: Buffer | None,
    destination: Buffer | None,
    arguments: Arguments,
    row_count: int,
) -> Request:
    return Request(
        collective,
        source,
        destination,
        arguments.op,
        arguments.root,
        arguments.counts,
        arguments.receive_counts,
        row_count,
    )


def _receive_block(
    collective: Collective, x: AnyInput, arguments: Arguments, rank: int, world_size: int
) -> Prepared:
    """Prepare a scatter on a rank other than the root. If x, the template, is None, use `out`."""
    counts, out = arguments.counts, arguments.out
    if x is not None:
        template = template_of(x)
        result = result_of(collective, template.shape, rank, world_size, counts)
        shape, row_count = result.shape, result.row_count
    elif out is not None:
        template = template_of(out, "out")
        shape, row_count = template.shape, _row_count_of(template, counts, rank)
    else:
        raise ArgumentTypeError(
            f"scatter on rank {rank} of {world_size} needs x (a template of the root's array) or "
            "out, to know what to receive"
        )
    ensure_served(template)
    destination = destination_of(template, shape, out)
    request = _request(collective, None, destination.buffer, arguments, row_count)
    lasting = destination.lasting
    is_own = out is not None and lasting is out
    return Prepared(request, destination.finish, template, lasting=lasting, is_own=is_own)


def _row_count_of(template: Template, counts: tuple[int, ...] | None, rank: int) -> int:
    """Return the number of elements in a row of an output with ``counts[rank]`` rows."""
    if counts is None:
        return 1
    rows, size = counts[rank], int(np.prod(template.shape))
    if rows == 0:
        return int(np.prod(template.shape[1:])) if template.shape else 1
    if size % rows:
        raise ArgumentError(
            f"scatter: out has {size} elements (shape {template.shape}), but counts[{rank}] is "
            f"{rows} rows"
        )
    return size // rows


def list_in_group(made: Sequence[Operands], xs: AnyInput) -> AnyResult:
    """Return the results of a call with several arrays inside a group: a tuple for a tuple."""
    if any(arrays.is_packed or arrays.lasting is None for arrays in made):
        return NOT_IN_GROUPS
    lasting = [arrays.lasting for arrays in made]
    return tuple(lasting) if isinstance(xs, tuple) else lasting


def group_result(prepared: Prepared) -> AnyResult:
    """Return the result of a call inside a group: the array that is filled at the group's end."""
    if prepared.is_packed:  # the copy would miss the results of earlier calls in the group
        return NOT_IN_GROUPS
    if prepared.request.destination is None:
        return None
    return NOT_IN_GROUPS if prepared.lasting is None else prepared.lasting
