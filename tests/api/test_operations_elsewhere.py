"""What people from elsewhere write for an operation: the error says what it is called here."""

from __future__ import annotations

import enum
import operator
from types import SimpleNamespace

import numpy as np
import pytest

from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.types import ReduceOp
from gpucoll.wording import OUT_BY_NAME

RedOpType = enum.Enum("RedOpType", ["SUM", "AVG", "PREMUL_SUM"])

NAMED = {
    "mean": "avg",
    "SUM": "sum",
    "add": "sum",
    "product": "prod",
    "amax": "max",
    "bitwise_and": "band",
    "logical_xor": "lxor",
}
WRITE = {
    "numpy": (np.multiply, '(write "prod" or ReduceOp.custom(function))'),
    "builtin": (sum, '(write "sum" or ReduceOp.custom(function))'),
    "operator": (operator.xor, '(write "bxor" or ReduceOp.custom(function))'),
    "own": (lambda a, b: a, "(write ReduceOp.custom(function))"),
    "mpi4py": (SimpleNamespace(name="MPI_SUM"), '(write "sum")'),
    "torch": (RedOpType.AVG, '(write "avg")'),
    "factor": (RedOpType.PREMUL_SUM, "(write ReduceOp.scaled_sum(factor))"),
    "list": ([np.ones(3)], OUT_BY_NAME),
    "array": (np.ones(3), f"got an array (numpy.ndarray, shape (3,)){OUT_BY_NAME}"),
    "unknown": ("fold", "got 'fold'"),
    "None": (None, "got None"),
}


@pytest.mark.parametrize(("op", "here"), NAMED.items())
def test_names(op, here):
    with pytest.raises(ArgumentError) as caught:
        ReduceOp.parse(op)
    assert str(caught.value).endswith(f'got {op!r} (write "{here}")')


@pytest.mark.parametrize("label", WRITE)
def test_objects(label):
    op, end = WRITE[label]
    with pytest.raises(ArgumentError) as caught:
        ReduceOp.parse(op)
    assert str(caught.value).endswith(end)


class Tensorlike(np.ndarray):
    """An array whose truth value is as that of PyTorch's."""

    def __bool__(self):
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")


@pytest.mark.parametrize("kind", [np.ndarray, Tensorlike])
@pytest.mark.ranks(1)
def test_an_array_as_root(comm, kind):
    x = np.ones(3).view(kind)
    calls = (
        lambda: comm.reduce(x, "sum", x),
        lambda: comm.gather(x, x),
        lambda: comm.gather(x, x, counts=[3]),
        lambda: comm.scatter(x, x),
        lambda: comm.broadcast(x, x),
    )
    for call in calls:
        with pytest.raises(
            ArgumentTypeError, match=r"root must be an int; got an array .* out=..."
        ):
            call()
