"""Calls that one rank alone can see are wrong: an error that says why, and nothing is sent."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from tests.dtypes import REFUSED, dtype_of, op_of

from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.types import ReduceOp


def x(*shape, dtype="float32"):
    return np.zeros(shape or (4,), dtype)


HALF_TURN: Any = 1j


def read_only():
    array = x(4)
    array.flags.writeable = False
    return array


def swapped():
    return x().astype(np.dtype("float32").newbyteorder())


def halves():
    whole = x(6)
    return whole[:4], whole[2:]


def reshaped_columns():
    whole = x(4, 4)
    return whole, whole.T


# name -> (call, error, what its message says)
REJECTED: dict[str, tuple[Any, Any, str]] = {
    "list": (lambda c: c.all_reduce([1, 2]), ArgumentTypeError, "x must be an array"),
    "None": (lambda c: c.all_reduce(None), ArgumentTypeError, "got builtins.NoneType"),
    "string": (lambda c: c.broadcast("text"), ArgumentTypeError, "got builtins.str"),
    "object dtype": (
        lambda c: c.all_reduce(np.array([None, 1])),
        ArgumentTypeError,
        "x has dtype object",
    ),
    "object field": (
        lambda c: c.broadcast(np.zeros(2, [("a", "O")])),
        ArgumentTypeError,
        "use the object collectives",
    ),
    "list of numbers elsewhere": (
        lambda c: c.all_gather([1, 2]),
        ArgumentTypeError,
        "got builtins.list. Make it an array first",
    ),
    "generator": (
        lambda c: c.broadcast(x() for _ in range(2)),
        ArgumentTypeError,
        re.escape("list(x)"),
    ),
    "huge integer": (lambda c: c.all_reduce(2**70), ArgumentTypeError, "64 bits do not hold"),
    "byte order": (lambda c: c.all_reduce(swapped()), ArgumentTypeError, "byte order '>'"),
    "byte order of broadcast": (
        lambda c: c.broadcast(swapped()),
        ArgumentTypeError,
        "only native order",
    ),
    "masked array": (
        lambda c: c.all_reduce(np.ma.masked_array([1.0, 2.0], [False, True])),
        ArgumentTypeError,
        "masked array",
    ),
    "structured sum": (
        lambda c: c.all_reduce(np.zeros(2, [("a", "i4")])),
        ArgumentTypeError,
        "no reduction works on dtype",
    ),
    "long double sum": (
        lambda c: c.all_reduce(np.zeros(2, np.longdouble)),
        ArgumentTypeError,
        "no reduction works on dtype",
    ),
    "out is a list": (
        lambda c: c.all_reduce(x(), out=[0] * 4),
        ArgumentTypeError,
        "out must be of x's library, a NumPy array; got builtins.list",
    ),
    "out too small": (
        lambda c: c.all_reduce(x(4), out=x(3)),
        ArgumentError,
        re.escape("out has shape (3,), 3 elements; the result has shape (4,), 4 elements"),
    ),
    "out too large": (
        lambda c: c.broadcast(x(4), out=x(5)),
        ArgumentError,
        "5 elements; the result has shape",
    ),
    "out of another dtype": (
        lambda c: c.all_reduce(x(), out=x(dtype="float64")),
        ArgumentTypeError,
        "out has dtype float64, but x has float32",
    ),
    "out of another byte order": (
        lambda c: c.all_reduce(x(), out=swapped()),
        ArgumentTypeError,
        "out has dtype >f4, but x has float32",
    ),
    "out read-only": (
        lambda c: c.all_reduce(x(), out=read_only()),
        ArgumentError,
        "out is read-only",
    ),
    "out masked": (
        lambda c: c.all_reduce(x(), out=np.ma.masked_array(x(), True)),
        ArgumentTypeError,
        "out is a masked array",
    ),
    "in place read-only": (
        lambda c: (lambda a: c.all_reduce(a, out=a))(read_only()),
        ArgumentError,
        "out is read-only",
    ),
    "overlap": (
        lambda c: (lambda a, b: c.all_reduce(a, out=b))(*halves()),
        ArgumentError,
        "out overlaps x without being x",
    ),
    "transposed overlap": (
        lambda c: (lambda a, b: c.all_reduce(a, out=b))(*reshaped_columns()),
        ArgumentError,
        "out overlaps x",
    ),
    "overlap in shared memory": (
        lambda c: (lambda a: c.all_reduce(a[:-1], out=a[1:]))(c.empty(1000)),
        ArgumentError,
        "out overlaps x",
    ),
    "overlap in a list": (
        lambda c: (lambda a: c.all_reduce([a[:5], a], out=[np.empty(5), a]))(np.ones(10)),
        ArgumentError,
        "arrays 0 and 1 of the list share memory",
    ),
    "out for a number": (
        lambda c: c.all_reduce(1.0, out=x()),
        ArgumentTypeError,
        "out= goes with arrays",
    ),
    "op": (lambda c: c.all_reduce(x(), "add"), ArgumentError, "got 'add'"),
    "op by function": (
        lambda c: c.all_reduce(x(), max),
        ArgumentError,
        re.escape('write "max" or ReduceOp.custom(function)'),
    ),
    "scaled_sum by name": (
        lambda c: c.all_reduce(x(), "scaled_sum"),
        ArgumentError,
        re.escape("write ReduceOp.scaled_sum(factor)"),
    ),
    "op made by hand": (
        lambda c: c.all_reduce(x(), ReduceOp("median")),
        ArgumentError,
        "'median' with factor None is not an op",
    ),
    "op without its factor": (
        lambda c: c.all_reduce(x(), ReduceOp("scaled_sum")),
        ArgumentError,
        "'scaled_sum' with factor None is not an op",
    ),
    "op with a function of its own": (
        lambda c: c.all_reduce(x(), ReduceOp("max", None, max)),
        ArgumentError,
        re.escape("ReduceOp.custom(function)"),
    ),
    "complex factor": (
        lambda c: c.all_reduce(x(), ReduceOp.scaled_sum(HALF_TURN)),
        ArgumentTypeError,
        "real number",
    ),
    "factor no number": (
        lambda c: c.all_reduce(x(), ReduceOp.scaled_sum(np.ones(3))),  # type: ignore[arg-type]
        ArgumentTypeError,
        "real number",
    ),
    "fraction for integers": (
        lambda c: c.all_reduce(x(dtype="int32"), ReduceOp.scaled_sum(0.5)),
        ArgumentTypeError,
        "factor 0.5 is not whole",
    ),
    "infinite factor for integers": (
        lambda c: c.all_reduce(x(dtype="int32"), ReduceOp.scaled_sum(float("inf"))),
        ArgumentTypeError,
        "factor inf is not whole",
    ),
    "factor too large": (
        lambda c: c.all_reduce(x(dtype="int8"), ReduceOp.scaled_sum(300)),
        ArgumentTypeError,
        "factor 300",
    ),
    "negative factor for unsigned": (
        lambda c: c.all_reduce(x(dtype="uint8"), ReduceOp.scaled_sum(-1)),
        ArgumentTypeError,
        "factor -1",
    ),
    "root too large": (lambda c: c.broadcast(x(), root=2), ArgumentError, "root must be in 0..1"),
    "root negative": (lambda c: c.broadcast(x(), root=-1), ArgumentError, "got -1"),
    "root no int": (lambda c: c.broadcast(x(), root=0.0), ArgumentTypeError, "must be an int"),
    "root bool": (lambda c: c.broadcast(x(), root=True), ArgumentTypeError, "must be an int"),
    "root of objects": (lambda c: c.gather_object(1, root=5), ArgumentError, "got 5"),
    "scatter too few": (
        lambda c: c.scatter_object([1], root=c.rank),
        ArgumentError,
        "needs 2 items; got 1 items",
    ),
    "scatter none": (
        lambda c: c.scatter_object(None, root=c.rank),
        ArgumentError,
        "needs 2 items; got None",
    ),
    "deadline": (lambda c: c.barrier(timeout_s=0), ArgumentError, "timeout_s must be positive"),
    "deadline that never comes": (
        lambda c: c.all_reduce(x(), timeout_s=float("inf")),
        ArgumentError,
        "timeout_s must be 1000000 s at most",
    ),
    "deadline beyond numbers": (
        lambda c: c.barrier(timeout_s=10**5000),
        ArgumentError,
        "because every wait has a deadline; got a number of thousands of digits",
    ),
    "deadline beyond clocks": (
        lambda c: c.recv(x(), timeout_s=1e300),
        ArgumentError,
        re.escape("at most (eleven days)"),
    ),
    "rows beyond words": (
        lambda c: c.plan_all_to_all(x(), send_counts=[2**63, 0]),
        ArgumentError,
        "send_counts add up to 9223372036854775808 rows, more than any array has",
    ),
    "rows beyond words together": (
        lambda c: c.all_to_all(x(), send_counts=[2, 2], recv_counts=[2**62, 2**62]),
        ArgumentError,
        "recv_counts add up to 9223372036854775808 rows",
    ),
    "rows beyond words in a gather": (
        lambda c: c.all_gather(x(), counts=[4, 2**64]),
        ArgumentError,
        "more than any array has",
    ),
    "more bytes than addresses": (
        lambda c: c.plan_all_to_all(x(), send_counts=[2, 2], recv_counts=[2**62, 2**61]),
        ArgumentError,
        "a result of shape .* is not possible",
    ),
    "recv of a shape beyond words": (
        lambda c: c.recv(shape=(2**40, 2**40), dtype="f4"),
        ArgumentError,
        "no array has so many elements",
    ),
    "deadline in words": (
        lambda c: c.all_reduce(x(), timeout_s="1"),
        ArgumentTypeError,
        "timeout_s must be a number of seconds; got '1'",
    ),
    "deadline of a message": (
        lambda c: c.send(x(), 0, timeout_s="1"),
        ArgumentTypeError,
        "timeout_s must be a number",
    ),
    "recv of a negative shape": (
        lambda c: c.recv(shape=(-2,), dtype="f4"),
        ArgumentError,
        "shape must not have negative lengths",
    ),
    "recv of a shape in words": (
        lambda c: c.recv(shape="ab", dtype="f4"),
        ArgumentTypeError,
        "shape must be an int or a sequence",
    ),
    "recv into a text": (lambda c: c.recv("abc"), ArgumentTypeError, "out must be an array"),
    "color": (lambda c: c.split([1]), ArgumentTypeError, "color must be an int or None"),
    "color that is not itself": (
        lambda c: c.split(float("nan")),
        ArgumentTypeError,
        "color must be an int or None; got nan",
    ),
    "key": (lambda c: c.split(0, key="a"), ArgumentTypeError, "key must be an int"),
    "plan of a number": (lambda c: c.plan_all_reduce(1.0), ArgumentError, "C-contiguous array"),
    "plan of a view": (
        lambda c: c.plan_all_reduce(x(4, 4)[:, ::2]),
        ArgumentError,
        "C-contiguous array",
    ),
    "plan into a view": (
        lambda c: c.plan_all_reduce(x(4), out=x(8)[::2]),
        ArgumentError,
        "out to be a writable C-contiguous",
    ),
    "empty negative": (lambda c: c.empty(-1), ArgumentError, "negative length"),
    "empty fraction": (lambda c: c.empty(2.5), ArgumentTypeError, "shape must be an int"),
    "empty like what is not NumPy's": (
        lambda c: c.empty(3, like=bytearray(4)),
        ArgumentTypeError,
        "would be a NumPy array",
    ),
    "empty too large": (lambda c: c.empty(2**62), ArgumentError, "shape .* is not possible"),
    "empty of no dtype": (
        lambda c: c.empty(3, "float"[:3]),
        ArgumentTypeError,
        "not known to NumPy",
    ),
    "empty of objects": (lambda c: c.empty(3, object), ArgumentTypeError, "dtype object"),
    "empty swapped": (lambda c: c.empty(3, ">f4"), ArgumentTypeError, "byte order"),
}


def be_rejected(comm, name, place):
    """Rank `place` makes a wrong call, first of all and again after the right one is known."""
    call, error, text = REJECTED[name]
    for _ in range(2):
        if comm.rank == place:
            with pytest.raises(error, match=text):
                call(comm)
        total = comm.all_reduce(x() + 1)
    return total.tolist()


def test_an_op_is_checked_where_it_is_made():
    for name, factor, function in (("median", None, None), ("sum", 2.0, None), ("max", None, max)):
        with pytest.raises(ArgumentError, match="is not an op: pass a name"):
            ReduceOp(name, factor, function)


@pytest.mark.soak(quick=9)
@pytest.mark.parametrize("name", REJECTED)
def test_rejected(ranks, name):
    assert ranks.call(2, be_rejected, name, 1) == [[2.0] * 4] * 2


@pytest.mark.parametrize(("dtype", "op"), REFUSED)
def test_an_operation_that_the_dtype_lacks(dtype, op):
    with pytest.raises(ArgumentTypeError, match=f"{op} is not defined for {dtype}"):
        ReduceOp.parse(op_of(op)).check_dtype(dtype_of(dtype).name)


def refuse_ops(comm):
    found = []
    for dtype, op in REFUSED:
        with pytest.raises(ArgumentTypeError) as raised:
            comm.all_reduce(np.zeros(3, dtype_of(dtype)), op_of(op))
        found.append(op in str(raised.value))
    return all(found), comm.all_reduce(1)


def test_refused_operations_move_nothing(ranks):
    assert ranks.call(2, refuse_ops) == [(True, 2)] * 2
