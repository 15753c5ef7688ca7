"""What else a communicator does: objects, split, duplicate, plans, works, describe, the errors."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from tests import oracle

import gpucoll
from gpucoll import errors

# --- objects ------------------------------------------------------------------------------------


def value_of(rank, size):
    return {"rank": rank, "data": "x" * (size * (rank + 1)), "array": np.arange(rank)}


def exchange(comm, size):
    mine = value_of(comm.rank, size)
    last = comm.world_size - 1
    everyone = [value_of(rank, size) for rank in range(comm.world_size)]
    return [
        repr(comm.broadcast_object(mine if comm.rank == last else None, root=last)),
        repr(comm.all_gather_object(mine)),
        repr(comm.gather_object(mine, root=last)),
        repr(comm.scatter_object(everyone if comm.rank == 0 else None)),
        comm.all_reduce_object([comm.rank], list.__add__),
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", [0, 1000, 1015, 1016, 1017, 70_000])
def test_objects_of_any_size(ranks, world_size, size):
    values = [value_of(rank, size) for rank in range(world_size)]
    last = world_size - 1
    expected = zip(
        map(repr, oracle.broadcast_object(values, last)),
        map(repr, oracle.all_gather_object(values)),
        map(repr, oracle.gather_object(values, last)),
        map(repr, oracle.scatter_object(values)),
        oracle.all_reduce_object([[rank] for rank in range(world_size)], list.__add__),
        strict=True,
    )

    replies = ranks.call(world_size, exchange, size)

    assert replies == [list(items) for items in expected]


def test_objects_are_combined_in_rank_order(ranks):
    assert (
        ranks.call(4, lambda comm: comm.all_reduce_object(str(comm.rank), str.__add__))
        == ["0123"] * 4
    )


def test_a_function_that_fails_on_one_rank_disturbs_no_other(ranks):
    def combine(comm):
        def add(left, right):
            if comm.rank == 1:
                raise KeyError("mine")
            return left + right

        try:
            total = comm.all_reduce_object(1, add)
        except KeyError:
            total = "failed"
        return total, comm.all_reduce(1)

    assert ranks.call(3, combine) == [(3, 3), ("failed", 3), (3, 3)]


# --- split and duplicate ------------------------------------------------------------------------


def split_by(comm, colors, keys):
    part = comm.split(colors[comm.rank], keys[comm.rank])
    if part is None:
        return None, comm.all_reduce(1)
    with part:
        return part.all_gather_object(comm.rank), part.rank, comm.all_reduce(1)


@pytest.mark.parametrize(
    ("colors", "keys", "groups"),
    [
        ([0, 1, 0, 1], [0, 0, 0, 0], [[0, 2], [1, 3]]),
        ([5, 5, 5, 5], [3, 2, 1, 0], [[3, 2, 1, 0]]),
        ([0, None, 0, 7], [1, 0, 0, 0], [[2, 0], [3]]),
        ([None] * 4, [0] * 4, []),
        ([-1, 2**40, -1, -1], [0, 0, -5, 9], [[2, 0, 3], [1]]),
    ],
)
def test_split(ranks, colors, keys, groups):
    for rank, reply in enumerate(ranks.call(4, split_by, colors, keys)):
        group = next((group for group in groups if rank in group), None)
        assert reply == ((None, 4) if group is None else (group, group.index(rank), 4))


def split_again(comm):
    found = []
    with (
        comm.split(comm.rank // 2) as half,
        half.duplicate() as twin,
        twin.split(0, -twin.rank) as turned,
    ):
        for made in (comm, half, twin, turned, comm):
            found.append(made.all_reduce(comm.rank))
        found.append(turned.all_gather_object(comm.rank))
    return found


def test_split_of_a_split(ranks):
    low, high = [6, 1, 1, 1, 6, [1, 0]], [6, 5, 5, 5, 6, [3, 2]]

    assert ranks.call(4, split_again) == [low, low, high, high]


def use_in_two_threads(comm):
    other = comm.duplicate()
    totals = {}

    def work(name, which, size):
        x = np.full(size, comm.rank + 1.0)
        totals[name] = sum(float(which.all_reduce(x)[-1]) for _ in range(100))

    threads = [
        threading.Thread(target=work, args=arguments)
        for arguments in (("first", comm, 10), ("second", other, 20_000))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    other.close()
    return totals


def test_two_communicators_in_two_threads(ranks):
    assert ranks.call(3, use_in_two_threads) == [{"first": 600.0, "second": 600.0}] * 3


def close_parent_first(comm):
    child = comm.duplicate()
    other = comm.split(0)
    other.close()
    total = child.all_reduce(np.ones(30_000))[0]
    shared = child.empty(5000)
    shared[:] = 1
    child.all_reduce(shared, out=shared)
    child.close()
    return total, float(shared.sum())


def test_communicators_close_in_any_order(ranks):
    assert ranks.call(2, close_parent_first) == [(2.0, 10_000.0)] * 2


# --- describe -----------------------------------------------------------------------------------


def test_describe(ranks):
    def describe(comm):
        description = comm.describe()
        return str(description), dict(description.facts)

    for rank, (text, facts) in enumerate(ranks.call(2, describe)):
        assert text.startswith(f"gpucoll {gpucoll.__version__}, rank {rank} of 2\n")
        assert facts["same bits on every rank"].startswith("yes")
        assert all(name in text and fact in text for name, fact in facts.items())
        assert "backend cpu" in facts["host arrays"]


# --- names --------------------------------------------------------------------------------------


def test_the_public_names():
    others = {
        "Communicator",
        "Compression",
        "Description",
        "Message",
        "MessageWork",
        "Plan",
        "ReduceOp",
        "Work",
        "init",
        "join",
        "launch",
        "wait_all",
        "wait_any",
    }
    others |= {"ANY_SOURCE", "ANY_TAG"}
    names = sorted({*errors.__all__, *others, "__version__"})

    assert gpucoll.__all__ == names
    assert dir(gpucoll) == sorted(names)
    for name in names:
        assert getattr(gpucoll, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'all_gather'"):
        gpucoll.all_gather  # noqa: B018


def test_the_errors_tree():
    tree = {
        "UsageError": ("GpucollError",),
        "ArgumentError": ("UsageError", "ValueError"),
        "ArgumentTypeError": ("UsageError", "TypeError"),
        "StateError": ("UsageError", "RuntimeError"),
        "MismatchError": ("GpucollError",),
        "BackendUnavailableError": ("GpucollError",),
        "BackendError": ("GpucollError",),
        "DeadlineError": ("GpucollError", "TimeoutError"),
        "PeerLostError": ("GpucollError",),
        "AbortedError": ("GpucollError",),
        "SharedMemoryError": ("GpucollError", "MemoryError"),
        "RendezvousError": ("GpucollError",),
        "AuthenticationError": ("RendezvousError",),
        "RendezvousDeadlineError": ("RendezvousError", "DeadlineError"),
        "LaunchError": ("GpucollError",),
        "ShrinkError": ("GpucollError",),
        "SecureSumError": ("GpucollError",),
        "TooFewClientsError": ("SecureSumError",),
        "GpucollError": ("Exception",),
    }

    assert set(errors.__all__) == set(tree)
    for name, bases in tree.items():
        kind = getattr(errors, name)
        assert tuple(base.__name__ for base in kind.__bases__) == bases
        assert name in (errors.__doc__ or "")


def test_mpi_without_mpi4py_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # as if it were not installed
    with pytest.raises(errors.BackendUnavailableError, match="pip install mpi4py mpich"):
        gpucoll.init(backend="mpi")
    with pytest.raises(errors.BackendUnavailableError, match="pip install mpi4py mpich"):
        gpucoll.Communicator.from_mpi(None)


def test_an_unknown_backend_is_refused():
    with pytest.raises(errors.ArgumentError, match="backend must be one of auto, cpu"):
        gpucoll.init(backend="gloo")
