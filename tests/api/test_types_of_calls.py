"""What type checkers say that a call returns: mypy reads it here, and the objects are looked at."""

from __future__ import annotations

from types import UnionType
from typing import TYPE_CHECKING, Any, TypeAlias, Union, get_args, get_origin

import numpy as np
import numpy.typing as npt
import pytest

import gpucoll
from gpucoll import Communicator, MessageWork, Plan, Work

Floats: TypeAlias = npt.NDArray[np.float32]
Anything: TypeAlias = npt.NDArray[Any]

if TYPE_CHECKING:  # tools/check.py --only types
    from typing_extensions import assert_type as expect
else:

    def expect(value, kind):
        assert is_a(value, kind), f"{type(value)} instead of {kind}"
        return value


def is_a(value: Any, kind: Any) -> bool:
    """Return whether this is an object of that static type; what a Work or Plan brings, too."""
    origin, parameters = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(is_a(value, one) for one in parameters)
    if origin in (np.ndarray, npt.NDArray):  # from NumPy 2.5 on the latter is a type of its own
        (scalar,) = get_args(parameters[1]) if origin is np.ndarray else parameters
        return type(value) is np.ndarray and scalar in (Any, value.dtype.type)
    if origin is list:
        return type(value) is list and all(is_a(item, parameters[0]) for item in value)
    if origin is tuple:
        return type(value) is tuple and all(map(is_a, value, parameters))
    if origin in (Work, MessageWork, Plan):
        brings = value if origin is Plan else value.wait
        return isinstance(value, origin) and is_a(brings(), parameters[0])
    return kind is Any or kind is value or type(value) is kind


@pytest.mark.ranks(2)
def test_arrays_numbers_and_lists(comm):
    same_kind(comm, np.ones(4, np.float32))
    other_sizes(comm, np.ones(4, np.float32))


def same_kind(comm: Communicator, x: Floats) -> None:
    expect(comm.all_reduce(x), Floats)
    expect(comm.all_reduce(x, out=x), Floats)
    expect(comm.all_reduce(x, compression="int8_block", residual=np.zeros_like(x)), Floats)
    expect(comm.all_reduce([x, x]), list[Floats])
    expect(comm.all_reduce((x, np.float64(1))), tuple[Floats, np.float64])
    expect(comm.all_reduce(bytearray(3)), bytearray)
    expect(comm.all_reduce(5), int)
    expect(comm.all_reduce(5, "avg"), int)
    expect(comm.all_reduce(2.5), float)
    expect(comm.all_reduce(1j), complex)
    expect(comm.all_reduce(True), bool)
    expect(comm.all_reduce(np.int16(3)), np.int16)
    expect(comm.reduce(x), Floats | None)
    expect(comm.reduce(5), int | None)
    expect(comm.reduce([x]), list[Floats] | None)
    expect(comm.scan(x), Floats)
    expect(comm.exclusive_scan(5), int)
    expect(comm.broadcast(x), Floats)
    expect(comm.broadcast(x if comm.rank == 0 else None, out=x), Floats)
    expect(comm.broadcast(b"abc"), bytes)


def other_sizes(comm: Communicator, x: Floats) -> None:
    expect(comm.reduce_scatter(x), Floats)
    expect(comm.all_gather(x), Floats)
    expect(comm.all_gather(x, counts=[4, 4]), Floats)
    blocks = [np.empty_like(x), np.empty_like(x)]
    expect(comm.all_gather(x, out=blocks), list[Floats])
    expect(comm.all_gather(x, out=blocks, async_op=True), Work[list[Floats]])
    expect(comm.gather(x, out=blocks), list[Floats] | None)
    expect(comm.reduce_scatter(blocks), Floats)
    expect(comm.reduce_scatter(blocks, out=x, async_op=True), Work[Floats])
    expect(comm.scatter(blocks), Floats)
    expect(comm.all_to_all(blocks), list[Floats])
    expect(comm.all_to_all(blocks, out=[np.empty_like(x) for x in blocks]), list[Floats])
    expect(comm.plan_all_gather(x, out=blocks), Plan[list[Floats]])
    expect(comm.plan_reduce_scatter(blocks), Plan[Floats])
    expect(comm.plan_all_to_all(blocks, out=[np.empty_like(x) for x in blocks]), Plan[list[Floats]])
    expect(comm.all_to_all(blocks, out=np.empty(8, np.float32)), Floats)
    expect(comm.all_gather(5), Anything)
    expect(comm.all_gather(np.int16(5)), Anything)
    expect(comm.gather(x), Floats | None)
    expect(comm.gather(5), Anything | None)
    expect(comm.scatter(x), Floats)
    expect(comm.scatter(x if comm.rank == 0 else None, out=x[:2].copy()), Floats)
    expect(comm.all_to_all(x), Floats)
    expect(comm.all_to_all(x, send_counts=[1, 3]), Floats)


@pytest.mark.ranks(2)
def test_works_and_plans(comm):
    works(comm, np.ones(4, np.float32), is_async=True)
    plans(comm, np.ones(4, np.float32))


def works(comm: Communicator, x: Floats, is_async: bool) -> None:
    expect(comm.all_reduce(x, async_op=True), Work[Floats])
    expect(comm.all_reduce(x, async_op=True).wait(), Floats)
    expect(comm.all_reduce(x, async_op=False), Floats)
    expect(comm.all_reduce(x, async_op=is_async), Floats | Work[Floats])
    expect(comm.all_reduce(5, async_op=True), Work[int])
    expect(comm.all_gather(5, async_op=True), Work[Anything])
    expect(comm.gather(5, async_op=True), Work[Anything | None])
    expect(comm.reduce(x, async_op=True), Work[Floats | None])
    expect(comm.broadcast([x], async_op=True, timeout_s=30), Work[list[Floats]])
    expect(comm.scatter(x, async_op=True), Work[Floats])


def plans(comm: Communicator, x: Floats) -> None:
    expect(comm.plan_all_reduce(x), Plan[Floats])
    expect(comm.plan_all_reduce(x)(), Floats)
    expect(comm.plan_all_reduce(x).out, Floats)
    expect(comm.plan_reduce(x), Plan[Floats | None])
    expect(comm.plan_gather(x), Plan[Floats | None])
    expect(comm.plan_scatter(x), Plan[Floats])


@pytest.mark.ranks(2)
def test_messages_objects_and_memory(comm):
    messages(comm, np.ones(4, np.float32), 1 - comm.rank)
    objects(comm)
    memory(comm)


def messages(comm: Communicator, x: Floats, other: int) -> None:
    expect(comm.send_recv(x, other, other), Floats)
    expect(comm.send_recv(5, other, other), int)
    expect(comm.send_recv(x, other, other, np.ones_like(x), async_op=True), MessageWork[Floats])
    for _ in range(5):
        expect(comm.send(x, other, async_op=True), MessageWork[None])
    expect(comm.recv(x), Floats)
    expect(comm.recv(like=x), Floats)
    expect(comm.recv(source=other), Anything)
    expect(comm.recv(shape=4, dtype=np.float32), Any)
    expect(comm.recv(x, async_op=True), MessageWork[Floats])


def objects(comm: Communicator) -> None:
    expect(comm.broadcast_object([0.1] if comm.rank == 0 else None), list[float])
    expect(comm.broadcast_object(None), Any)
    expect(comm.all_gather_object("ab"), list[str])
    expect(comm.gather_object(comm.rank), list[int] | None)
    expect(comm.scatter_object(["x", "y"] if comm.rank == 0 else None), str)
    expect(comm.all_reduce_object(1, max), int)


def memory(comm: Communicator) -> None:
    expect(comm.empty(3), Floats)
    expect(comm.empty((3, 4), np.int64), npt.NDArray[np.int64])
    expect(comm.empty(3, "int64"), Anything)


def test_launch():
    expect(gpucoll.launch(rank_of, ranks=2), list[int])


def rank_of(comm: Communicator) -> int:
    return comm.rank


def never_called(comm: Communicator, x: Floats) -> None:
    """Fail the check where a type checker no longer refuses these."""
    comm.all_reduce(None)  # type: ignore[call-overload]
    comm.all_reduce("text")  # type: ignore[type-var]
    comm.all_reduce([1.0, 2.0])  # type: ignore[type-var]
    comm.all_gather([x, x])  # type: ignore[call-overload]
    comm.all_reduce(x, timeout=3)  # type: ignore[call-overload]
    comm.scan([x])  # type: ignore[call-overload]
    comm.reduce_scatter(5)  # type: ignore[call-overload]
    comm.reduce(x).sum()  # type: ignore[union-attr]
    comm.all_reduce(x, async_op=True).sum()  # type: ignore[attr-defined]
