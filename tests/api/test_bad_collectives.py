"""Arguments that one rank alone can see are wrong, for every collective: an error, nothing sent."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tests.collective_cases import COLLECTIVES, GATHERING, REDUCTIONS, ROOTED, SPREAD

from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.types import ReduceOp
from gpucoll.wording import OUT_BY_NAME

COUNTED_ALIKE = ("all_gather", "gather", "reduce_scatter", "scatter")
"""Those that take ``counts=``."""


def x(*shape, dtype="float32"):
    return np.zeros(shape or (4,), dtype)


def read_only(array):
    array.flags.writeable = False
    return array


def rooted(name, root=1):
    """Return arguments for a call in which rank 1, who errs, is the root."""
    return {"root": root} if name in ROOTED else {}


def result_length(name):
    """Return how long the result for `x()` on two ranks is."""
    return {"all_gather": 8, "gather": 8, "reduce_scatter": 2, "scatter": 2}.get(name, 4)


def rows_of(name):
    """Yield label, x, other arguments, error, text for one collective on rank 1 of 2."""
    length = result_length(name)
    yield "list of numbers", [1, 2], rooted(name), ArgumentTypeError, "x must be an array"
    yield "text", "abc", rooted(name), ArgumentTypeError, "got builtins.str"
    yield (
        "object dtype",
        np.array([None] * 4),
        rooted(name),
        ArgumentTypeError,
        "x has dtype object",
    )
    yield ("byte order", x().astype(">f4"), rooted(name), ArgumentTypeError, "only native order")
    for label, out, error, text in (
        ("too small", x(length - 1), ArgumentError, f"{length} elements"),
        ("too large", x(length + 1), ArgumentError, f"{length} elements"),
        ("of another dtype", x(length, dtype="f8"), ArgumentTypeError, "out has dtype float64"),
        ("read-only", read_only(x(length)), ArgumentError, "out is read-only"),
        ("a list", [0.0] * length, ArgumentTypeError, "out must be of x's library"),
    ):
        yield f"out {label}", x(), {"out": out, **rooted(name)}, error, text
    memory = x(16)
    # One element away from where in place would be (of rank 1: see `in_place_at`).
    start = {"all_gather": -3, "gather": -3, "reduce_scatter": 1, "scatter": 1}.get(name, 1)
    out = memory[4 + start :][:length]
    yield (
        "out overlaps",
        memory[4:8],
        {"out": out, **rooted(name)},
        ArgumentError,
        "out overlaps x",
    )
    if name in ROOTED:
        for root, error, text in (
            (2, ArgumentError, "root must be in 0..1; got 2"),
            (-1, ArgumentError, "got -1"),
            (1.0, ArgumentTypeError, "root must be an int"),
            (True, ArgumentTypeError, "root must be an int"),
            (None, ArgumentTypeError, "root must be an int"),
            (
                x(),
                ArgumentTypeError,
                "root must be an int; got an array (numpy.ndarray, shape (4,))",
            ),
            (x(1), ArgumentTypeError, OUT_BY_NAME),
            ([x()], ArgumentTypeError, OUT_BY_NAME),
        ):
            yield f"root {root}", x(), {"root": root}, error, text
    if name in REDUCTIONS:
        given = rooted(name)
        yield "op unknown", x(), {"op": "add", **given}, ArgumentError, "got 'add'"
        yield "op mean", x(), {"op": "mean", **given}, ArgumentError, "got 'mean' (write \"avg\")"
        yield "op an array", x(), {"op": x(), **given}, ArgumentError, OUT_BY_NAME
        yield "op a number's array", x(), {"op": x(1), **given}, ArgumentError, OUT_BY_NAME
        yield "op no op", x(), {"op": max, **given}, ArgumentError, "op must be a ReduceOp"
        half = ReduceOp.scaled_sum(0.5)
        yield (
            "op of another dtype",
            x(dtype="i4"),
            {"op": half, **given},
            ArgumentTypeError,
            "factor 0.5 is not whole",
        )
        yield (
            "bitwise on floats",
            x(),
            {"op": "band", **given},
            ArgumentTypeError,
            "band is not defined for float32",
        )
        yield (
            "structured",
            np.zeros(4, [("a", "i4")]),
            given,
            ArgumentTypeError,
            "no reduction works on dtype",
        )
    if name in SPREAD:
        for label, array in (
            ("indivisible", x(5)),
            ("0-d", x(4)[0:1].reshape(())),
            ("number", 1.0),
        ):
            yield label, array, rooted(name), ArgumentError, "must divide into 2 equal blocks"
    if name in COUNTED_ALIKE:
        yield from rows_of_counts(name)


def rows_of_counts(name):
    given = rooted(name)
    for label, counts, error, text in (
        ("too few", [4], ArgumentError, "one entry per rank, 2; got 1"),
        ("too many", [4, 0, 0], ArgumentError, "one entry per rank, 2; got 3"),
        ("negative", [5, -1], ArgumentError, "counts must not be negative; got [5, -1]"),
        ("fractions", [2.0, 2.0], ArgumentTypeError, "counts must be whole numbers of rows"),
        ("bool", [True, True], ArgumentTypeError, "counts must be whole numbers of rows"),
        ("text", "even", ArgumentTypeError, "counts must be one number of rows per rank"),
        ("a number", 4, ArgumentTypeError, "counts must be one number of rows per rank"),
        ("not x's rows", [3, 3], ArgumentError, "x has 4 rows"),
    ):
        yield f"counts {label}", x(), {"counts": counts, **given}, error, text
    yield (
        "counts of a 0-d array",
        x(1)[0:1].reshape(()),
        {"counts": [1, 1] if name in GATHERING else [1, 0], **given},
        ArgumentError,
        "x is 0-d",
    )
    text = "must be an array with rows"
    if name in GATHERING:
        yield "counts auto of a number", 1.0, {"counts": "auto", **given}, ArgumentError, text
    else:
        yield "counts auto without out", x(), {"counts": "auto", **given}, ArgumentError, text


def all_to_all_rows():
    halves = {"send_counts": [2, 2]}
    for label, given, error, text in (
        ("only recv_counts", {"recv_counts": [2, 2]}, ArgumentTypeError, "only recv_counts can"),
        ("send_counts auto", {"send_counts": "auto"}, ArgumentTypeError, "only recv_counts can"),
        ("too few", {"send_counts": [4]}, ArgumentError, "send_counts must have one entry"),
        (
            "recv too few",
            {**halves, "recv_counts": [4]},
            ArgumentError,
            "recv_counts must have one",
        ),
        ("negative", {"send_counts": [5, -1]}, ArgumentError, "send_counts must not be negative"),
        ("sum", {"send_counts": [1, 2], "recv_counts": [2, 2]}, ArgumentError, "x has 4 rows"),
        ("sum, asked for", {"send_counts": [1, 2]}, ArgumentError, "x has 4 rows"),
        ("fractions", {"send_counts": [2.0, 2]}, ArgumentTypeError, "whole numbers of rows"),
        (
            "out",
            {**halves, "recv_counts": [2, 2], "out": x(5)},
            ArgumentError,
            "out has shape (5,), 5 elements",
        ),
    ):
        yield label, x(), given, error, text


def others():
    """Yield label, call, error, text of what fits nowhere else."""
    yield (
        "scatter of nothing off root",
        lambda c: c.scatter(None, 0),
        ArgumentTypeError,
        "scatter on rank 1 of 2 needs x",
    )
    yield (
        "scatter of nothing on root",
        lambda c: c.scatter(None, 1, out=x(2)),
        ArgumentTypeError,
        "x",
    )
    yield (
        "scatter off root with an indivisible template",
        lambda c: c.scatter(x(5), 0),
        ArgumentError,
        "must divide into 2 equal blocks",
    )
    yield (
        "scatter off root with out unlike the template",
        lambda c: c.scatter(x(4), 0, out=x(3)),
        ArgumentError,
        "3 elements",
    )
    yield (
        "scatter off root into too few rows",
        lambda c: c.scatter(None, 0, counts=[1, 3], out=x(4)),
        ArgumentError,
        "4 elements",
    )
    yield (
        "all_to_all in place with other counts back",
        lambda c: (lambda a: c.all_to_all(a, send_counts=[3, 1], recv_counts=[2, 2], out=a))(x()),
        ArgumentError,
        "cannot work in place",
    )
    yield (
        "exclusive_scan with avg",
        lambda c: c.exclusive_scan(x(), "avg"),
        ArgumentTypeError,
        "avg has no identity",
    )
    for name in COLLECTIVES:
        yield (
            f"plan of a strided x: {name}",
            lambda c, name=name: getattr(c, f"plan_{name}")(x(8)[::2], **rooted(name)),
            ArgumentError,
            "C-contiguous",
        )
        length = 2 * result_length(name)
        yield (
            f"plan into a strided out: {name}",
            lambda c, name=name, length=length: getattr(c, f"plan_{name}")(
                x(), out=x(length)[::2], **rooted(name)
            ),
            ArgumentError,
            "C-contiguous",
        )
        yield (
            f"deadline: {name}",
            lambda c, name=name: getattr(c, name)(x(), timeout_s=0),
            ArgumentError,
            "timeout_s must be positive",
        )


def calls():
    """Return name -> (call, error, text)."""
    found = {label: (call, error, text) for label, call, error, text in others()}
    for name in COLLECTIVES:
        rows = [*rows_of(name), *(all_to_all_rows() if name == "all_to_all" else ())]
        for label, array, given, error, text in rows:

            def call(comm, name=name, array=array, given=given):
                return getattr(comm, name)(array, **given)

            found[f"{name}: {label}"] = call, error, text
    return found


def be_rejected(comm, names):
    """Rank 1 makes wrong calls, first of all and again when the right ones are known."""
    found = calls()
    wrong = []
    for turn in range(2):
        for name in names if comm.rank == 1 else ():
            call, error, text = found[name]
            try:
                call(comm)
                wrong.append((turn, name, "was accepted"))
            except error as raised:
                if not re.search(re.escape(text), str(raised)):
                    wrong.append((turn, name, str(raised)))
        for name in COLLECTIVES:
            for root in range(2):
                getattr(comm, name)(x(), **rooted(name, root))
    return wrong, comm.all_reduce(1)


PREFIXES = sorted({name.split(":")[0] for name in calls()})


@pytest.mark.soak(quick=15)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_rejected(ranks, prefix):
    names = [name for name in calls() if name.split(":")[0] == prefix]

    assert ranks.call(2, be_rejected, names) == [([], 2)] * 2
