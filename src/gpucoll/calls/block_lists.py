"""Lists of blocks, one array for each rank: inputs that are distributed, outputs of gathers.

Blocks are not packed: backends get the addresses of all blocks (`Request.sources`, `destinations`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpucoll.arrays.libraries import is_array
from gpucoll.arrays.library import AnyArray, Template
from gpucoll.arrays.operands import ensure_served, is_sequence_of_arrays, template_of
from gpucoll.calls.exact_integers import check_range
from gpucoll.calls.given import AnyInput, CountsName, Given
from gpucoll.calls.shapes import result_of
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.wording import rank_of


def has_blocks(collective: Collective, x: AnyInput, out: AnyInput) -> bool:
    """Return whether x or `out` is a list of blocks."""
    if collective.spreads and is_sequence_of_arrays(x):
        return True
    return collective.gathers and is_sequence_of_arrays(out)


def templates_of(
    blocks: Sequence[AnyArray], name: str, collective: Collective, who: str, n: int
) -> list[Template]:
    """Return the templates of the blocks in a list.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The list does not have one array for each rank, or they differ in library, device, dtype or
        row shape.
    """
    if len(blocks) != n:
        raise ArgumentError(
            f"{collective.spelled} on {who}: {name} must be a list of {n} arrays, one for each "
            f"rank; got {len(blocks)}"
        )
    found = []
    for place, block in enumerate(blocks):
        label = f"{name}[{place}]"
        if not is_array(block):
            raise ArgumentTypeError(
                f"{collective.spelled} on {who}: {label} must be an array; got "
                f"{type(block).__name__}"
            )
        template = template_of(block, label)
        ensure_served(template, label)
        check_range(template, label)
        found.append(template)
        _check_alike(found[0], template, f"{collective.spelled} on {who}: {label}", name)
    return found


def _check_alike(first: Template, other: Template, what: str, name: str) -> None:
    said = [
        [of.library.NAME, f"dtype {of.dtype}", f"device {of.device}", f"rows {of.shape[1:]}"]
        for of in (first, other)
    ]
    if name == "out":  # its blocks may have any shape with enough elements
        said = [each[:3] for each in said]
    for expected, found in zip(*said, strict=True):
        if found != expected:
            raise ArgumentError(
                f"{what} has {found}, but {name}[0] has {expected}: blocks may differ only in "
                "their number of rows"
            )


def rows_of(shape: tuple[int, ...]) -> int:
    """Return the number of rows of a block; a 0-d block has one."""
    return shape[0] if shape else 1


def with_counts(
    collective: Collective, x: AnyInput, given: Given, rank: int, world_size: int
) -> Given:
    """Return the user's arguments, with counts that are derived from lists of different blocks.

    An all_to_all with lists always has counts, because no rank knows whether all blocks of all
    ranks are equal. Other collectives have counts if the blocks of a list differ. All ranks see
    that alike, except if only the root has the list.
    """
    who, out, known = rank_of(rank, world_size), given.get("out"), given.copy()
    is_root = given.get("root") in (None, rank)
    if isinstance(x, list | tuple) and collective.spreads:
        found = templates_of(x, "x", collective, who, world_size)
        _add_counts(collective, known, "counts", [rows_of(each.shape) for each in found], who)
    elif collective.is_exchange and known.get("counts") is None:
        shape = template_of(x).shape
        result_of(collective, shape, rank, world_size)  # raises if the rows do not divide
        known["counts"] = [shape[0] // world_size] * world_size
    if isinstance(out, list | tuple) and collective.gathers and is_root:
        found = templates_of(out, "out", collective, who, world_size)
        name: CountsName = "receive_counts" if collective.is_exchange else "counts"
        row_shape = template_of(x[0] if isinstance(x, list | tuple) else x).shape[1:]
        what = f"{collective.spelled} on {who}: out"
        rows = [_rows_in(each, row_shape, f"{what}[{n}]") for n, each in enumerate(found)]
        _add_counts(collective, known, name, rows, who)
    return known


def _rows_in(template: Template, row_shape: tuple[int, ...], what: str) -> int:
    """Return the number of the input's rows that a block of an output holds."""
    if template.shape[1:] == row_shape:
        return rows_of(template.shape)
    count, row = math.prod(template.shape), math.prod(row_shape)
    if row == 0 or count % row:
        raise ArgumentError(
            f"{what} has shape {template.shape}, {count} elements, which is not a whole number of "
            f"x's rows, of shape {row_shape}"
        )
    return count // row


def _add_counts(
    collective: Collective, known: Given, name: CountsName, rows: list[int], who: str
) -> None:
    """Use the rows of a list's blocks as counts, if counts are needed and not given."""
    if known.get(name) is not None:
        return  # compared with the blocks in `prepare_blocks`
    if collective.is_exchange:
        known[name] = rows
    elif len({*rows}) > 1:
        if collective.has_root:
            raise ArgumentError(
                f"{collective.spelled} on {who}: the blocks have {rows} rows, which the other "
                "ranks do not know: give counts= on every rank, the rows of each block, or "
                'counts="auto"'
            )
        known[name] = rows


def check_on_host(collective: Collective, is_enqueued: bool) -> None:
    """Raise if a call with lists of blocks would be enqueued."""
    if is_enqueued:
        raise ArgumentTypeError(
            f"{collective.spelled}: lists of blocks are for arrays in host memory: on a GPU, and "
            "with mixed=True, give one array whose rows are the blocks"
        )
