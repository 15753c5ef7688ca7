"""Counts that the ranks have to ask each other for: ``counts="auto"``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from gpucoll.arrays.library import Template
from gpucoll.arrays.operands import ensure_served, template_of
from gpucoll.calls.in_one_piece import give_up, in_one_piece
from gpucoll.calls.preparation import Arguments
from gpucoll.calls.shapes import check_rows, parse_counts
from gpucoll.errors import ArgumentError, ArgumentTypeError, MismatchError
from gpucoll.group.protocol import Channel, Group
from gpucoll.types import Collective


def are_asked_for(collective: Collective, counts: Any, receive_counts: Any) -> bool:
    """Return whether these are to be exchanged; ArgumentTypeError where they cannot be."""
    if collective != Collective.ALL_TO_ALL:
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
) -> dict[str, list[int]]:
    """Ask all ranks for their rows; return the counts that they make, by name."""
    data = np.array(mine, np.int64).tobytes()
    # In place of a root: what is asked for, so that ranks compare that, too.
    everyone = channel.all_gather_bytes(data, Collective.COUNTS, collective, timeout_s)
    rows = [np.frombuffer(part, np.int64).tolist() for part in everyone]
    if collective == Collective.ALL_TO_ALL:
        return {"counts": mine, "receive_counts": [row[rank] for row in rows]}
    return {"counts": [row[0] for row in rows]}


@contextmanager
def known_to_all(group: Group, fail: Callable[[], None]) -> Iterator[None]:
    """Make, within the block, the call whose counts have been exchanged.

    The other ranks make it. A rank whose own arguments turn out not to fit the counts calls `fail`
    in its place, which differs from theirs: all of them raise, in that call.
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
    """Make a call that differs from any but that of ranks which fail, too."""
    channel.all_gather_bytes(b"", Collective.UNFIT, timeout_s=timeout_s)


def as_given(collective: Collective, known: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call under the names by which its user gives them."""
    if collective != Collective.ALL_TO_ALL:
        return known
    counts = {"send_counts": known["counts"], "recv_counts": known["receive_counts"]}
    return {**counts, "out": known.get("out")}


def check_alone(
    collective: Collective, x: Any, given: dict[str, Any], arguments: Arguments, world_size: int
) -> Template | None:
    """Check what needs no counts, before anything is sent; return what the arrays are.

    `arguments` are those of the call but for its counts.
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
    if collective == Collective.ALL_TO_ALL and not isinstance(x, list | tuple):
        counts = parse_counts(given["counts"], world_size, "send_counts")
        check_rows(collective, templates[0].shape, sum(counts), "send_counts add up to")
    return templates[0] if templates else None


def _first(x: Any) -> Any:
    """Return the first of a list of blocks, for what all have in common."""
    return x[0] if isinstance(x, list | tuple) else x


def own(
    collective: Collective, x: Any, given: dict[str, Any], rank: int, world_size: int
) -> list[int]:
    """Return what this rank tells the others: its own rows, or those to each of them."""
    if collective == Collective.ALL_TO_ALL:
        return list(parse_counts(given["counts"], world_size, "send_counts"))
    takes_out = collective in (Collective.SCATTER, Collective.REDUCE_SCATTER)
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
