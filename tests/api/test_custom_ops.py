"""ReduceOp.custom over real ranks: every reduction, every path, order, differences, refusals."""

from __future__ import annotations

import gc
import math
import pickle
import subprocess
import sys
import types
import weakref
from functools import reduce as fold
from pathlib import Path
from typing import Any

import cloudpickle
import numba
import numpy as np
import pytest
from tests.collective_cases import SMALL_TUNING, path_of

import gpucoll
from gpucoll import config
from gpucoll.errors import ArgumentError, ArgumentTypeError, MismatchError
from gpucoll.kernels.cpu.cache import cache_folder
from gpucoll.types import ReduceOp

COUNTS = (1, 60, 257, 700, 6000)


def append_digit(a, b):
    return a * 10 + b


def append_digits(a, b):
    """Write one number behind the other: associative, as hosts need it, and not commutative."""
    shift = 10
    while shift <= b:
        shift *= 10
    return a * shift + b


def compose(a, b):
    """Do ``x -> a.real * x + a.imag``, then the same with b: associative, not commutative."""
    return complex(a.real * b.real, a.imag * b.real + b.imag)


APPEND = ReduceOp.custom(append_digits, commutative=False)
COMPOSE = ReduceOp.custom(compose, identity=1, commutative=False)


def input_of(count, rank):
    return (np.arange(count) % 3 + 1 + rank) + 1j * (np.arange(count) % 5 - rank)


def expected_of(inputs):
    def both(a, b):
        return a.real * b.real + 1j * (a.imag * b.real + b.imag)

    return fold(both, inputs)


def reductions(comm, count, make):
    """Compare every reduction of `count` elements in memory that `make` gives; return the paths."""
    rank, size = comm.rank, comm.world_size
    inputs = [input_of(count, each) for each in range(size)]
    whole = expected_of(inputs)
    before = expected_of(inputs[:rank]) if rank else np.ones(count, complex)
    x, out, paths = make(count), make(count), set()
    for call, right in (
        (lambda: comm.all_reduce(x, COMPOSE, out=out), whole),
        (lambda: comm.reduce(x, COMPOSE, size - 1, out=out), whole if rank == size - 1 else None),
        (lambda: comm.scan(x, COMPOSE, out=out), expected_of(inputs[: rank + 1])),
        (lambda: comm.exclusive_scan(x, COMPOSE, out=out), before),
        (lambda: comm.all_reduce(x, COMPOSE, out=x), whole),
        (lambda: comm.scan(x, COMPOSE, out=x), expected_of(inputs[: rank + 1])),
        (lambda: comm.exclusive_scan(x, COMPOSE, out=x), before),
    ):
        x[...] = inputs[rank]
        out[...] = math.nan
        for turn in range(2):  # through the compiled entry, the second time
            result = call() if turn == 0 or not np.shares_memory(x, out) else out
            if result is x:
                break
        paths.add(path_of(comm))
        if right is None:
            assert result is None
        else:
            np.testing.assert_array_equal(result, right)
    spread, block = make(count * size), make(count)
    spread[...] = np.concatenate([inputs[rank]] * size)
    comm.reduce_scatter(spread, COMPOSE, out=block)
    np.testing.assert_array_equal(block, whole)
    return paths


def all_reductions(comm, is_symmetric):
    def make(count):
        return comm.empty(count, np.complex128) if is_symmetric else np.empty(count, np.complex128)

    return set.union(*(reductions(comm, count, make) for count in COUNTS))


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_every_reduction_on_every_path(ranks, world_size, is_symmetric):
    paths = set.union(
        *ranks.call(world_size, all_reductions, is_symmetric, environment=SMALL_TUNING)
    )
    if world_size > 1:
        assert paths == ({"ONE_SHOT", "SYMMETRIC"} if is_symmetric else {"ONE_SHOT", "STAGED"})


def combine_in_order(comm, dtype):
    combined = int("1234"[: comm.world_size])
    for count in (1, 500, 100_000):
        x = np.full(count, comm.rank + 1, dtype)
        assert (comm.all_reduce(x, APPEND) == combined).all()
        assert (comm.scan(x, APPEND) == int("1234"[: comm.rank + 1])).all()
        works = [comm.all_reduce(x, APPEND, async_op=True) for _ in range(2)]
        assert all((work.wait() == combined).all() for work in works)
    plan = comm.plan_all_reduce(x, APPEND)
    assert (plan() == combined).all()
    assert comm.all_reduce(comm.rank + 1, APPEND) == combined


@pytest.mark.ranks(2)
def test_ranks_are_combined_in_order(comm):
    combine_in_order(comm, np.int64)


@pytest.mark.soak
@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_more_ranks_are_combined_in_order(comm, dtype):
    combine_in_order(comm, dtype)


@pytest.mark.soak(quick=1)
@pytest.mark.ranks(2)
def test_half_types_are_rounded_once(comm):
    x = np.full(300, 2048 if comm.rank == 0 else 1.5, np.float16)
    half = ReduceOp.custom(lambda a, b: (a + b) / 2)
    assert (comm.all_reduce(x, half) == np.float16(1024.75)).all()


@pytest.mark.ranks(2)
def test_a_kept_op_takes_the_compiled_entry(comm, monkeypatch):
    x, out = np.ones(10, np.int64), np.empty(10, np.int64)
    comm.all_reduce(x, APPEND, out=out)
    monkeypatch.setattr(comm, "_call", None)
    for _ in range(3):
        out[:] = 0
        assert comm.all_reduce(x, APPEND, out=out) is out
        assert (out == 11).all()
    again = ReduceOp.custom(append_digits, commutative=False)
    comm.all_reduce(x, again, out=out)


# --- what ranks compare ---------------------------------------------------------------------------


@numba.njit
def scaled(a, b, scale=2):
    return a + scale * b


SCALE = 2
TABLE = np.arange(3)


def digests():
    """Return ops that must hash alike in every process, by name."""
    inner = 5.5
    functions = {
        "lambda": lambda a, b: a + b,
        "constants": lambda a, b: a + b * 2.5 + (a in (1, 2)) + (b in {3, 4, 5}),
        "closure": lambda a, b: a * inner + b,
        "global": lambda a, b: a * SCALE + b + TABLE[0],
        "helper": lambda a, b: scaled(a, b) + math.pi + np.float32(2),
        "compiled": scaled,
        "nested": lambda a, b: max([each * inner for each in (a, b)]),
    }
    return {name: ReduceOp.custom(function, 0.5).digest for name, function in functions.items()}


def digests_of_rank(comm):
    return digests()


def test_the_same_in_every_process(ranks):
    here = digests()
    assert len(set(here.values())) == len(here)
    assert ranks.call(2, digests_of_rank) == [here, here]
    source = (
        "import sys, runpy\n" + "\n" * 50 + "names = runpy.run_path(sys.argv[1])\n"
        "print(names['digests']())"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, __file__],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONHASHSEED": "7"},
    )
    assert done.stdout.strip() == str(here)


def _with_scale(function, value):
    """Return a function whose global SCALE is another one."""
    return types.FunctionType(function.__code__, {**function.__globals__, "SCALE": value})


def _closed_over(value):
    return lambda a, b: a + b * value


def _with_default(value):
    def function(a, b, c=value):
        return a + b * c

    return function


def _through_a_helper(value):
    helper = numba.njit(_closed_over(value))
    return lambda a, b: helper(a, b)


def _through_a_module(value):
    settings: Any = types.ModuleType("settings")
    settings.inner = types.ModuleType("settings.inner")
    settings.inner.scale = value
    return lambda a, b: a + b * settings.inner.scale


def _with_many_names(value):
    """Return a function whose attribute of a module is beyond the 256th name."""
    settings: Any = types.ModuleType("settings")
    settings.scale = value
    many = " + ".join(f"a.name_{place}" for place in range(300))
    scope: dict[str, Any] = {"settings": settings}
    exec(f"def function(a, b):\n    return {many} + settings.scale", scope)  # noqa: S102
    return scope["function"]


DIFFERENT = {
    "code": (lambda a, b: a + b, lambda a, b: a - b),
    "constant": (lambda a, b: a + b * 2.0, lambda a, b: a + b * 2.5),
    "type of a constant": (lambda a, b: a + b * 2, lambda a, b: a + b * 2.0),
    "sign of zero": (lambda a, b: a + b + 0.0, lambda a, b: a + b + -0.0),
    "name of a function": (lambda a, b: math.sin(a + b), lambda a, b: math.cos(a + b)),
    "closure": (_closed_over(2), _closed_over(3)),
    "array": (_closed_over(np.arange(3)), _closed_over(np.arange(1, 4))),
    "default": (_with_default(2), _with_default(3)),
    "helper": (_through_a_helper(2), _through_a_helper(3)),
    "attribute of a module": (_through_a_module(2), _through_a_module(3)),
    "attribute, after many names": (_with_many_names(2), _with_many_names(3)),
    "global": tuple(_with_scale(lambda a, b: a + b * SCALE, value) for value in (2, 3)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_functions(name):
    left, right = (ReduceOp.custom(function) for function in DIFFERENT[name])
    assert left.digest != right.digest
    assert left != right


def test_different_identities_and_commutativity():
    made = [
        ReduceOp.custom(append_digit, identity, commutative)
        for identity in (None, 0, 1)
        for commutative in (False, True)
    ]
    assert len(set(made)) == len(made)


def _reduce_with(comm, scale):
    x = np.ones(4)
    with pytest.raises(MismatchError) as caught:
        comm.all_reduce(x, ReduceOp.custom(lambda a, b: a + b * scale))
    assert (x == 1).all()
    assert comm.all_reduce(1) == comm.world_size
    return str(caught.value)


def _mismatch_of_scales(comm):
    return _reduce_with(comm, 2.0 if comm.rank == 1 else 3.0)


@pytest.mark.soak
def test_other_constants_on_one_rank_are_a_mismatch(ranks):
    for text in ranks.call(3, _mismatch_of_scales):
        assert "rank 1 called all_reduce(op=custom" in text
        assert "ranks 0, 2 called all_reduce(op=custom" in text
        assert "custom(<lambda>) #" in text


# --- objects --------------------------------------------------------------------------------------


def test_one_object_for_one_function():
    op = ReduceOp.custom(lambda a, b: a + b * 3.25)
    assert str(op) == "custom(<lambda>)"
    assert ReduceOp.custom(lambda a, b: a + b * 3.25) is op
    copy = cloudpickle.loads(cloudpickle.dumps(op))
    assert copy == op
    assert hash(copy) == hash(op)
    assert copy.function(1, 2) == 7.5
    assert pickle.loads(pickle.dumps(ReduceOp.SUM)) == ReduceOp.SUM
    gone = weakref.ref(ReduceOp.custom(lambda a, b: a + b * 4.25))
    gc.collect()
    assert gone() is None


def generator(a, b):
    yield a


def raising(a, b):
    if a > b:
        raise ValueError("no")
    return a


def asserting(a, b):
    assert a < b
    return a


RAISING = numba.njit(raising)
LIST = [1, 2]

NO_FUNCTIONS = [
    (7, "needs a function of two arguments, def or lambda; got 7"),
    (max, r"write lambda a, b: max\(a, b\)"),
    (np.maximum, r"write lambda a, b: maximum\(a, b\)"),
    (lambda a: a, "it must take two arguments: too many positional"),
    (lambda a, b, c: a, "it must take two arguments: missing a required argument"),
    (lambda a, b, *, c: a, "it must take two arguments: missing a required"),
    (generator, "generator is a generator"),
    (raising, "raising has a raise or an assert"),
    (asserting, "asserting has a raise or an assert"),
    (lambda a, b: RAISING(a, b), "raising has a raise or an assert"),
    (lambda a, b: LIST[0], "uses LIST, a list"),
]


@pytest.mark.parametrize(("function", "reason"), NO_FUNCTIONS)
def test_what_is_no_operation_is_refused(function, reason):
    with pytest.raises(ArgumentTypeError, match=reason):
        ReduceOp.custom(function)


@pytest.mark.ranks(2)
def test_refused_before_anything_moves(comm):
    ops = ReduceOp.custom(lambda a, b: a.x), ReduceOp.custom(lambda a, b: a / b)
    reasons = ("Unknown attribute 'x'", "its function returns float64")
    for op, reason in zip(ops, reasons, strict=True):
        with pytest.raises(ArgumentTypeError, match=reason):
            comm.all_reduce(np.ones(3, np.int32), op)
    with pytest.raises(ArgumentTypeError, match="identity="):
        comm.exclusive_scan(np.ones(3, np.int32), APPEND)
    with pytest.raises(ArgumentTypeError, match="not exactly a value of int32"):
        comm.exclusive_scan(np.ones(3, np.int32), ReduceOp.custom(append_digit, identity=0.5))
    with pytest.raises(ArgumentError, match="op must be a ReduceOp"):
        comm.all_reduce(np.ones(3), append_digit)
    assert comm.all_reduce(1) == 2


PROGRAM = """
import gpucoll, numpy as np

LEAST = 2.0


def least_above(a, b):  # the least value above a limit
    if a <= LEAST: return b
    return a if b <= LEAST else min(a, b)


def work(comm):
    op = gpucoll.ReduceOp.custom(least_above)
    return float(comm.all_reduce(np.array([5.0 - comm.rank]), op)[0])


if __name__ == "__main__":
    print(gpucoll.launch(work, 3, timeout_s=120))
"""


@pytest.mark.soak
def test_a_function_of_main_through_launch(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
        env={
            "PYTHONPATH": str(Path(gpucoll.__file__).parent.parent),
            config.CACHE_DIR: str(cache_folder().parent),  # compiled there already
        },
    )
    assert done.stdout.strip() == "[3.0, 3.0, 3.0]", done.stderr
