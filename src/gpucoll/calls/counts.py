"""Counts that the ranks obtain from each other: ``counts="auto"``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np

from gpucoll.arrays.library import AnyArray, Template
from gpucoll.arrays.operands import ensure_served, template_of
from gpucoll.calls.given import AnyInput, Given, Unchecked
from gpucoll.calls.preparation import Arguments
from gpucoll.calls.shapes import check_rows, parse_counts
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError, ArgumentTypeError, MismatchError
from gpucoll.group.in_one_piece import give_up, in_one_piece
from gpucoll.group.protocol import Channel, Group


def are_asked_for(collective: Collective, counts: Unchecked, receive_counts: Unchecked) -> bool:
    """Return whether the counts are to be exchanged; ArgumentTypeError if they cannot be."""
    if not collective.is_exchange:
        return isinstance(counts, str) and counts == "auto"
    if isinstance(counts, str) or (counts is None and receive_counts is not None):
        raise ArgumentTypeError(
            "all_to_all: send_counts says how many rows go to each rank; only recv_counts can "
            'be "auto"'
        )
    return counts is not None and (
        receive_counts is None or (isinstance(receive_counts, str) and receive_counts == "auto")
    )


def exchange(
    channel: Channel, collective: Collective, mine: list[int], rank: int, timeout_s: float | None
) -> Given:
    """Exchange the rows of all ranks; return the resulting counts, by name."""
    data = np.array(mine, np.int64).tobytes()
    # The collective travels in place of a root, so that ranks compare it, too.
    everyone = channel.all_gather_bytes(data, Collective.COUNTS, collective, timeout_s)
    rows = [np.frombuffer(part, np.int64).tolist() for part in everyone]
    if collective.is_exchange:
        return {"counts": mine, "receive_counts": [row[rank] for row in rows]}
    return {"counts": [row[0] for row in rows]}


@contextmanager
def known_to_all(group: Group, fail: Callable[[], None]) -> Iterator[None]:
    """Make, in the context, the call whose counts have been exchanged.

    The other ranks make this call. If this rank's own arguments turn out not to fit the counts, it
    calls `fail` instead, which differs from their call, so all ranks raise in that call.
    """
    try:
        yield
    except (ArgumentError, ArgumentTypeError):
        with in_one_piece(group), suppress(MismatchError):
            fail()
        raise
    except MismatchError:
        raise
    except BaseException as error:
        give_up(group, error)
        raise


def fail(channel: Channel, timeout_s: float | None) -> None:
    """Make a call that differs from every other call, except that of ranks which also fail."""
    channel.all_gather_bytes(b"", Collective.UNFIT, timeout_s=timeout_s)


def as_given(collective: Collective, known: Given) -> dict[str, Unchecked]:
    """Return the arguments of a call under the names that users pass."""
    if not collective.is_exchange:
        return {**known}
    counts = {"send_counts": known["counts"], "recv_counts": known["receive_counts"]}
    return {**counts, "out": known.get("out")}


def check_alone(
    collective: Collective, x: AnyInput, given: Given, arguments: Arguments, world_size: int
) -> Template | None:
    """Check what does not depend on counts, before anything is sent; return the arrays' template.

    `arguments` are those of the call, without its counts.
    """
    templates = [template_of(_first(x))] if x is not None else []
    if arguments.out is not None:
        templates.append(template_of(_first(arguments.out), "out"))
    for template in templates:
        ensure_served(template)
        if arguments.op is not None:
            arguments.op.check_dtype(template.dtype)
    if len({template.dtype for template in templates}) > 1:
        raise ArgumentTypeError(
            f"out has dtype {templates[1].dtype}, but x has {templates[0].dtype}"
        )
    if collective.is_exchange and not isinstance(x, list | tuple):
        counts = parse_counts(given["counts"], world_size, "send_counts")
        check_rows(collective, templates[0].shape, sum(counts), "send_counts add up to")
    return templates[0] if templates else None


def _first(x: AnyInput) -> AnyArray:
    """Return the first block of a list, as an example of what all blocks have in common."""
    return x[0] if isinstance(x, list | tuple) else x


def own(collective: Collective, x: AnyInput, given: Given, rank: int, world_size: int) -> list[int]:
    """Return the counts that this rank sends: its own rows, or its rows for each rank."""
    if collective.is_exchange:
        return list(parse_counts(given["counts"], world_size, "send_counts"))
    takes_out = collective.spreads
    array, name = (given["out"], "out") if takes_out else (x, "x")
    if takes_out and array is None and isinstance(x, list | tuple):
        array = x[rank]
    shape = getattr(array, "shape", ())
    if not shape:
        raise ArgumentError(
            f'{collective.spelled}: counts="auto" takes the rows from {name}, which must be an '
            "array with rows"
        )
    return [int(shape[0])]
