"""What users pass: views, orders, scalars, nothing at all; and results of the same kind back."""

from __future__ import annotations

import numpy as np
import pytest
from tests.collective_cases import SMALL_TUNING


def base(dtype="float32"):
    return (np.arange(24 * 60) % 11).reshape(24, 60).astype(dtype)


def strided(whole):
    return whole[::2, 3::5]


def negative(whole):
    return whole[::-1, ::-1]


def columns(whole):
    return whole.T


def fortran(whole):
    return np.asfortranarray(whole)


def one_column(whole):
    return whole[:, 7]


def repeated(whole):
    return np.broadcast_to(whole[0], whole.shape)


def inserted(whole):
    return whole[:, None, ::3, None]


VIEWS = (strided, negative, columns, fortran, one_column, repeated, inserted)


def reduce_view(comm, view):
    x = view(base())
    before = x.copy()
    result = comm.all_reduce(x)
    got = comm.broadcast(result * (comm.rank + 1), root=1)
    return (
        np.array_equal(result, before * comm.world_size)
        and result.shape == x.shape
        and np.array_equal(x, before)
        and np.array_equal(got, before * comm.world_size * 2)
    )


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("tuning", [{}, SMALL_TUNING])
def test_views_as_input(ranks, view, tuning):
    assert ranks.call(3, reduce_view, view, environment=tuning) == [True] * 3


def reduce_into_view(comm, view):
    whole = np.full((24, 60), -1, np.float32)
    out = view(whole)
    if not out.flags.writeable:
        return True
    outside = whole.copy()
    view(outside)[...] = 0
    x = np.arange(out.size, dtype=np.float32)
    result = comm.all_reduce(x, out=out)
    right = np.array_equal(out.reshape(-1), x * comm.world_size) and result is out
    if np.shares_memory(out, whole):
        right = right and (whole[outside == -1] == -1).all()
    return bool(right)


@pytest.mark.parametrize("view", VIEWS)
def test_views_as_output(ranks, view):
    assert ranks.call(2, reduce_into_view, view) == [True, True]


def reduce_view_in_place(comm, view):
    x = view(base())
    before = x.copy()
    comm.all_reduce(x, out=x)
    return np.array_equal(x, before * comm.world_size)


@pytest.mark.parametrize("view", [strided, negative, columns, fortran, one_column, inserted])
def test_views_in_place(ranks, view):
    assert ranks.call(2, reduce_view_in_place, view) == [True, True]


def reduce_into_other_shape(comm):
    x = np.arange(12.0)
    out = np.empty((3, 4))
    same = comm.all_reduce(x, out=out)
    reshaped = comm.all_reduce(x, out=x.reshape(2, 6))  # the same memory: in place
    return same is out, out.tolist(), reshaped.shape, x.tolist()


def test_out_may_have_another_shape(ranks):
    sums = np.arange(12.0) * 2
    for is_same, out, shape, x in ranks.call(2, reduce_into_other_shape):
        assert (is_same, shape) == (True, (2, 6))
        assert out == sums.reshape(3, 4).tolist()
        assert x == sums.tolist()


# --- numbers, and arrays of no or no dimension ----------------------------------------------------

NUMBERS = [
    3,
    -2.5,
    1 + 2j,
    True,
    np.float32(1.5),
    np.int8(100),
    np.uint64(2**63),
    np.bool_(False),
    np.complex64(1j),
    np.float16(0.1),
]


def reduce_number(comm, value):
    return (
        comm.all_reduce(value),
        comm.broadcast(value, root=1),
        comm.all_reduce(value, "max")
        if (not isinstance(value, (complex, np.complexfloating)))
        else None,
    )


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: f"{type(value).__name__}")
def test_numbers_come_back_as_their_kind(ranks, value):
    for total, same, greatest in ranks.call(3, reduce_number, value):
        array = np.asarray(value)
        with np.errstate(over="ignore"):
            expected = array + array + array
        if array.dtype == np.float16:
            expected = (array.astype(np.float32) * 3).astype(np.float16)
        assert type(total) is type(value)
        assert total == expected.astype(array.dtype)
        assert type(same) is type(value)
        assert same == value
        assert greatest is None or (greatest == value and type(greatest) is type(value))


def reduce_shapes(comm, shapes):
    found = []
    for shape in shapes:
        x = np.full(shape, comm.rank + 1, np.int32)
        total = comm.all_reduce(x)
        again = comm.all_reduce(x, out=np.empty_like(x))
        sent = comm.broadcast(x, root=comm.world_size - 1)
        comm.all_reduce(x, out=x)
        found.append(
            all(
                isinstance(result, np.ndarray)
                and result.shape == shape
                and (result == expected).all()
                for result, expected in ((total, 6), (again, 6), (sent, 3), (x, 6))
            )
        )
    return found


def test_shapes_with_nothing_and_without_dimensions(ranks):
    shapes = [(), (0,), (1,), (0, 5), (3, 0, 2), (1, 1, 1), (2, 1, 3, 1, 2, 1), (1,) * 32]

    assert ranks.call(3, reduce_shapes, shapes) == [[True] * len(shapes)] * 3


# --- memory of comm.empty -------------------------------------------------------------------------


def reduce_shared_views(comm):
    """Views of one shared array at any offset, another one on each rank."""
    pool = comm.empty(200_000, np.uint8)
    paths, wrong = set(), 0
    for turn, count in enumerate((1, 63, 257, 1000, 5000, 9001, 20_000)):
        for step in (0, 1, 4, 100):
            start = 17 * turn + step * (comm.rank + 1)
            x = pool[start : start + 4 * count].view(np.float32)
            x[...] = np.arange(count) % 13
            y = pool[100_000 + 3 * start :][: 4 * count].view(np.float32)
            comm.all_reduce(x, out=y)
            paths.add(comm._backend.last_path().name)
            wrong += int((y != (np.arange(count) % 13) * comm.world_size).sum())
            comm.all_reduce(x, out=x)
            wrong += int((x != (np.arange(count) % 13) * comm.world_size).sum())
    return paths, wrong


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_views_of_shared_arrays_at_any_offset(ranks, world_size):
    for paths, wrong in ranks.call(world_size, reduce_shared_views):
        assert wrong == 0
        assert "SYMMETRIC" in paths


def outlive(comm):
    array = comm.empty((100, 100), "float64")
    array[:] = comm.rank
    other = comm.duplicate()
    other.all_reduce(array, out=array)
    other.close()
    kind, shape = type(array), array.shape
    comm.all_reduce(array, out=array)
    return kind is np.ndarray, shape, float(array.sum())


def test_shared_arrays_serve_every_communicator_of_the_process(ranks):
    assert ranks.call(2, outlive) == [(True, (100, 100), 20_000.0)] * 2


@pytest.mark.parametrize("shape", [0, 5, (), (0, 3), (2, 3), [4, 1], np.int64(3)])
@pytest.mark.parametrize("dtype", ["float32", "complex128", "S3", [("a", "i4"), ("b", "f8")]])
def test_empty(ranks, shape, dtype):
    def make(comm):
        array = comm.empty(shape, dtype)
        return array.shape, array.dtype, array.flags.c_contiguous, array.flags.writeable

    wanted = np.empty(shape, dtype)
    assert ranks.call(2, make) == [(wanted.shape, wanted.dtype, True, True)] * 2


def alone(comm):
    x = np.array([7, -7], np.int8)
    return (
        comm.all_reduce(x, "avg").tolist(),
        comm.all_reduce(x, "lor").tolist(),
        comm.broadcast(x).tolist(),
        comm.all_gather_object("a"),
        comm.split(3, 1).world_size,
    )


def test_one_rank_alone(ranks):
    assert ranks.call(1, alone) == [([7, -7], [1, 1], [7, -7], ["a"], 1)]
